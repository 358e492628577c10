"""What happened between two draws, as metrics."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pace_agent.engine.base import EngineStats
from pace_agent.ledger import Ledger, State
from pace_agent.types import Trajectory


class StepWindow:
    """Collects what ended since the last draw; totals go on over the whole run.

    The reward is the mean over every rollout that completed in the window, trained or not: what is trained is a
    selection, and its mean would not be the policy's.
    """

    def __init__(self) -> None:
        self.completed_total = 0
        self.interrupted_total = 0
        self._completed: list[Trajectory] = []
        self._groups: list[bool] = []
        self._since = 0.0
        self._stats = EngineStats()

    def add(self, trajectory: Trajectory) -> None:
        if trajectory.stop.completed:
            self._completed.append(trajectory)
            self.completed_total += 1
            self.interrupted_total += trajectory.interrupted > 0

    def add_group(self, *, signal: bool) -> None:
        self._groups.append(signal)

    def metrics(self, now: float, stats: EngineStats, ledger: Ledger) -> dict[str, float]:
        """The figures of this window; starts the next one."""
        done, groups, since, before = self._completed, self._groups, self._since, self._stats
        self._completed, self._groups, self._since, self._stats = [], [], now, stats
        out = {
            "rollout/running": float(ledger.count(State.RUNNING)),
            "rollout/completed_total": float(self.completed_total),
            "rollout/failed_total": float(ledger.count(State.FAILED)),
            "rollout/interrupted_total": float(self.interrupted_total),
            "engine/update_seconds": stats.update_seconds - before.update_seconds,
            "engine/paused_seconds": stats.paused_seconds - before.paused_seconds,
        }
        if since and now > since:
            out["rollout/tokens_per_second"] = (stats.sampled_tokens - before.sampled_tokens) / (now - since)
        if groups:
            out["reward/no_signal_share"] = 1.0 - sum(groups) / len(groups)
        if done:
            rewards = np.array([trajectory.reward for trajectory in done], dtype=np.float64)
            out["reward/mean"] = float(rewards.mean())
            out["reward/std"] = float(rewards.std())
            out["rollout/completed"] = float(len(done))
            out["rollout/turns_mean"] = float(np.mean([len(trajectory.turns) for trajectory in done]))
            out["rollout/length_mean"] = float(np.mean([trajectory.n_sampled for trajectory in done]))
            out["rollout/truncated_share"] = float(np.mean([trajectory.stop.truncated for trajectory in done]))
            out["rollout/seconds_mean"] = float(np.mean([t.completed_at - t.started_at for t in done]))
            out.update(_environment_metrics(done))
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"completed_total": self.completed_total, "interrupted_total": self.interrupted_total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.completed_total = int(state["completed_total"])
        self.interrupted_total = int(state["interrupted_total"])


def _environment_metrics(done: list[Trajectory]) -> dict[str, float]:
    """Sums that start with `tool/` stay sums; everything else is a mean per rollout under `env/<id>/`."""
    sums: dict[str, float] = {}
    for trajectory in done:
        for name, value in trajectory.metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    env_id = done[0].env_id
    return {
        (name if name.startswith("tool/") else f"env/{env_id}/{name}"): (
            value if name.startswith("tool/") else value / len(done)
        )
        for name, value in sums.items()
    }
