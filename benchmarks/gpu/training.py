"""`pace-agent train` over servers of its own, and what its run folder says."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from subject import Place
from tables import Row

from pace_agent.report.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def train_options(place: Place, env: str) -> dict[str, Any]:
    """What differs from the defaults, which suit the embedded model on a CPU."""
    options: dict[str, Any] = {"env.id": env, "sglang.device": place.kind, "sglang.python": place.python}
    if not place.gpus:
        return options
    options |= {
        "sglang.gpus": ",".join(map(str, place.servers)),
        "sglang.servers": len(place.servers),
        "pool.batch_size": 32,
        "rollout.concurrency": 64,
        "rollout.max_turn_tokens": 512,
        "rollout.max_tokens": 1024,
        "rollout.max_context": 3072,
        "trainer.per_device_train_batch_size": 2,
        "trainer.learning_rate": 1e-6,
        "trainer.gradient_checkpointing": "true",
    }
    return options


def train(model: Path, place: Place, env: str, update: str, steps: int, folder: Path) -> Row:
    """`pace-agent train` over servers of its own: on their own GPUs, or in turns with them on the only one."""
    run = folder / "run"
    options = train_options(place, env) | {"model.path": model, "run.dir": run, "engine.kind": "sglang"}
    options |= {"trainer.max_steps": steps, "run.checkpoint_every": steps, "sglang.update": update}
    if place.shared:
        options |= {"sglang.colocate": "true", "pool.policy": "sync"}
    command = [sys.executable, "-m", "pace_agent", "train"]
    command += [word for key, value in options.items() if value != "" for word in (f"--{key}", str(value))]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, place.gpus))}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | visible, capture_output=True, text=True, check=False)
    way = f"{update}{', colocated' if place.shared else ''}"
    if done.returncode:
        said = "\n".join(f"{done.stdout}\n{done.stderr}".strip().splitlines()[-20:])
        print(f"\n{' '.join(command)}\nfailed with exit code {done.returncode}:\n{said}", flush=True)
        return {"training": way, "kept": False, "error": said.splitlines()[-1] if said else ""}
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return {"training": way, "kept": True} | train_figures(summary, read_metrics(run / "metrics.jsonl"))


def train_figures(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Row:
    """Staleness in versions; the rest are means over the steps, without the first where there are more."""

    def mean(key: str) -> float | None:
        known = [row[key] for row in rows[1:] or rows if row.get(key) is not None]
        return fmean(known) if known else None

    return {
        "steps": summary["steps"],
        "generation staleness": summary["staleness"]["generation"],
        "waiting staleness": summary["staleness"]["waiting"],
        "several versions": summary["multi_version_share"],
        "update s": mean("engine/update_seconds"),
        "paused s": mean("engine/paused_seconds"),
        "tokens/s": mean("rollout/tokens_per_second"),
        "step s": mean("step_time"),
    }
