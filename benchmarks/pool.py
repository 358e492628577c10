"""What a draw costs from a large pool: 100,000 waiting trajectories, batches of 1,024, at most a tenth rejected.

`draw_ratio`: scoring and choosing (what is rejected and what is drawn, `pace` with length-fair rejection) over
`numpy.partition` of the same scores at the same place. The two are timed in turns; the median of the pairs' ratios.
`draw_ms`: the whole draw with its ledger, payloads and metrics; the median over pools filled anew.
All of it is CPU time of the one thread that works, so that a busy machine does not count as a slow one.

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

VERSION = 200
MEAN = 665


def filled(options: PoolOptions, waiting: int, seed: int) -> PacePool[int]:
    """Log-normal lengths with a mean of one step's time, completed evenly over the last 100 versions.

    A rollout is stamped with every version that was published while it sampled, so that long ones are older.
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6.0, 1.0, waiting), 1, 20 * MEAN).astype(int).tolist()
    ends = np.sort(rng.uniform(VERSION - 99, VERSION + 1, waiting)).tolist()
    ledger = Ledger()
    pool: PacePool[int] = PacePool(options, ledger)
    entries = []
    for length, end in zip(lengths, ends, strict=True):
        new = ledger.submit()
        ledger.move(new, State.GROUPING)
        # Token i is sampled (length - i) / MEAN steps before the end.
        first, last = int(end - length / MEAN), int(end)
        cuts = [0, *(length - round((end - v) * MEAN) for v in range(first + 1, last + 1)), length]
        runs = [(v, b - a) for v, a, b in zip(range(first, last + 1), cuts, cuts[1:], strict=False) if b > a]
        versions, counts = zip(*runs, strict=True)
        entries.append(Entry(new, new, Spans(versions, counts, (0,) * len(runs)), last))
    pool.add(entries)
    return pool


def timed(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return (time.thread_time() - started) * 1e3


def choosing(pool: PacePool[int], options: PoolOptions, repeats: int) -> tuple[float, float, float]:
    """Median milliseconds of scoring and choosing and of numpy.partition of the same scores, and their median ratio."""
    view = pool.view(VERSION)
    scores = VERSION - view.effective_version
    kept = len(view) - make_policy(options).select(view).rejected.size
    ours, theirs = [], []
    for _ in range(repeats):
        policy = make_policy(options)
        theirs.append(timed(lambda: np.partition(scores, kept)))
        ours.append(timed(lambda policy=policy: policy.select(pool.view(VERSION))))  # type: ignore[misc]
    return median(ours), median(theirs), median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--draws", type=int, default=5)
    args = parser.parse_args()
    print(f"{args.waiting:,} waiting, batches of 1,024, cap 0.1; milliseconds of CPU time\n")
    print(f"{'fairness':>10} {'rejected':>9} {'partition':>10} {'choosing':>9} {'ratio':>6} {'whole draw':>11}")
    figures = {}
    for fairness in ("none", "length"):
        options = PoolOptions(batch_size=1024, cap=0.1, fairness=fairness)
        pool = filled(options, args.waiting, seed=0)
        ours, theirs, ratio = choosing(pool, options, args.repeats)
        draws, rejected = [], 0
        for seed in range(args.draws):
            fresh = filled(options, args.waiting, seed)
            draws.append(timed(lambda fresh=fresh: fresh.draw(VERSION)))  # type: ignore[misc]
            rejected = fresh.rejected_total
        figures[fairness] = {"draw_ratio": round(ratio, 2), "draw_ms": round(median(draws), 2)}
        print(
            f"{fairness:>10} {rejected:>9,} {theirs:>10.3f} {ours:>9.3f} {ratio:>6.2f} {median(draws):>11.2f}",
            flush=True,
        )
    print(json.dumps(figures["length"]))


if __name__ == "__main__":
    main()
