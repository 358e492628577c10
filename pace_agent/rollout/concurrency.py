"""How many rollouts may be in flight: a fixed number, or one that follows the trainer's pace.

Too few and the trainer waits; too many and what exceeds its pace is thrown away, or grows stale. Between two draws A
rollouts came to the pool, while the trainer was busy for b of p seconds and takes M at a time: production over what the
trainer could consume is (A / p) / (M / b). The limit moves until that is AIM.
"""

from collections import deque

AIM = 1.05
"""Production over consumption: a little too much, so that the trainer doesn't wait for the last rollout of a batch."""
GAIN = 0.25
"""Share of the way that one step goes, on a logarithmic scale. What it changes shows a rollout's length later."""
WINDOW = 8
"""Draws that the ratio is taken over: groups arrive as a whole, so that single steps differ much."""
LARGEST_CHANGE = 1.25
"""Of one step, up or down."""


class Concurrency:
    """`limit` is what may be in flight: `start` for ever, or, with `most`, between `least` and that."""

    def __init__(self, start: int, *, least: int = 1, most: int | None = None) -> None:
        self._limit = float(start)
        self._least = least
        self._most = most
        self._seen: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._arrived = 0
        self._drawn: tuple[float, int] | None = None
        self._trained_at: float | None = None

    @property
    def limit(self) -> int:
        return round(self._limit)

    def arrived(self, rollouts: int) -> None:
        """So many came to the pool."""
        self._arrived += rollouts

    def trained(self, now: float) -> None:
        """The step of the last batch has ended."""
        self._trained_at = now

    def drawn(self, now: float, rollouts: int) -> None:
        """A batch of so many was drawn."""
        last, ended, arrived = self._drawn, self._trained_at, self._arrived
        self._drawn, self._trained_at, self._arrived = (now, rollouts), None, 0
        if last is None or ended is None or not last[0] < ended <= now:
            return
        began, batch = last
        # Batches that came, and batches that the trainer could have taken in the same time.
        self._seen.append((arrived / batch, (now - began) / (ended - began)))
        self._move(sum(came for came, _ in self._seen) / sum(could for _, could in self._seen))

    def _move(self, ratio: float) -> None:
        if self._most is None:
            return
        change = LARGEST_CHANGE if ratio <= 0 else (AIM / ratio) ** GAIN
        change = min(max(change, 1 / LARGEST_CHANGE), LARGEST_CHANGE)
        self._limit = min(max(self._limit * change, float(self._least)), float(self._most))

    def state_dict(self) -> dict[str, float]:
        return {"limit": self._limit}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from there; a fixed number stays what it is now."""
        if self._most is not None:
            self._limit = min(max(state["limit"], float(self._least)), float(self._most))
