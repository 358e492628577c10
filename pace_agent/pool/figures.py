"""What the pool measures of itself: staleness of what it draws, and whether it favours short rollouts.

What always holds: `generated` rollouts are those that reached the pool (a group without signal never does), `trained`
are those of them that were drawn. Totals cover the whole run, windows the last ones. A share that too few rollouts
define is None with its reason, never 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

TAIL = 2.5
"""A rollout is long when it is longer than this many times the mean generated length."""
ENOUGH = 10
"""Rollouts that define a share."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, or None and why there is none."""

    value: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """The run so far. Staleness in versions, over all that was drawn; `token_mean` weighs every token the same.

    `length_ratio`: mean length, trained over generated. `tail_share`: share of long rollouts, trained over generated.
    `reasons` says for every figure that is None why it is.
    """

    drawn: int
    generation: float | None
    waiting: float | None
    effective: float | None
    token_mean: float | None
    multi_version_share: float | None
    length_ratio: float | None
    tail_share: float | None
    reasons: Mapping[str, str] = field(default_factory=dict)


class LengthCounts:
    """How many rollouts there are of each length. `counts[k]`: of k sampled tokens."""

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(256, dtype=np.int64)

    def add(self, length: int) -> None:
        if length >= self.counts.size:
            self.counts = np.concatenate([self.counts, np.zeros(length + 1, dtype=np.int64)])
        self.counts[length] += 1

    def add_many(self, lengths: NDArray[np.int64]) -> None:
        new = np.bincount(lengths, minlength=self.counts.size)
        new[: self.counts.size] += self.counts
        self.counts = new

    def remove_many(self, lengths: NDArray[np.int64]) -> None:
        """Each of `lengths` was added before."""
        gone = np.bincount(lengths)
        self.counts[: gone.size] -= gone


class Window:
    """The last `size` whole numbers."""

    def __init__(self, size: int) -> None:
        self._ring = np.zeros(size, dtype=np.int64)
        self._seen = 0

    def add(self, value: int) -> None:
        self._ring[self._seen % self._ring.size] = value
        self._seen += 1

    def values(self) -> NDArray[np.int64]:
        """In no particular order."""
        return self._ring[: min(self._seen, self._ring.size)]

    def state_dict(self) -> dict[str, Any]:
        return {"ring": self._ring.copy(), "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes another size too: the last values that fit are kept."""
        ring, seen, size = np.asarray(state["ring"]), int(state["seen"]), self._ring.size
        kept = min(seen, ring.size, size)
        oldest_first = np.roll(ring, -seen)[ring.size - kept :] if seen >= ring.size else ring[seen - kept : seen]
        self._ring = np.zeros(size, dtype=np.int64)
        self._ring[:kept] = oldest_first
        self._seen = kept


class LengthBias:
    """Lengths of generated and of trained rollouts, as counts by length (the run) and as the last ones (a window)."""

    def __init__(self, window: int) -> None:
        self._generated, self._trained = LengthCounts(), LengthCounts()
        self._window: tuple[Window, Window] = (Window(window), Window(window))

    def generated(self, length: int) -> None:
        self._generated.add(length)
        self._window[0].add(length)

    def trained(self, lengths: NDArray[np.int64]) -> None:
        self._trained.add_many(lengths)
        for length in lengths.tolist():
            self._window[1].add(length)

    def run(self) -> tuple[Figure, Figure]:
        """Length ratio and tail share over the run."""
        return _bias(self._generated.counts, self._trained.counts)

    def recent(self) -> tuple[Figure, Figure]:
        """Length ratio and tail share of the last drawn over the last generated."""
        generated, trained = (np.bincount(window.values()) for window in self._window)
        return _bias(generated, trained)

    def state_dict(self) -> dict[str, Any]:
        return {
            "generated": self._generated.counts.copy(),
            "trained": self._trained.counts.copy(),
            "window": [window.state_dict() for window in self._window],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generated.counts = np.array(state["generated"], dtype=np.int64)
        self._trained.counts = np.array(state["trained"], dtype=np.int64)
        for window, saved in zip(self._window, state["window"], strict=True):
            window.load_state_dict(saved)


@dataclass(slots=True)
class StalenessTotals:
    """Sums over all trajectories drawn, in versions."""

    drawn: int = 0
    generation: float = 0.0
    waiting: float = 0.0
    effective: float = 0.0
    token_lag: float = 0.0
    tokens: int = 0
    multi_version: int = 0

    def mean(self, total: float) -> float | None:
        return total / self.drawn if self.drawn else None


def spread(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    """`name_mean`, `name_p95` and `name_max` of at least one value."""
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_p95": float(np.percentile(values, 95)),
        f"{name}_max": float(values.max()),
    }


def summarise(totals: StalenessTotals, bias: LengthBias) -> PoolSummary:
    """The run's final figures."""
    ratio, tail = bias.run()
    reasons = {"length_ratio": ratio.reason, "tail_share": tail.reason}
    if not totals.drawn:
        names = ("generation", "waiting", "effective", "token_mean", "multi_version_share")
        reasons |= dict.fromkeys(names, "nothing was drawn")
    return PoolSummary(
        drawn=totals.drawn,
        generation=totals.mean(totals.generation),
        waiting=totals.mean(totals.waiting),
        effective=totals.mean(totals.effective),
        token_mean=totals.token_lag / totals.tokens if totals.tokens else None,
        multi_version_share=totals.mean(totals.multi_version),
        length_ratio=ratio.value,
        tail_share=tail.value,
        reasons={name: reason for name, reason in reasons.items() if reason},
    )


def _bias(generated: NDArray[np.int64], trained: NDArray[np.int64]) -> tuple[Figure, Figure]:
    """Length ratio and tail share from counts by length."""
    n_generated, n_trained = int(generated.sum()), int(trained.sum())
    if min(n_generated, n_trained) < ENOUGH:
        few = Figure(None, f"{n_generated} rollouts generated and {n_trained} trained, {ENOUGH} of each are needed")
        return few, few
    mean = _mean(generated, n_generated)
    ratio = Figure(_mean(trained, n_trained) / mean)
    first_long = int(TAIL * mean) + 1
    long_generated, long_trained = int(generated[first_long:].sum()), int(trained[first_long:].sum())
    if long_generated < ENOUGH:
        reason = (
            f"{long_generated} of {n_generated} generated rollouts are longer than {TAIL} times their mean length of "
            f"{mean:.1f} tokens, {ENOUGH} are needed"
        )
        return ratio, Figure(None, reason)
    return ratio, Figure((long_trained / n_trained) / (long_generated / n_generated))


def _mean(counts: NDArray[np.int64], number: int) -> float:
    return float(np.arange(counts.size) @ counts) / number
