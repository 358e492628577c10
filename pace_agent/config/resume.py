"""What may change when a run is resumed, and what may not.

A checkpoint holds weights, optimiser state, a task cursor and waiting trajectories. The keys here decide what these
mean, so they must be the same; everything else (steps, learning rate, limits, concurrency) may be set anew.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pace_agent.config.models import RunConfig
from pace_agent.errors import UserError

FIXED_KEYS: Mapping[str, str] = {
    "env.id": "the checkpoint's waiting trajectories answer its tasks",
    "env.kwargs": "the checkpoint's waiting trajectories answer its tasks",
    "env.tasks": "the task cursor counts through them",
    "env.reward": "rewards of one group must come from one function",
    "model.path": "the weights and the optimiser state belong to it",
    "model.dtype": "the optimiser state has this type",
    "model.lora_r": "the adapters have this shape",
    "model.lora_alpha": "the adapters were trained at this scale",
    "model.tool_parser": "waiting trajectories were parsed by it",
    "rollout.group_size": "advantages were computed over groups of it",
    "rollout.temperature": "waiting log-probabilities were taken at it",
    "pool.policy": "its counts of who may start go on from the checkpoint",
    "pool.batch_size": "steps count batches of it",
    "pool.unit": "waiting entries are counted in it",
    "run.seed": "the order of tasks follows from it",
    "clock.kind": "seconds of one kind can't go on as seconds of the other",
}
"""Keys that a resumed run must keep, and why."""


def _fixed_values(config: RunConfig) -> Iterator[tuple[str, Any]]:
    for key in FIXED_KEYS:
        section, _, name = key.partition(".")
        yield key, getattr(getattr(config, section), name)


def config_fingerprint(config: RunConfig) -> str:
    """A short hash over the keys that a resumed run must keep."""
    text = json.dumps(dict(_fixed_values(config)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_resume(old: RunConfig, new: RunConfig) -> None:
    """UserError that lists the keys in which `new` can't go on from a run of `old`."""
    before, after = dict(_fixed_values(old)), dict(_fixed_values(new))
    changed = [
        f"  {key}: {before[key]!r} in the run folder, {after[key]!r} now ({why})"
        for key, why in FIXED_KEYS.items()
        if before[key] != after[key]
    ]
    if changed:
        raise UserError(
            "this run can't be resumed with another configuration:\n"
            + "\n".join(changed)
            + "\nSet these back, or start a new run."
        )
