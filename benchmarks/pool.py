"""What a draw costs from a large pool: 100,000 waiting trajectories, batches of 1,024, at most a tenth rejected.

`draw_ratio`: scoring and choosing (what is rejected and what is drawn, `pace` with length-fair rejection) over
`numpy.partition` of the same scores at the same place. Both are timed in turns in the same loop; medians are compared.
`draw_ms`: the whole draw with its ledger, payloads and metrics; the median over pools filled anew.

Run: python benchmarks/pool.py [--waiting 100000] [--repeats 200]
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from pace_agent.ledger import Ledger, State
from pace_agent.pool import Entry, PacePool, PoolOptions, Spans
from pace_agent.pool.policies import make_policy

VERSION = 30


def filled(options: PoolOptions, waiting: int, seed: int) -> PacePool[int]:
    """A pool of log-normal lengths, where long rollouts hold more versions and so older ones."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6.0, 1.0, waiting), 1, 20_000).astype(int).tolist()
    completed = np.sort(rng.integers(VERSION - 20, VERSION + 1, waiting)).tolist()
    ledger = Ledger()
    pool: PacePool[int] = PacePool(options, ledger)
    entries = []
    for length, version in zip(lengths, completed, strict=True):
        ids = ledger.submit()
        ledger.move(ids, State.GROUPING)
        runs = min(length, 1 + min(length // 400, version))
        counts = [length // runs] * (runs - 1) + [length - length // runs * (runs - 1)]
        versions = tuple(range(version - runs + 1, version + 1))
        entries.append(Entry(ids, ids, Spans(versions, tuple(counts), (0,) * runs), version))
    pool.add(entries)
    return pool


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def choosing(pool: PacePool[int], options: PoolOptions, repeats: int) -> tuple[float, float]:
    """Median milliseconds of scoring and choosing, and of numpy.partition of the same scores."""
    view = pool.view(VERSION)
    scores = VERSION - view.effective_version
    kept = len(view) - make_policy(options).select(view).rejected.size
    ours, theirs = [], []
    for _ in range(repeats):
        policy = make_policy(options)
        theirs.append(timed(lambda: np.partition(scores, kept)))
        ours.append(timed(lambda policy=policy: policy.select(pool.view(VERSION))))  # type: ignore[misc]
    return median(ours), median(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--draws", type=int, default=5)
    args = parser.parse_args()
    print(f"{args.waiting:,} waiting, batches of 1,024, cap 0.1; milliseconds\n")
    print(f"{'fairness':>10} {'rejected':>9} {'partition':>10} {'choosing':>9} {'ratio':>6} {'whole draw':>11}")
    figures = {}
    for fairness in ("none", "length"):
        options = PoolOptions(batch_size=1024, cap=0.1, fairness=fairness)
        pool = filled(options, args.waiting, seed=0)
        ours, theirs = choosing(pool, options, args.repeats)
        draws, rejected = [], 0
        for seed in range(args.draws):
            fresh = filled(options, args.waiting, seed)
            draws.append(timed(lambda fresh=fresh: fresh.draw(VERSION)))  # type: ignore[misc]
            rejected = fresh.rejected_total
        figures[fairness] = {"draw_ratio": round(ours / theirs, 2), "draw_ms": round(median(draws), 2)}
        print(
            f"{fairness:>10} {rejected:>9,} {theirs:>10.3f} {ours:>9.3f} {ours / theirs:>6.2f} {median(draws):>11.2f}",
            flush=True,
        )
    print(json.dumps(figures["length"]))


if __name__ == "__main__":
    main()
