"""What things cost on the virtual clock, in seconds.

The cost of a decode step is a curve over the rows that share it. The defaults of decode and prefill were measured: the
local engine with the embedded model on one core of a processor.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pace_agent.errors import UserError

DECODE_CURVE = ((1, 0.00206), (16, 0.00298), (128, 0.0116))
"""486, 5,376 and 11,041 tokens per second."""
PREFILL_TOKEN_SECONDS = 3.5e-5
PREFILL_PER_SAMPLED = 2.0
"""Tokens that the engine computes without sampling, for each one that it samples: the embedded job's, recomputing what
a weight update made stale. Prefixes that rows share are computed once."""


@dataclass(frozen=True, slots=True)
class Costs:
    """`decode_curve` holds points (rows, seconds of a step) from few rows to many: straight lines between them, and the
    last one goes on; fewer rows take as long as the first point. A trainer step takes `step_seconds`, or
    `trained_token_seconds` for each sampled token in its batch. A tool call takes `tool_seconds`: the median of a
    log-normal distribution whose logarithm has the standard deviation `tool_sigma`. `tool_slow_share` of the calls take
    `tool_slow_seconds` instead.
    """

    decode_curve: Sequence[tuple[float, float]] = DECODE_CURVE
    prefill_token_seconds: float = PREFILL_TOKEN_SECONDS
    trained_token_seconds: float = 2.75e-4
    step_seconds: float | None = None
    update_seconds: float = 0.02
    tool_seconds: float = 0.0
    tool_sigma: float = 0.0
    tool_slow_share: float = 0.0
    tool_slow_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_curve(self.decode_curve)

    def decode(self, rows: int) -> float:
        """Seconds of a decode step that `rows` share."""
        points = self.decode_curve
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        right = min(bisect_left(points, (rows, 0.0)), len(points) - 1)
        (n0, s0), (n1, s1) = points[right - 1], points[right]
        return s0 + (s1 - s0) * (rows - n0) / (n1 - n0)

    def engine_step(self, sampled: int, prefilled: int) -> float:
        """Seconds of a forward pass that samples for `sampled` rows and computes `prefilled` tokens beside them."""
        return self.decode(max(sampled, 1)) + prefilled * self.prefill_token_seconds

    def trainer_step(self, tokens: int) -> float:
        """Seconds of an optimiser step on a batch with `tokens` sampled ones."""
        return tokens * self.trained_token_seconds if self.step_seconds is None else self.step_seconds

    def tool_call(self, seed: int, number: int) -> float:
        """Seconds of call `number` of the rollout with this seed."""
        if not self.tool_sigma and not self.tool_slow_share:
            return self.tool_seconds
        rng = random.Random(f"{seed}/{number}")
        slow, spread = rng.random() < self.tool_slow_share, rng.gauss(0.0, 1.0)
        return self.tool_slow_seconds if slow else self.tool_seconds * math.exp(self.tool_sigma * spread)

    def token_seconds(self, rows: int) -> float:
        """Seconds of engine time for each sampled token where `rows` decode all the time, prefill included."""
        return self.decode(rows) / rows + PREFILL_PER_SAMPLED * self.prefill_token_seconds


def check_curve(points: Sequence[tuple[float, float]]) -> None:
    """UserError unless rows rise from 1 or more, and seconds are above 0 and never fall."""
    if not points:
        raise UserError("clock.decode_curve is empty: it needs at least one point [rows, seconds]")
    for rows, seconds in points:
        if rows < 1 or rows != int(rows):
            raise UserError(f"clock.decode_curve: {rows:g} is no number of rows, which is a whole one from 1")
        if not 0 < seconds < math.inf:
            raise UserError(f"clock.decode_curve: a step of {rows:g} rows can't take {seconds} seconds")
    for (n0, s0), (n1, s1) in pairwise(points):
        if n1 <= n0:
            raise UserError(f"clock.decode_curve: rows must rise from point to point, but {n1:g} follows {n0:g}")
        if s1 < s0:
            raise UserError(f"clock.decode_curve: {n1:g} rows can't take less than {n0:g} do ({s1} < {s0} seconds)")
