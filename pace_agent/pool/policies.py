"""The six policies: may new rollouts start, what is rejected, what is drawn.

    policy              admits                                            rejects              draws
    sync                the next batch, then none until its step ended    nothing              the oldest M
    unfiltered          always                                            nothing              the oldest M
    max_staleness       always                                            V - min(v_i) > limit the oldest M
    bounded_admission   lead < (eta + 1) M                                nothing              the oldest M
    drop_oldest         always                                            all but newest N*    M by `order`
    pace                always                                            the budget's worth   M by `order`

"Always" is up to the dispatcher's concurrency. Every policy but `unfiltered` stops while `capacity` units are waiting;
rollouts in flight don't count, and go on to enter the pool, which is never shut to a completed rollout.

The lead is what was submitted and neither trained on nor lost: in flight, waiting, or drawn. Rollouts that failed or
carried no signal are in none of these, so that their capacity comes back. Where every version trained M units, this is
the rule submitted < (V + eta + 1) M, minus what failed or carried no signal; and because the lead counts what exists
instead of what ever was, a run that starts at version 100 admits (eta + 1) M rollouts and not 100 batches more.

No policy can come to rest: each admits while the lead is less than a batch, so that after failures, after rejections,
and with batches that are no multiple of the group size, there is always something to wait for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pace_agent.pool.budget import bin_counts, length_edges, rejection_budget, resample_carries, split_budget
from pace_agent.pool.choice import FEW, lowest, lowest_per_bin
from pace_agent.pool.options import PoolOptions


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """What an admission is decided on, all in trajectories; a group of fewer members counts in full."""

    requested: int
    """Trajectories that would start together."""
    in_flight: int
    """Running, or complete and waiting for the rest of their group."""
    pooled: int
    drawn: int
    """In batches whose optimiser step has not ended."""

    @property
    def lead(self) -> int:
        return self.in_flight + self.pooled + self.drawn


@dataclass(frozen=True, slots=True, eq=False)
class PoolView:
    """The waiting units in order of completion: columns of shape (N,), not to be changed.

    `effective_version`: c - lam * G, token-weighted over a group; S = version - effective_version.
    `length`: sampled tokens (of a group: per member); `length_counts[k]`: units of length k, shape (longest + 1,) or
    more. `min_version`: of the oldest token.
    `last_attempt`: the task is lost if this unit is rejected. `window`: lengths of the last completions, shape (w,).
    """

    version: int
    effective_version: NDArray[np.float64]
    length: NDArray[np.int64]
    length_counts: NDArray[np.int64]
    min_version: NDArray[np.int64]
    last_attempt: NDArray[np.bool_]
    window: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.length.size)

    def bin_counts(self, edges: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many units lie in each length bin: from the lengths where these are few, else from their counts."""
        if len(self) <= FEW:
            return np.bincount(edges.searchsorted(self.length, side="right"), minlength=edges.size + 1)
        return bin_counts(self.length_counts, edges)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Rows of a view, each list rising and the two disjoint. `drawn` has M rows, or none where too few were left."""

    rejected: NDArray[np.int64]
    drawn: NDArray[np.int64]


class Policy(Protocol):
    """`select` is asked only when the policy is `ready`, which needs at least M units; all numbers there are units but
    `in_flight`. The state goes into the pool's checkpoint."""

    def admit(self, state: AdmissionState) -> bool: ...

    def ready(self, pooled: int, in_flight: int) -> bool: ...

    def select(self, view: PoolView) -> Selection: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


NOTHING: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class _Base:
    """Draws the oldest, rejects nothing, stops when the pool is full; the policies change what they differ in."""

    def __init__(self, options: PoolOptions) -> None:
        self.options = options
        self.batch = options.batch_size * options.unit_size
        self.capacity = options.capacity_units * options.unit_size

    def admit(self, state: AdmissionState) -> bool:
        return state.pooled < self.capacity

    def ready(self, pooled: int, in_flight: int) -> bool:
        return pooled >= self.options.batch_size

    def select(self, view: PoolView) -> Selection:
        return Selection(NOTHING, np.arange(self.options.batch_size))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Sync(_Base):
    """Generation and training take turns: no rollout is in flight during a step.

    Where a refilled group is more than the batch had room for, the rest of it waits for the next one.
    """

    def admit(self, state: AdmissionState) -> bool:
        return state.drawn == 0 and state.lead < self.batch

    def ready(self, pooled: int, in_flight: int) -> bool:
        return in_flight == 0 and super().ready(pooled, in_flight)


class Unfiltered(_Base):
    """First in, first out, without a bound."""

    def admit(self, state: AdmissionState) -> bool:
        return True


class BoundedAdmission(_Base):
    """Rollouts run at most eta batches ahead of the trainer; nothing is rejected."""

    def admit(self, state: AdmissionState) -> bool:
        bound = (self.options.eta + 1) * self.batch
        fits = state.lead + state.requested <= bound or state.lead < self.batch
        return fits and super().admit(state)


class MaxStaleness(_Base):
    """Rejects by the age of the oldest token, as TRL does. It may reject so many that no batch is left to draw."""

    def select(self, view: PoolView) -> Selection:
        stale = view.version - view.min_version > self.options.max_staleness
        return Selection(np.flatnonzero(stale), _full(np.flatnonzero(~stale), self.options.batch_size))


class DropOldest(_Base):
    """Rejects the oldest completions beyond N*."""

    def select(self, view: PoolView) -> Selection:
        rejected = np.arange(max(0, len(view) - self.options.target_units))
        return Selection(rejected, _draw(self.options, view, rejected))


class Pace(_Base):
    """Rejects the highest S, as many as the excess allows, from every length in proportion.

    A unit on its task's last attempt is never rejected: a task whose rollouts are always slow would otherwise always be
    among the stalest, and be lost. Where nothing else is left the budget is not used up.
    """

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        self.carry = 0.0
        self.bin_carries: NDArray[np.float64] = np.zeros(0)

    def select(self, view: PoolView) -> Selection:
        o = self.options
        budget = rejection_budget(len(view), o.batch_size, o.target_units, o.beta, o.cap, self.carry)
        self.carry = budget.carry
        rejected = self._reject(view, budget.budget) if budget.budget else NOTHING
        return Selection(rejected, _draw(o, view, rejected))

    def _reject(self, view: PoolView, budget: int) -> NDArray[np.int64]:
        n_bins = self.options.bins if self.options.fairness == "length" else 1
        edges = length_edges(view.window, len(view), n_bins)
        counts = view.bin_counts(edges)
        spared = view.length[view.last_attempt]
        room = counts - bin_counts(np.bincount(spared), edges) if spared.size else counts
        carries = resample_carries(self.bin_carries, counts.size)
        shares, self.bin_carries = split_budget(budget, counts, carries, room)
        # The lowest effective version is the highest S.
        return lowest_per_bin(view.effective_version, view.length, edges, shares, view.last_attempt)

    def state_dict(self) -> dict[str, Any]:
        return {"carry": self.carry, "bin_carries": self.bin_carries.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.carry = float(state["carry"])
        self.bin_carries = np.asarray(state["bin_carries"], dtype=np.float64)


def _draw(options: PoolOptions, view: PoolView, rejected: NDArray[np.int64]) -> NDArray[np.int64]:
    """M of the rows that are not rejected, by `order`; none where fewer are left.

    With `freshest`, last attempts come before all others: they are never rejected and would wait for ever.
    """
    m = options.batch_size
    if options.order == "freshest":
        kept = np.delete(np.arange(len(view)), rejected)
        age = np.where(view.last_attempt[kept], -np.inf, -view.effective_version[kept])
        return kept[_full(lowest(age, m), m)]
    reach = min(len(view), m + rejected.size)  # the oldest M that are kept lie among these
    kept = np.ones(reach, dtype=np.bool_)
    kept[rejected[: np.searchsorted(rejected, reach)]] = False
    return _full(np.flatnonzero(kept), m)


def _full(rows: NDArray[np.int64], m: int) -> NDArray[np.int64]:
    return rows[:m] if rows.size >= m else NOTHING


POLICIES: Mapping[str, type[_Base]] = {
    "sync": Sync,
    "unfiltered": Unfiltered,
    "max_staleness": MaxStaleness,
    "bounded_admission": BoundedAdmission,
    "drop_oldest": DropOldest,
    "pace": Pace,
}


def make_policy(options: PoolOptions) -> Policy:
    """The policy that the options name."""
    return POLICIES[options.policy](options)
