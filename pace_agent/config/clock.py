"""The section of the clock: real time, or virtual time on which everything costs what is stated here."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pace_agent.config.section import Seconds, Section
from pace_agent.costs import DECODE_CURVE, PREFILL_TOKEN_SECONDS, Costs
from pace_agent.errors import UserError

PRODUCTION = 1.5
"""Where the trainer's pace is not given."""


class ClockSection(Section):
    """Real or virtual time. On virtual time a seed fixes the whole run, bit for bit on one kind of processor."""

    kind: Literal["wall", "virtual"] = "wall"
    """`virtual`: what a step, a tool call or an update takes is stated below and not measured; nothing is waited for.
    Rollouts, engine and trainer then share one thread, and `engine.process` has no effect."""
    decode_curve: list[list[float]] = Field(default_factory=lambda: [list(point) for point in DECODE_CURVE])
    """Seconds of a decode step by the rows that share it, as points [rows, seconds] with straight lines between."""
    prefill_token_seconds: Seconds = PREFILL_TOKEN_SECONDS
    """Seconds for each token of a prompt or a tool result that the engine computes."""
    production: Annotated[float, Field(ge=1)] | None = None
    """Tokens sampled over tokens trained in the same time, where the engine is full and tools take no time: sets the
    trainer's pace. Empty: 1.5, unless `step_seconds` or `trained_token_seconds` sets it."""
    step_seconds: Seconds | None = None
    """Seconds of an optimiser step, whatever is in its batch."""
    trained_token_seconds: Seconds | None = None
    """Seconds of an optimiser step for each sampled token in its batch."""
    update_seconds: Seconds = 0.02
    """Seconds of a weight update, in which nothing is sampled."""
    tool_seconds: Seconds | None = None
    """Seconds of a tool call: the median, where `tool_sigma` spreads them. Empty: tools take no time of their own."""
    tool_sigma: Annotated[float, Field(ge=0)] = 0.0
    """Spread of a tool call's seconds, log-normal: the standard deviation of their logarithm."""
    tool_slow_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of tool calls that take `tool_slow_seconds` instead."""
    tool_slow_seconds: Seconds | None = None
    """Seconds of a slow tool call."""

    @model_validator(mode="after")
    def _fits_together(self) -> "ClockSection":
        paces = [key for key in ("production", "step_seconds", "trained_token_seconds") if getattr(self, key)]
        if len(paces) > 1:
            raise ValueError(f"clock.{paces[0]} and clock.{paces[1]} both set the trainer's pace; give one of them")
        if self.tool_sigma and self.tool_seconds is None:
            raise ValueError("clock.tool_sigma spreads clock.tool_seconds, which is empty: set that too")
        if bool(self.tool_slow_share) != (self.tool_slow_seconds is not None):
            raise ValueError("clock.tool_slow_share and clock.tool_slow_seconds go together; set both or none")
        if short := [point for point in self.decode_curve if len(point) != 2]:
            raise ValueError(f"clock.decode_curve: {short[0]} is no point; write [rows, seconds]")
        try:
            self.costs(rows=1)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    def costs(self, *, rows: int) -> Costs:
        """What things cost, where `rows` rollouts decode together when the engine is full."""
        costs = Costs(
            decode_curve=tuple((n, seconds) for n, seconds in self.decode_curve),
            prefill_token_seconds=self.prefill_token_seconds,
            step_seconds=self.step_seconds,
            update_seconds=self.update_seconds,
            tool_seconds=self.tool_seconds or 0.0,
            tool_sigma=self.tool_sigma,
            tool_slow_share=self.tool_slow_share,
            tool_slow_seconds=self.tool_slow_seconds or 0.0,
        )
        pace = self.trained_token_seconds or (self.production or PRODUCTION) * costs.token_seconds(rows)
        return replace(costs, trained_token_seconds=pace)
