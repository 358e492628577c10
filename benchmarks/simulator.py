"""How fast the simulator is, what it needs, and whether it gives the figures that the design's tables have.

`trajectories_per_second`: completed rollouts per second of CPU time of the one thread that works, for a million of them
under `pace` with length-fair rejection: 256 slots, batches of 64, production 1.5 times consumption, all in the pool
that training uses. The best of several runs: what else the machine does can only slow one down.
`mb_per_million`: what the process grew by at its largest, in MB of 10^6 bytes, for a million.
`token_staleness`, `tail_share`: by rule, means over seeds, steps 100 to 400. Beside them stands what the tables have;
with another production than 1.5 there is nothing to compare with.

Run: python benchmarks/simulator.py [--trajectories 1000000] [--repeats 3] [--seeds 8] [--production 1.5] [--all]
`--all` times a million of every policy.
"""

import argparse
import json
import resource
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

from pace_agent.pool import PoolOptions
from pace_agent.simulate import Figures, Simulator, Workload
from pace_agent.simulate.rules import RULES, rule_options

BATCH = 64
Known = tuple[float, float, float, float] | None
DESIGN: dict[str, tuple[dict[str, Any], Known]] = {
    "bounded_admission_eta4": ({"policy": "bounded_admission", "eta": 4}, (4.84, 1.04, 1.01, 0.0)),
    "waiting_only": ({"staleness": "none", "fairness": "none"}, (3.85, 1.04, 1.02, 0.34)),
    "S": ({"fairness": "none"}, (1.76, 0.02, 0.54, 0.34)),
    "S_8_bins": ({"bins": 8}, (2.69, 0.84, 0.92, 0.34)),
    "S_16_bins": ({"bins": 16}, (3.00, 1.02, 0.97, 0.34)),
    "S_32_bins": ({"bins": 32}, (3.27, 1.03, 0.99, 0.34)),
    "sync": ({"policy": "sync"}, None),
    "unfiltered": ({"policy": "unfiltered"}, None),
    "max_staleness_4": ({"policy": "max_staleness", "max_staleness": 4}, None),
    "drop_oldest": ({"policy": "drop_oldest"}, None),
}
"""Pool options of each rule; staleness, tail share, length ratio and rejected share in the table of the rules."""

SLOTS = {256: (1.00, 3.00, 1.02, 0.34, 4.84), 170: (1.00, 2.99, 1.02, 0.17, 4.76)} | {
    147: (1.02, 3.03, 1.04, 0.10, 4.66),
    134: (1.03, 3.06, 1.04, 0.06, 4.40),
}
"""Step time, then with 16 bins staleness, tail share and rejected share, then the staleness of bounded admission."""


def timed(rule: str, production: float, trajectories: int) -> tuple[float, float]:
    """Trajectories per second of CPU time, and megabytes that the process's peak rose by, per million."""
    per_step = BATCH if rule in ("sync", "bounded_admission") else BATCH * production
    simulator = Simulator(
        Workload(ratio=production), rule_options(rule, batch_size=BATCH), steps=max(200, round(trajectories / per_step))
    )
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    ledger = simulator.run().ledger
    seconds = time.thread_time() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6
    completed = ledger["submitted"] - ledger["running"]
    return completed / seconds, grown * 1e6 / completed


def runs(workload: Workload, options: dict[str, Any], seeds: int, step_seconds: float | None = None) -> list[Figures]:
    pool = PoolOptions(batch_size=BATCH, **options)
    return [Simulator(workload, pool, seed=seed, step_seconds=step_seconds).run() for seed in range(seeds)]


def average(figures: Sequence[Figures], name: str) -> float:
    return mean(getattr(run, name) for run in figures)


def beside(value: float, known: float | None) -> str:
    """The figure, what the table has, and by how much they differ."""
    if known is None:
        return f"{value:6.2f}" + " " * 14
    return f"{value:6.2f} {known:5.2f} {value / known - 1:+6.1%} " if known else f"{value:6.2f} {known:5.2f} {'':7}"


def compare_rules(production: float, seeds: int) -> dict[str, dict[str, float]]:
    """Print the table of the rules; token staleness and tail share by rule."""
    columns = ("token_staleness", "tail_share", "length_ratio", "rejected_share")
    print(f"\nproduction {production:g} times consumption, {seeds} seeds; each figure, the table's, the difference")
    print(f"{'rule':>22}  {'token staleness':<20} {'tail share':<20} {'length ratio':<20} {'rejected':<20} {'busy':>5}")
    found: dict[str, dict[str, float]] = {"token_staleness": {}, "tail_share": {}}
    for name, (options, table) in DESIGN.items():
        figures = runs(Workload(ratio=production), options, seeds)
        values = [average(figures, column) for column in columns]
        known = table if table is not None and production == 1.5 else (None,) * 4
        cells = " ".join(beside(value, other) for value, other in zip(values, known, strict=True))
        print(f"{name:>22} {cells} {average(figures, 'busy'):>5.0%}", flush=True)
        found["token_staleness"][name], found["tail_share"][name] = round(values[0], 3), round(values[1], 3)
    return found


def compare_slots(seeds: int) -> None:
    """Print the table of the concurrency: the trainer's pace is fixed where 256 slots outrun it 1.5 times."""
    pace = Workload().step_seconds(BATCH)
    print("\nfewer slots, the same trainer; each figure, the table's, the difference")
    print(
        f"{'slots':>6} {'ratio':>6}  {'step time':<20} {'16 bins: staleness':<20} {'tail share':<20} {'rejected':<20} "
        "eta 4: staleness"
    )
    for slots, table in SLOTS.items():
        workload = Workload(slots=slots)
        fair = runs(workload, {}, seeds, pace)
        bounded = runs(workload, {"policy": "bounded_admission", "eta": 4}, seeds, pace)
        values = [1 / average(fair, "busy")]
        values += [average(fair, name) for name in ("token_staleness", "tail_share", "rejected_share")]
        values.append(average(bounded, "token_staleness"))
        cells = " ".join(beside(value, other) for value, other in zip(values, table, strict=True))
        print(f"{slots:>6} {workload.production * pace / BATCH:>6.2f} {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--production", type=float, default=1.5, help="over consumption")
    parser.add_argument("--all", action="store_true", help="time every policy")
    args = parser.parse_args()
    timed("pace-length", args.production, 20_000)
    rules = ["pace-length", *(name for name in RULES if name != "pace-length")] if args.all else ["pace-length"]
    speeds = {}
    for rule in rules:
        tries = [timed(rule, args.production, args.trajectories) for _ in range(args.repeats)]
        # Only the first run of the process finds its memory unused.
        speeds[rule] = (max(speed for speed, _ in tries), tries[0][1])
        print(f"{rule:>22}: {speeds[rule][0]:>9,.0f} trajectories per second", flush=True)
    print(f"{speeds['pace-length'][1]:.0f} MB per million")
    found = compare_rules(args.production, args.seeds)
    if args.production == 1.5:
        compare_slots(args.seeds)
    speed, memory = speeds["pace-length"]
    print(json.dumps({"trajectories_per_second": round(speed), "mb_per_million": round(memory, 1), **found}))


if __name__ == "__main__":
    main()
