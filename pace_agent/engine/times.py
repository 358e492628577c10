"""How long an engine was paused and how long its weight updates took, in seconds of real time."""

import time
from dataclasses import replace

from pace_agent.engine.base import EngineStats


class Times:
    def __init__(self) -> None:
        self._paused_since: float | None = None
        self._paused = 0.0
        self._updating = 0.0

    @property
    def paused(self) -> bool:
        return self._paused_since is not None

    def pause(self) -> None:
        if self._paused_since is None:
            self._paused_since = time.monotonic()

    def resume(self) -> None:
        if self._paused_since is not None:
            self._paused += time.monotonic() - self._paused_since
            self._paused_since = None

    def updated(self, since: float) -> None:
        """Count an update that began at `since` on the monotonic clock."""
        self._updating += time.monotonic() - since

    def added_to(self, stats: EngineStats) -> EngineStats:
        now = 0.0 if self._paused_since is None else time.monotonic() - self._paused_since
        return replace(stats, update_seconds=self._updating, paused_seconds=self._paused + now)
