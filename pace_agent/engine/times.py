"""How long an engine was paused and how long its weight updates took, in seconds of its clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pace_agent.clock import Clock, WallClock
from pace_agent.engine.base import EngineStats


class Times:
    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or WallClock()
        self._paused_since: float | None = None
        self._paused = 0.0
        self._updating = 0.0

    @property
    def paused(self) -> bool:
        return self._paused_since is not None

    def pause(self) -> None:
        if self._paused_since is None:
            self._paused_since = self.clock.now()

    def resume(self) -> None:
        if self._paused_since is not None:
            self._paused += self.clock.now() - self._paused_since
            self._paused_since = None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Count what happens inside as an update, unless it raises."""
        since = self.clock.now()
        yield
        self._updating += self.clock.now() - since

    def added_to(self, stats: EngineStats) -> EngineStats:
        now = 0.0 if self._paused_since is None else self.clock.now() - self._paused_since
        return replace(stats, update_seconds=self._updating, paused_seconds=self._paused + now)
