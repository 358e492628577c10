"""What the simulated rollouts are like, and how fast they come: drawn from distributions that are stated here.

A slot samples the tokens of one rollout after another. Time has two scales. On the *work* scale every slot samples at
its full speed; one second of it passes in 1 / speed(n) seconds while n slots share the decode step. Everything that a
rollout does is on the work scale, also its wait for a tool: with few slots at work both are shorter. Only the trainer
runs by the seconds alone.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pace_agent.errors import UserError, did_you_mean

LengthKind = Literal["lognormal", "deterministic"]


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """The speed of a slot falls as more share the decode step: speed(n) = 1 / (fixed + shared * n / slots).

    `fixed` and `shared` are parts of the time of one decode step with `slots` at work: what does not depend on their
    number, and what grows with it. With fixed + shared = 1 the full speed is that of `slots` slots.
    """

    fixed: float = 0.5
    shared: float = 0.5
    slots: int = 256

    def __post_init__(self) -> None:
        for key in ("fixed", "shared"):
            _check_range(f"curve.{key}", getattr(self, key), 0, math.inf)
        _check_range("curve.slots", self.slots, 1, math.inf)
        if not self.fixed + self.shared > 0:
            raise UserError("a decode step takes time: curve.fixed and curve.shared can't both be 0")

    def speed(self, n: int) -> float:
        """Work seconds that pass in one second while `n` slots are at work."""
        return 1 / (self.fixed + self.shared * n / self.slots)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Some rollouts in columns of one length. `decode` and `stall` are seconds on the work scale.

    A rollout samples `length` tokens evenly over `decode` seconds; after the share `stall_at` of them it waits `stall`
    seconds for a tool, once (0: never).
    """

    length: NDArray[np.int64]
    decode: NDArray[np.float64]
    stall: NDArray[np.float64]
    stall_at: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Workload:
    """The rollouts, and how they compare with what the trainer takes. Raises UserError, naming the key, for bad values.

    The time of one mean length is mean_length * token_seconds.
    """

    slots: int = 256
    """Rollouts that sample at the same time."""
    ratio: float = 1.5
    """Production over consumption: completed rollouts while no slot waits, over what the trainer takes while it does
    not wait. At least 1."""
    mean_length: float = 1000.0
    """Tokens of a rollout, before the cut."""
    lengths: LengthKind = "lognormal"
    """`lognormal`, or `deterministic`: every rollout has the mean length (rounded), the full speed, and no stall."""
    sigma: float = 1.0
    """Of the logarithm of the length."""
    cut: float = 20.0
    """A longer rollout ends at this many mean lengths."""
    speed_sigma: float = 0.3
    """Of the logarithm of a rollout's own speed, whose median is the full speed."""
    stall_share: float = 0.3
    """Rollouts that a tool holds up, once, at a place that is uniform over their tokens."""
    stall_mean: float = 1.0
    """Mean of a stall, which is exponential, in times of one mean length."""
    token_seconds: float = 0.02
    """Time of one token at full speed."""
    curve: DecodeCurve = field(default_factory=DecodeCurve)
    staggered: bool = True
    """The first rollouts begin evenly over one mean rollout; otherwise all at once."""

    def __post_init__(self) -> None:
        if self.lengths not in get_args(LengthKind):
            raise UserError(f"lengths can't be {self.lengths!r}.{did_you_mean(self.lengths, get_args(LengthKind))}")
        if not 1 <= self.ratio < math.inf:
            raise UserError(
                f"ratio must be at least 1, got {self.ratio}: with less, the trainer waits for rollouts. To see that, "
                "give step_seconds instead"
            )
        for key in ("token_seconds", "mean_length", "cut"):
            if not 0 < getattr(self, key) < math.inf:
                raise UserError(f"{key} must be a number above 0, got {getattr(self, key)}: every rollout takes time")
        _check_range("slots", self.slots, 1, 1_000_000)
        _check_range("mean_length", self.mean_length, 1, 1e6)
        _check_range("cut", self.cut, 1, 1000)
        _check_range("stall_share", self.stall_share, 0, 1)
        for key in ("sigma", "speed_sigma", "stall_mean"):
            _check_range(key, getattr(self, key), 0, 100)

    @property
    def mean_tokens(self) -> float:
        """Mean length after the cut; the rounding to whole tokens is left out.

        With X log-normal of mean m and c = cut * m: E[min(X, c)] = m Phi((ln c - mu - sigma^2) / sigma)
        + c (1 - Phi((ln c - mu) / sigma)), where mu = ln m - sigma^2 / 2.
        """
        if self.lengths == "deterministic":
            return float(max(1, round(self.mean_length)))
        if self.sigma == 0:
            return self.mean_length
        z = (math.log(self.cut) + self.sigma**2 / 2) / self.sigma
        return self.mean_length * (_phi(z - self.sigma) + self.cut * (1 - _phi(z)))

    @property
    def mean_seconds(self) -> float:
        """Mean time of a rollout in its slot, on the work scale: sampling and stall."""
        sampling = self.mean_tokens * self.token_seconds
        if self.lengths == "deterministic":
            return sampling
        stall = self.stall_share * self.stall_mean * self.mean_length * self.token_seconds
        return sampling * math.exp(self.speed_sigma**2 / 2) + stall

    @property
    def production(self) -> float:
        """Completed rollouts per second while no slot waits."""
        return self.slots * self.curve.speed(self.slots) / self.mean_seconds

    def step_seconds(self, batch_size: int) -> float:
        """Time of a trainer step on so many rollouts, by the ratio."""
        return batch_size * self.ratio / self.production

    def draw(self, rng: np.random.Generator, number: int) -> Rollouts:
        """So many rollouts, independent of each other."""
        if self.lengths == "deterministic":
            length = np.full(number, round(self.mean_tokens))
            return Rollouts(length, length * self.token_seconds, np.zeros(number), np.zeros(number))
        drawn = rng.lognormal(math.log(self.mean_length) - self.sigma**2 / 2, self.sigma, number)
        length = np.maximum(np.rint(np.minimum(drawn, self.cut * self.mean_length)), 1).astype(np.int64)
        decode = length * self.token_seconds / rng.lognormal(0.0, self.speed_sigma, number)
        stall = rng.exponential(self.stall_mean * self.mean_length * self.token_seconds, number)
        stall[rng.random(number) >= self.stall_share] = 0.0
        return Rollouts(length, decode, stall, rng.random(number))


def _phi(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2


def _check_range(key: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most or math.isinf(value):
        upper = "" if math.isinf(most) else f" and at most {most:,.0f}"
        raise UserError(f"{key} must be at least {least:g}{upper}, got {value}")
