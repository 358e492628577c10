"""The PACE pool: completed trajectories wait here, and a draw decides what is fresh enough to train on.

What always holds:

* A trajectory is in the pool exactly while the ledger has it as pooled. The pool makes the moves grouping -> pooled,
  pooled -> drawn and pooled -> rejected, and checks the ledger at every draw.
* A completed trajectory is never turned away: a full pool stops new rollouts, not those in flight.
* A draw takes M units or none, and changes no other.
* Nothing here waits, locks or reads the clock for a decision: the same calls make the same draws.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pace_agent.errors import RunError
from pace_agent.ledger import STALE, Ledger, State
from pace_agent.pool.columns import Columns
from pace_agent.pool.figures import LengthBias, LengthCounts, PoolSummary, StalenessTotals, Window, spreads, summarise
from pace_agent.pool.options import PoolOptions
from pace_agent.pool.policies import AdmissionState, PoolView, Selection, make_policy
from pace_agent.pool.staleness import (
    Spans,
    SpanTable,
    generation_staleness,
    generation_staleness_of_many,
    waiting_staleness,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """A completed trajectory on its way into the pool.

    `payload` is whatever the trainer needs; the pool hands it back and never looks at it. `last_attempt`: the task has
    no attempt left, so that a rejection would lose it.
    """

    id: int
    payload: T
    spans: Spans
    completed_version: int
    last_attempt: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals(Generic[T]):
    """Many completed trajectories in columns of the same length: the fields of `Entry`, in order of completion."""

    ids: NDArray[np.int64]
    payloads: Sequence[T]
    spans: SpanTable
    completed_version: NDArray[np.int64]
    last_attempt: NDArray[np.bool_]

    def __post_init__(self) -> None:
        columns = (self.ids, self.payloads, self.spans, self.completed_version, self.last_attempt)
        sizes = [len(column) for column in columns]
        if len(set(sizes)) > 1:
            raise ValueError(f"columns of {sizes} trajectories")


@dataclass(frozen=True, slots=True, eq=False)
class Draw(Generic[T]):
    """What a draw took out. `payloads` and `rejected_payloads` stand in the order of `ids` and `rejected_ids`.

    `generation` and `waiting`: G and W of what was drawn, in versions, in the order of `ids`.

    `filled` is False, and nothing was drawn, where so many were rejected that less than a batch was left (only
    `max_staleness` does that).
    """

    version: int
    ids: NDArray[np.int64]
    payloads: tuple[T, ...]
    rejected_ids: NDArray[np.int64]
    rejected_payloads: tuple[T, ...]
    generation: NDArray[np.float64]
    waiting: NDArray[np.float64]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def filled(self) -> bool:
        return self.ids.size > 0


class PacePool(Generic[T]):
    """See the module. `len(pool)` counts trajectories, `pool.units` counts what a batch counts."""

    def __init__(self, options: PoolOptions, ledger: Ledger) -> None:
        self.options = options
        self.ledger = ledger
        self.policy = make_policy(options)
        self.rejected_total = 0
        self._columns = Columns()
        self._payloads: dict[int, T] = {}
        self._units = 0
        self._lengths = LengthCounts()
        self._next_unit = 0
        self._latest = 0
        self._window = Window(options.window)
        self._bias = LengthBias(options.window)
        self._totals = StalenessTotals()

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def units(self) -> int:
        """Waiting units: trajectories, or groups with unit="group"."""
        return self._units

    def admit(self, requested: int = 1) -> bool:
        """Whether `requested` new rollouts may start together, whatever the dispatcher's own limit on running ones."""
        size, batch = self.options.unit_size, self.options.batch_size * self.options.unit_size
        drawn = self.ledger.count(State.DRAWN)
        return self.policy.admit(
            AdmissionState(
                requested=requested,
                in_flight=self._in_flight(),
                pooled=self._units * size,
                drawn=-(-drawn // batch) * batch,
            )
        )

    def add(self, entries: Sequence[Entry[T]]) -> None:
        """Take in the members of a complete group, in order of completion; their ledger state is grouping.

        With unit="group" the entries of one call are one unit. Raises RunError, and takes none, where the ledger does
        not have them all as grouping; ValueError for a token that is newer than its trajectory's completion.
        """
        rows = [self._row(entry) for entry in entries]
        self.ledger.move_many([entry.id for entry in entries], State.POOLED)
        together = self.options.unit == "group"
        for entry, row in zip(entries, rows, strict=True):
            self._columns.append(row | {"unit": self._next_unit})
            self._payloads[entry.id] = entry.payload
            self._latest = max(self._latest, entry.completed_version)
            self._bias.generated(row["n_sampled"])
            self._lengths.add(row["n_sampled"])
            self._next_unit += 0 if together else 1
        if together and rows:
            self._next_unit += 1
            self._window.add(round(sum(row["n_sampled"] for row in rows) / len(rows)))
        else:
            for row in rows:
                self._window.add(row["n_sampled"])
        self._units += bool(rows) if together else len(rows)

    def add_many(self, arrivals: Arrivals[T]) -> None:
        """`add` for many at once, in columns: the same draws follow. Raises as `add` does."""
        rows = self._new_rows(arrivals)
        ids, tokens = rows["id"], rows["n_sampled"]
        self.ledger.move_many(ids, State.POOLED)
        self._columns.extend(rows)
        self._payloads.update(zip(ids.tolist(), arrivals.payloads, strict=True))
        self._latest = max(self._latest, int(arrivals.completed_version.max(initial=0)))
        self._bias.generated_many(tokens)
        self._lengths.add_many(tokens)
        if self.options.unit == "group":
            added = int(ids.size > 0)
            if added:
                self._window.add(round(int(tokens.sum()) / ids.size))
        else:
            added = ids.size
            self._window.add_many(tokens)
        self._units += added
        self._next_unit += added

    def ready(self) -> bool:
        """Whether `draw` would do something: a batch is waiting (with `sync`: and nothing is in flight)."""
        return self.policy.ready(self._units, self._in_flight())

    def draw(self, version: int) -> Draw[T] | None:
        """Reject what the policy rejects and draw a batch, at published version `version`; None where not `ready`.

        Drawn trajectories come in order of completion. Raises ValueError for a version that lies behind a completion,
        RunError where the ledger does not balance.
        """
        if not self.ready():
            return None
        started = time.perf_counter()
        self.check()
        occupancy = self._units
        selection = self.policy.select(self.view(version))
        drawn, rejected = self._rows(selection.drawn), self._rows(selection.rejected)
        ids, rejected_ids = self._columns["id"].take(drawn), self._columns["id"].take(rejected)
        self.ledger.move_many(rejected_ids, State.REJECTED, STALE)
        self.ledger.move_many(ids, State.DRAWN)
        generation = self._columns["generation"].take(drawn)
        waiting = waiting_staleness(version, self._columns["completed_version"].take(drawn))
        metrics = self._measure(version, drawn, generation, waiting)
        payloads = tuple(map(self._payloads.pop, ids.tolist()))
        rejected_payloads = tuple(map(self._payloads.pop, rejected_ids.tolist()))
        self._take_out(drawn, rejected, selection)
        self.check()
        metrics |= {
            "pool/occupancy": float(occupancy),
            "pool/target": float(self.options.target_units),
            "pool/excess": float(max(0, occupancy - self.options.target_units)),
            "pool/budget": float(selection.rejected.size),
            "pool/rejected_total": float(self.rejected_total),
            "pool/draw_seconds": time.perf_counter() - started,
        }
        return Draw(version, ids, payloads, rejected_ids, rejected_payloads, generation, waiting, metrics)

    def view(self, version: int) -> PoolView:
        """The waiting units as the policy sees them, at least one, valid until the pool changes."""
        if version < self._latest:
            raise ValueError(f"a rollout completed at {self._latest}, ahead of the published version {version}")
        columns = self._columns
        effective, tokens = columns["effective_version"], columns["n_sampled"]
        oldest, last = columns["min_version"], columns["last_attempt"]
        length_counts = self._lengths.counts
        if self.options.unit == "group":
            starts = self._starts()
            total = np.add.reduceat(tokens, starts)
            effective = np.add.reduceat(tokens * effective, starts) / total
            tokens = np.rint(total / np.diff(starts, append=len(self))).astype(np.int64)
            length_counts = np.bincount(tokens)
            oldest = np.minimum.reduceat(oldest, starts)
            last = np.logical_or.reduceat(last, starts)
        return PoolView(version, effective, tokens, length_counts, oldest, last, self._window.values())

    def payloads(self) -> list[T]:
        """What waits, in order of completion."""
        return [self._payloads[trajectory_id] for trajectory_id in self._columns["id"].tolist()]

    def check(self) -> None:
        """Raise RunError unless the ledger balances and has as pooled exactly as many as wait here."""
        self.ledger.check()
        pooled = self.ledger.count(State.POOLED)
        if not pooled == len(self) == len(self._payloads):
            raise RunError(f"the ledger has {pooled} pooled, the pool {len(self)} with {len(self._payloads)} payloads")

    def summary(self) -> PoolSummary:
        """The run's figures up to now."""
        return summarise(self._totals, self._bias)

    def state_dict(self) -> dict[str, Any]:
        """Plain data and the payloads as they are. The ledger is saved by its owner, at the same moment."""
        return {
            "columns": self._columns.state_dict(),
            "payloads": self.payloads(),
            "next_unit": self._next_unit,
            "latest": self._latest,
            "rejected_total": self.rejected_total,
            "policy": (self.options.policy, self.policy.state_dict()),
            "window": self._window.state_dict(),
            "bias": self._bias.state_dict(),
            "totals": asdict(self._totals),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the pool of a checkpoint; load the ledger first. Raises RunError where the two don't belong together."""
        self._columns.load_state_dict(state["columns"])
        self._lengths.add_many(self._columns["n_sampled"])
        self._payloads = dict(zip(self._columns["id"].tolist(), state["payloads"], strict=True))
        self._next_unit = int(state["next_unit"])
        self._latest = int(state["latest"])
        self._units = np.unique(self._columns["unit"]).size
        self.rejected_total = int(state["rejected_total"])
        policy, policy_state = state["policy"]
        if policy == self.options.policy:
            self.policy.load_state_dict(policy_state)
        self._window.load_state_dict(state["window"])
        self._bias.load_state_dict(state["bias"])
        self._totals = StalenessTotals(**state["totals"])
        self.check()

    def _in_flight(self) -> int:
        return self.ledger.count(State.RUNNING) + self.ledger.count(State.GROUPING)

    def _row(self, entry: Entry[T]) -> dict[str, Any]:
        spans, completed = entry.spans, entry.completed_version
        tokens = generation_staleness(spans, completed)
        kind = self.options.staleness
        ranked = tokens if kind == "tokens" else generation_staleness(spans, completed, kind)
        return {
            "id": entry.id,
            "completed_version": completed,
            "generation": tokens,
            "effective_version": completed - self.options.lam * ranked,
            "n_sampled": spans.n_sampled,
            "min_version": min(spans.versions),
            "multi_version": spans.multi_version,
            "last_attempt": entry.last_attempt,
        }

    def _new_rows(self, arrivals: Arrivals[T]) -> dict[str, NDArray[Any]]:
        """The columns of many, as `_row` makes them of one."""
        spans, completed = arrivals.spans, arrivals.completed_version
        tokens = generation_staleness_of_many(spans, completed)
        kind = self.options.staleness
        ranked = tokens if kind == "tokens" else generation_staleness_of_many(spans, completed, kind)
        number = len(spans)
        min_version = np.minimum.reduceat(spans.versions, spans.first) if number else completed
        max_version = np.maximum.reduceat(spans.versions, spans.first) if number else completed
        together = self.options.unit == "group"
        return {
            "id": arrivals.ids,
            "unit": self._next_unit + (np.zeros(number, dtype=np.int64) if together else np.arange(number)),
            "completed_version": completed,
            "generation": tokens,
            "effective_version": completed - self.options.lam * ranked,
            "n_sampled": spans.n_sampled,
            "min_version": min_version,
            "multi_version": max_version > min_version,
            "last_attempt": arrivals.last_attempt,
        }

    def _starts(self) -> NDArray[np.int64]:
        """The first row of every unit."""
        unit = self._columns["unit"]
        return np.flatnonzero(np.diff(unit, prepend=unit[:1] - 1))

    def _rows(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of all members of `units`, rising."""
        if self.options.unit == "trajectory" or not units.size:
            return units
        bounds = np.append(self._starts(), len(self))
        return np.concatenate([np.arange(bounds[k], bounds[k + 1]) for k in units])

    def _take_out(self, drawn: NDArray[np.int64], rejected: NDArray[np.int64], selection: Selection) -> None:
        gone = np.sort(np.concatenate((drawn, rejected)))
        self._lengths.remove_many(self._columns["n_sampled"].take(gone))
        self._columns.remove(gone)
        self._units -= selection.drawn.size + selection.rejected.size
        self.rejected_total += rejected.size

    def _measure(
        self,
        version: int,
        drawn: NDArray[np.int64],
        generation: NDArray[np.float64],
        waiting: NDArray[np.float64],
    ) -> dict[str, float]:
        """Count the drawn rows into the totals; their staleness and the present length bias."""
        if not drawn.size:
            return {}
        tokens = self._columns["n_sampled"].take(drawn)
        effective = version - self._columns["effective_version"].take(drawn)
        token_lag = float(tokens @ (waiting + generation))
        totals = self._totals
        totals.drawn += drawn.size
        totals.generation += float(generation.sum())
        totals.waiting += float(waiting.sum())
        totals.effective += float(effective.sum())
        totals.token_lag += token_lag
        totals.tokens += int(tokens.sum())
        totals.multi_version += int(self._columns["multi_version"].take(drawn).sum())
        self._bias.trained(tokens)
        ratio, tail = self._bias.recent()
        return {
            **spreads(generation=generation, waiting=waiting, effective=effective),
            "staleness/token_mean": token_lag / int(tokens.sum()),
            "pool/length_ratio": float("nan") if ratio.value is None else ratio.value,
            "pool/tail_share": float("nan") if tail.value is None else tail.value,
        }
