"""Whether a seed fixes a whole run: two runs of the embedded job on virtual time, each in a process of its own.

While the second one runs, other processes keep every processor busy, so that nothing takes as long as the first time.
Compared are the hashes of the final weights, of the ledger, of the metrics and of every trajectory; `identical` says
whether all are equal. The exit status is 1 where one differs. `virtual_seconds` is how long the run took on its own
clock, `seconds` how long each really took.

Run: python benchmarks/determinism.py [--steps 12] [--seed 0] [-- OPTIONS of pace-agent train]
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMPARED = {
    "weights": "final/model.safetensors",
    "ledger": "ledger.jsonl",
    "metrics": "metrics.jsonl",
    "trajectories": "trajectories.jsonl",
}


def hashes(run: Path) -> dict[str, str]:
    return {name: hashlib.sha256((run / file).read_bytes()).hexdigest()[:16] for name, file in COMPARED.items()}


def train(run: Path, options: list[str]) -> float:
    """Run the job; the seconds it really took."""
    command = [sys.executable, "-m", "pace_agent", "train", "--run-dir", str(run), "--clock", "virtual", *options]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return time.monotonic() - started


def burn() -> None:
    while True:
        hashlib.sha256(b"busy" * 4096).digest()


@contextmanager
def loaded_machine() -> Iterator[None]:
    """As many busy processes as there are processors."""
    processes = [multiprocessing.Process(target=burn, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("options", nargs="*", help="passed on to pace-agent train, after --")
    given = arguments.parse_args()
    options = ["--trainer.max_steps", str(given.steps), "--seed", str(given.seed), *given.options]
    with tempfile.TemporaryDirectory() as folder:
        quiet, loaded = Path(folder) / "quiet", Path(folder) / "loaded"
        seconds = [train(quiet, options)]
        with loaded_machine():
            seconds.append(train(loaded, options))
        found = [hashes(quiet), hashes(loaded)]
        virtual = json.loads((quiet / "summary.json").read_text())["seconds"]
    print(f"{'':<14} {'alone':<18} {'machine loaded':<18}")
    for name in COMPARED:
        print(f"{name:<14} {found[0][name]:<18} {found[1][name]:<18}")
    print(f"{'seconds':<14} {seconds[0]:<18.1f} {seconds[1]:<18.1f} virtual: {virtual}")
    identical = found[0] == found[1]
    figures = {"identical": identical, "steps": given.steps, "virtual_seconds": virtual}
    print(json.dumps({**figures, "seconds": [round(each, 1) for each in seconds], **found[0]}))
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
