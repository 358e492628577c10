"""What a pool can be told, checked once, when it is made."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from pace_agent.errors import UserError, did_you_mean
from pace_agent.pool.staleness import StalenessKind

PolicyName = Literal["sync", "unfiltered", "max_staleness", "bounded_admission", "drop_oldest", "pace"]
Order = Literal["fifo", "freshest"]
Fairness = Literal["length", "none"]
Unit = Literal["trajectory", "group"]


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The pool's options. `batch_size`, `target` and `capacity` count units.

    A unit is a trajectory, or a whole group with unit="group": a batch is then `batch_size` groups, and the trainer
    gets every member of each. Raises UserError, naming the key, for a value outside its range.
    """

    policy: PolicyName = "pace"
    """Which rollouts may start, what is rejected and what is drawn: see `pace_agent.pool.policies`."""
    batch_size: int = 16
    """M: units that an optimiser step takes."""
    group_size: int = 1
    """Trajectories that are started together for one task. Admission goes by whole groups."""
    unit: Unit = "trajectory"
    """What is ranked, rejected and drawn as one."""
    target: int | None = None
    """N*: how many units the pool may hold before `pace` rejects any (default: one batch). For `drop_oldest`, how many
    it keeps."""
    beta: float = 1.0
    """`pace`: the share of the excess that a draw rejects."""
    cap: float = 1.0
    """`pace`: the largest share of the pool that one draw rejects."""
    lam: float = 1.0
    """The weight of the generation staleness in S = W + lam * G."""
    staleness: StalenessKind = "tokens"
    """How G is computed: `tokens`, or for ablation `turns`, `span`, `none`."""
    order: Order = "fifo"
    """`pace` and `drop_oldest`: draw the oldest completions of what is kept, or those with the lowest S."""
    fairness: Fairness = "length"
    """`pace`: split the budget over length bins, or rank all lengths together (which starves long rollouts)."""
    bins: int = 16
    """Length bins of a large pool; a small one has a quarter of its units."""
    window: int = 512
    """Completions from which the bins' edges are taken."""
    max_staleness: int = 4
    """`max_staleness`: the largest age of a trajectory's oldest token, in versions, when it is drawn."""
    eta: int = 2
    """`bounded_admission`: how many batches rollouts may run ahead of the trainer."""
    capacity: int | None = None
    """Waiting units at which no new rollout starts (default: 8 batches); `unfiltered` knows no capacity."""

    def __post_init__(self) -> None:
        _check_word("policy", self.policy, get_args(PolicyName))
        _check_word("unit", self.unit, get_args(Unit))
        _check_word("staleness", self.staleness, get_args(StalenessKind))
        _check_word("order", self.order, get_args(Order))
        _check_word("fairness", self.fairness, get_args(Fairness))
        for key in ("batch_size", "group_size", "bins", "window"):
            _check_least(key, getattr(self, key), 1)
        for key in ("beta", "lam", "max_staleness", "eta"):
            _check_least(key, getattr(self, key), 0)
        if not 0 <= self.cap <= 1:
            raise UserError(f"pool.cap is a share of the pool, from 0 to 1, got {self.cap}")
        _check_least("target", self.target_units, self.batch_size, "pool.batch_size")
        _check_least("capacity", self.capacity_units, self.target_units, "pool.target")

    @property
    def target_units(self) -> int:
        return self.batch_size if self.target is None else self.target

    @property
    def capacity_units(self) -> int:
        return max(8 * self.batch_size, self.target_units) if self.capacity is None else self.capacity

    @property
    def unit_size(self) -> int:
        """Trajectories in a full unit."""
        return self.group_size if self.unit == "group" else 1


def _check_word(key: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise UserError(f"pool.{key} can't be {value!r}.{did_you_mean(value, known)}")


def _check_least(key: str, value: float, least: int, source: str = "") -> None:
    if not least <= value < math.inf:
        raise UserError(f"pool.{key} must be at least {least}{f' ({source})' if source else ''}, got {value}")
