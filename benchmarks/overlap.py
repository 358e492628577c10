"""What it is worth that rollouts and training go on at once: updates per second, asynchronous over synchronous.

Every run is `pace-agent train` on the embedded job. `pace` and `bounded_admission` (eta 2) give the engine and the
trainer one torch thread each; `sync` lets both use two threads, in turn. With tools, every call takes 50 ms and 5 % of
them one second. Updates per second are counted from step `--skip` to the last one, so start-up is left out.
The runs of a round follow each other, and the median over rounds is taken; nothing else should load the machine.

`async_over_sync` and `async_over_sync_tools`: `pace` over `sync`.

Run: python benchmarks/overlap.py [--steps 30] [--rounds 1]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from pace_agent.report.metrics import read_metrics

TOOLS = ["--env.kwargs.tool_delay", "0.05", "--env.kwargs.slow_share", "0.05", "--env.kwargs.slow_delay", "1.0"]
RUNS = {
    "sync": ["--pool.policy", "sync", "--engine.threads", "2", "--run.threads", "2", "--rollout.concurrency", "128"],
    "pace": [],
    "bounded_admission eta 2": ["--pool.policy", "bounded_admission", "--pool.eta", "2"],
}


def updates_per_second(options: list[str], *, steps: int, skip: int, seed: int) -> float:
    """Run the job and read the times of its steps from the run folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "pace_agent", "train", "--run-dir", str(run), "--seed", str(seed)]
        command += ["--trainer.max_steps", str(steps), "--run.checkpoint_every", str(steps), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        times = {row["step"]: row["run/seconds"] for row in read_metrics(run / "metrics.jsonl")}
    return (steps - skip) / float(times[steps] - times[skip])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--skip", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=1)
    given = arguments.parse_args()
    rates: dict[tuple[str, bool], list[float]] = {}
    for seed in range(given.rounds):
        for tools in (False, True):
            for name, options in RUNS.items():
                rate = updates_per_second(
                    [*options, *(TOOLS if tools else [])], steps=given.steps, skip=given.skip, seed=seed
                )
                rates.setdefault((name, tools), []).append(rate)
                print(f"  {name:<24} {'with tools' if tools else 'no tool time':<13} {rate:6.3f} updates/s", flush=True)
    print(f"\n{'policy':<24} {'no tool time':>13} {'over sync':>10} {'with tools':>13} {'over sync':>10}")
    ratios = {}
    for name in RUNS:
        cells = []
        for tools in (False, True):
            rate = median(rates[name, tools])
            ratios[name, tools] = rate / median(rates["sync", tools])
            cells += [f"{rate:13.3f}", f"{ratios[name, tools]:10.2f}"]
        print(f"{name:<24} {' '.join(cells)}")
    print(
        json.dumps(
            {
                "async_over_sync": round(ratios["pace", False], 3),
                "async_over_sync_tools": round(ratios["pace", True], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
