"""How stale a trajectory is: pure functions.

For a completed trajectory whose n sampled tokens carry the versions v_i, with c the version published when it
completed and V the version published now:

    generation staleness   G = (1/n) * sum_i (c - v_i)     built up before completion
    waiting staleness      W = V - c                       built up in the pool
    effective staleness    S = W + lam * G

Versions count weight updates, so every figure is in versions. With lam = 1 the completion version cancels and S is V
minus the mean version. G weighs a stale prefix by its share of the tokens, so a rollout that was interrupted near its
start is nearly fresh.

The idea of ranking by both parts is that of the abstract of "Where Does Staleness Accumulate? Pool Aware Effective
Staleness Control for Asynchronous RL in LLM Post-Training" (arXiv 2609.36830); the formulas are this package's own.

Versions come as runs: `counts[k]` sampled tokens of version `versions[k]` in turn `turns[k]`. All sums are sums of
ints, so that cutting a run in two changes no result by a single bit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pace_agent.types import Turn

StalenessKind = Literal["tokens", "turns", "span", "none"]
"""How a trajectory's tokens become one G; `generation_staleness` explains each."""

STALENESS_KINDS: tuple[StalenessKind, ...] = ("tokens", "turns", "span", "none")


@dataclass(frozen=True, slots=True)
class Spans:
    """The sampled tokens of one trajectory as runs of one version, in the order in which they were sampled.

    Raises ValueError for runs of different number, an empty run, or no run at all (a trajectory without a sampled
    token is failed, never scored).
    """

    versions: tuple[int, ...]
    counts: tuple[int, ...]
    turns: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.versions) == len(self.counts) == len(self.turns):
            raise ValueError(f"{len(self.versions)} versions, {len(self.counts)} counts, {len(self.turns)} turns")
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"a scored trajectory has at least one sampled token in every run, got {self.counts}")

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> "Spans":
        """The runs of a trajectory's turns."""
        runs = [(span.version, span.end - span.start, k) for k, turn in enumerate(turns) for span in turn.spans]
        return cls(tuple(run[0] for run in runs), tuple(run[1] for run in runs), tuple(run[2] for run in runs))

    @property
    def n_sampled(self) -> int:
        return sum(self.counts)

    @property
    def multi_version(self) -> bool:
        """Tokens of more than one policy version."""
        return any(version != self.versions[0] for version in self.versions)


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """The runs of many trajectories in columns, one trajectory after another, each in the order of `Spans`.

    `versions`, `counts`, `turns`: shape (runs,). `first`: the first run of every trajectory, rising from 0, shape (N,).
    The runs of a turn stand side by side. Raises ValueError as `Spans` does.
    """

    versions: NDArray[np.int64]
    counts: NDArray[np.int64]
    turns: NDArray[np.int64]
    first: NDArray[np.int64]

    def __post_init__(self) -> None:
        if not self.versions.shape == self.counts.shape == self.turns.shape:
            raise ValueError(f"{self.versions.size} versions, {self.counts.size} counts, {self.turns.size} turns")
        if (self.first[0] != 0 or self.sizes.min() < 1) if len(self) else self.counts.size:
            raise ValueError("every trajectory has at least one run, and the first begins with run 0")
        if self.counts.size and self.counts.min() < 1:
            raise ValueError("a scored trajectory has at least one sampled token in every run")

    def __len__(self) -> int:
        return int(self.first.size)

    @classmethod
    def of(cls, spans: Sequence[Spans]) -> "SpanTable":
        """The columns of single trajectories."""
        sizes = [len(each.counts) for each in spans]
        return cls(
            np.array([version for each in spans for version in each.versions], dtype=np.int64),
            np.array([count for each in spans for count in each.counts], dtype=np.int64),
            np.array([turn for each in spans for turn in each.turns], dtype=np.int64),
            np.cumsum([0, *sizes[:-1]]) if sizes else np.empty(0, dtype=np.int64),
        )

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of runs of every trajectory, shape (N,)."""
        sizes = np.empty_like(self.first)
        sizes[:-1] = self.first[1:]
        sizes[-1:] = self.counts.size
        return sizes - self.first

    @property
    def n_sampled(self) -> NDArray[np.int64]:
        """Sampled tokens of every trajectory, shape (N,)."""
        tokens: NDArray[np.int64] = np.add.reduceat(self.counts, self.first) if len(self) else np.empty(0, np.int64)
        return tokens

    @property
    def rows(self) -> NDArray[np.int64]:
        """The trajectory of every run, shape (runs,)."""
        return np.arange(self.first.size).repeat(self.sizes)


def generation_staleness(spans: Spans, completed_version: int, kind: StalenessKind = "tokens") -> float:
    """G of one trajectory, in versions, at least 0.

    tokens   (1/n) * sum over tokens of (c - v_i)
    turns    (1/T) * sum over the T turns that sampled a token of the token mean inside the turn
    span     c - min_i v_i, the age of the oldest token
    none     0

    Raises ValueError when a token is newer than `completed_version`.
    """
    if max(spans.versions) > completed_version:
        raise ValueError(f"a token of version {max(spans.versions)} in a rollout completed at {completed_version}")
    if kind == "none":
        return 0.0
    if kind == "span":
        return float(completed_version - min(spans.versions))
    if kind == "tokens":
        return _mean_lag(spans.versions, spans.counts, completed_version)
    by_turn: dict[int, tuple[list[int], list[int]]] = {}
    for version, count, turn in zip(spans.versions, spans.counts, spans.turns, strict=True):
        versions, counts = by_turn.setdefault(turn, ([], []))
        versions.append(version)
        counts.append(count)
    return sum(_mean_lag(*runs, completed_version) for runs in by_turn.values()) / len(by_turn)


def _mean_lag(versions: Sequence[int], counts: Sequence[int], completed_version: int) -> float:
    lag = sum(count * (completed_version - version) for version, count in zip(versions, counts, strict=True))
    return lag / sum(counts)


def generation_staleness_of_many(
    spans: SpanTable, completed_version: NDArray[np.int64], kind: StalenessKind = "tokens"
) -> NDArray[np.float64]:
    """`generation_staleness` of every trajectory, shape (N,), equal to the last bit. Same ValueError."""
    lag = completed_version.repeat(spans.sizes) - spans.versions
    if lag.size and lag.min() < 0:
        raise ValueError(f"a token is {-lag.min()} versions newer than the completion of its rollout")
    if kind == "none" or not len(spans):
        return np.zeros(len(spans))
    if kind == "span":
        return np.maximum.reduceat(lag, spans.first).astype(np.float64)
    if kind == "tokens":
        mean: NDArray[np.float64] = np.add.reduceat(lag * spans.counts, spans.first) / spans.n_sampled
        return mean
    begins = np.diff(spans.turns, prepend=-1) != 0
    begins[spans.first] = True
    first = np.flatnonzero(begins)
    per_turn = np.add.reduceat(lag * spans.counts, first) / np.add.reduceat(spans.counts, first)
    rows = spans.rows[first]
    # bincount adds in order, as `sum` does; reduceat may not.
    return np.bincount(rows, weights=per_turn) / np.bincount(rows)


def waiting_staleness(version: int, completed_version: ArrayLike) -> NDArray[np.float64]:
    """W = V - c, elementwise over `completed_version`, in versions. Raises ValueError when a c lies ahead of V."""
    waiting = version - np.asarray(completed_version, dtype=np.float64)
    if waiting.size and waiting.min() < 0:
        raise ValueError(f"completed at a version {-waiting.min():g} ahead of the published version {version}")
    return waiting


def effective_staleness(
    version: int, completed_version: ArrayLike, generation: ArrayLike, lam: float = 1.0
) -> NDArray[np.float64]:
    """S = (V - c) + lam * G, elementwise, in versions. Raises ValueError as `waiting_staleness` does."""
    return waiting_staleness(version, completed_version) + lam * np.asarray(generation, dtype=np.float64)
