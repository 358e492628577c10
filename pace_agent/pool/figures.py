"""What the pool measures of itself: staleness of what it draws, and whether it favours short rollouts.

What always holds: `generated` rollouts are those that reached the pool (a group without signal never does), `trained`
are those of them that were drawn. Totals cover the whole run, windows the last ones. A share that too few rollouts
define is None with its reason, never 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

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
        longest = int(lengths.max(initial=0))
        if longest >= self.counts.size:
            self.counts = np.concatenate([self.counts, np.zeros(longest + 1, dtype=np.int64)])
        np.add.at(self.counts, lengths, 1)

    def remove_many(self, lengths: NDArray[np.int64]) -> None:
        """Each of `lengths` was added before."""
        np.subtract.at(self.counts, lengths, 1)


class Window:
    """The last `size` whole numbers."""

    def __init__(self, size: int) -> None:
        self._ring = np.zeros(size, dtype=np.int64)
        self._seen = 0

    def add(self, value: int) -> None:
        self._ring[self._seen % self._ring.size] = value
        self._seen += 1

    def add_many(self, values: NDArray[np.int64]) -> None:
        """`add` for each in turn."""
        size = self._ring.size
        last = values[-size:]
        begin = (self._seen + values.size - last.size) % size
        head = last[: size - begin]
        self._ring[begin : begin + head.size] = head
        self._ring[: last.size - head.size] = last[head.size :]
        self._seen += values.size

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

    def generated_many(self, lengths: NDArray[np.int64]) -> None:
        self._generated.add_many(lengths)
        self._window[0].add_many(lengths)

    def trained(self, lengths: NDArray[np.int64]) -> None:
        self._trained.add_many(lengths)
        self._window[1].add_many(lengths)

    def run(self) -> tuple[Figure, Figure]:
        """Length ratio and tail share over the run."""
        return length_bias(*(CountedLengths(lengths.counts) for lengths in (self._generated, self._trained)))

    def recent(self) -> tuple[Figure, Figure]:
        """Length ratio and tail share of the last drawn over the last generated."""
        return length_bias(*(ListedLengths(window.values()) for window in self._window))

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


def spreads(**columns: NDArray[np.float64]) -> dict[str, float]:
    """`staleness/NAME_mean`, `_p95` and `_max` of every column; all have the same length, at least one."""
    ordered = np.array(tuple(columns.values()))
    ordered.sort(axis=1)
    out: dict[str, float] = {}
    for name, values, total in zip(columns, ordered, ordered.sum(axis=1).tolist(), strict=True):
        out[f"staleness/{name}_mean"] = total / values.size
        out[f"staleness/{name}_p95"] = p95(values)
        out[f"staleness/{name}_max"] = float(values[-1])
    return out


def p95(ordered: NDArray[np.float64]) -> float:
    """The 95th percentile of rising values, at least one; between two of them in proportion.

    What `numpy.percentile` returns, which for the size of a batch is nearly all overhead.
    """
    position = 0.95 * (ordered.size - 1)
    lower = int(position)
    below, above = float(ordered[lower]), float(ordered[min(lower + 1, ordered.size - 1)])
    return below + (position - lower) * (above - below)


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


class Lengths(Protocol):
    """Lengths of some rollouts, of which `length_bias` asks this much."""

    @property
    def number(self) -> int: ...

    @property
    def mean(self) -> float: ...

    def longer_than(self, limit: float) -> int:
        """How many are longer."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CountedLengths:
    """`counts[k]` rollouts of k sampled tokens."""

    counts: NDArray[np.int64]

    @property
    def number(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return float(np.arange(self.counts.size) @ self.counts) / self.number

    def longer_than(self, limit: float) -> int:
        return int(self.counts[int(limit) + 1 :].sum())


@dataclass(frozen=True, slots=True, eq=False)
class ListedLengths:
    """One length for every rollout."""

    lengths: NDArray[np.int64]

    @property
    def number(self) -> int:
        return int(self.lengths.size)

    @property
    def mean(self) -> float:
        return float(self.lengths.sum()) / self.number

    def longer_than(self, limit: float) -> int:
        return int(np.count_nonzero(self.lengths > limit))


def length_bias(generated: Lengths, trained: Lengths) -> tuple[Figure, Figure]:
    """Length ratio and tail share, trained over generated."""
    n_generated, n_trained = generated.number, trained.number
    if min(n_generated, n_trained) < ENOUGH:
        few = Figure(None, f"{n_generated} rollouts generated and {n_trained} trained, {ENOUGH} of each are needed")
        return few, few
    mean = generated.mean
    ratio = Figure(trained.mean / mean)
    long_generated, long_trained = generated.longer_than(TAIL * mean), trained.longer_than(TAIL * mean)
    if long_generated < ENOUGH:
        reason = (
            f"{long_generated} of {n_generated} generated rollouts are longer than {TAIL} times their mean length of "
            f"{mean:.1f} tokens, {ENOUGH} are needed"
        )
        return ratio, Figure(None, reason)
    return ratio, Figure((long_trained / n_trained) / (long_generated / n_generated))
