"""What a simulation measures, and the recorder that collects it.

What always holds: all figures are of one window, from the publication of version `warmup` to that of version `steps`.
Staleness is that of the rollouts drawn inside it, in versions; times are seconds of the simulation.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pace_agent.pool import Draw
from pace_agent.pool.figures import ListedLengths, length_bias, p95


@dataclass(frozen=True, slots=True)
class Figures:
    """One simulated run. `to_dict` has plain numbers."""

    steps: int
    """Trainer steps in the window."""
    seconds: float
    """Length of the window."""
    step_seconds: float
    """What a step takes without waiting."""
    busy: float
    """Share of the window in which the trainer worked."""
    slots_busy: float
    """Mean share of the slots at work."""
    produced_per_second: float
    """Rollouts that completed."""
    trained_per_second: float
    """Rollouts that were trained on: the trainer's throughput."""
    trained_tokens_per_second: float
    token_staleness: float
    """W + G of a trained token: the mean over tokens of the version that is trained minus the one that sampled."""
    token_generation: float
    """The part of it from before completion (G), over tokens."""
    token_waiting: float
    """The part of it from the pool (W), over tokens."""
    generation: float
    """Mean G over rollouts."""
    waiting: float
    """Mean W over rollouts."""
    p95: float
    """95th percentile of W + G over rollouts."""
    rejected_share: float
    """Rejected over rejected and trained: the waste."""
    length_ratio: float | None
    """Mean length, trained over completed; None where too few define it."""
    tail_share: float | None
    """Share of rollouts longer than 2.5 times the mean completed length, trained over completed; None as above."""
    pool_mean: float
    """Waiting rollouts, mean over time."""
    pool_seconds: float
    """Mean time in the pool of those that left it, drawn or rejected."""
    ledger: Mapping[str, int]
    """All trajectories of the run by their state at its end."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Recorder:
    """Collects; `open` begins the window, `close` ends it. Before and after it nothing counts."""

    def __init__(self) -> None:
        self._opened: float | None = None
        self._closed = math.nan
        self._completed: list[NDArray[np.int64]] = []
        self._drawn: list[tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]] = []
        self._rejected = 0
        self._busy_area = 0.0
        self._pool_area = 0.0
        self._left = 0
        self._wait = 0.0

    @property
    def counting(self) -> bool:
        return self._opened is not None and math.isnan(self._closed)

    def open(self, now: float) -> None:
        self._opened = now

    def close(self, now: float) -> None:
        self._closed = now

    def passed(self, seconds: float, running: int, waiting: int) -> None:
        """So many slots were at work, and at least so many rollouts in the pool, for `seconds`."""
        if self.counting:
            self._busy_area += seconds * running
            self._pool_area += seconds * waiting

    def completed(self, lengths: NDArray[np.int64], waited: NDArray[np.float64]) -> None:
        """These entered the pool, `waited` seconds before now, which `passed` did not know of."""
        if self.counting:
            self._completed.append(lengths)
            self._pool_area += float(waited.sum())

    def drew(
        self,
        draw: Draw[int],
        lengths: NDArray[np.int64],
        waited: NDArray[np.float64],
        rejected_waited: NDArray[np.float64],
    ) -> None:
        """A draw, with the lengths of what was drawn, and the seconds that each had been in the pool."""
        if not self.counting:
            return
        if draw.filled:
            self._drawn.append((draw.generation, draw.waiting, lengths))
        self._rejected += draw.rejected_ids.size
        self._left += waited.size + rejected_waited.size
        self._wait += float(waited.sum() + rejected_waited.sum())

    def figures(self, *, slots: int, step_seconds: float, ledger: Mapping[str, int]) -> Figures:
        """Of the closed window, in which at least one step was made."""
        assert self._opened is not None
        seconds = self._closed - self._opened
        generation, waiting, tokens = (np.concatenate(column) for column in zip(*self._drawn, strict=True))
        completed = np.concatenate(self._completed) if self._completed else np.empty(0, dtype=np.int64)
        ratio, tail = length_bias(ListedLengths(completed), ListedLengths(tokens))
        total = int(tokens.sum())
        return Figures(
            steps=len(self._drawn),
            seconds=seconds,
            step_seconds=step_seconds,
            busy=len(self._drawn) * step_seconds / seconds,
            slots_busy=self._busy_area / (slots * seconds),
            produced_per_second=completed.size / seconds,
            trained_per_second=tokens.size / seconds,
            trained_tokens_per_second=total / seconds,
            token_staleness=float(tokens @ (generation + waiting)) / total,
            token_generation=float(tokens @ generation) / total,
            token_waiting=float(tokens @ waiting) / total,
            generation=float(generation.mean()),
            waiting=float(waiting.mean()),
            p95=p95(np.sort(generation + waiting)),
            rejected_share=self._rejected / (self._rejected + tokens.size),
            length_ratio=ratio.value,
            tail_share=tail.value,
            pool_mean=self._pool_area / seconds,
            pool_seconds=self._wait / self._left,
            ledger=dict(ledger),
        )
