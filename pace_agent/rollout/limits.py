"""The budgets of one rollout, as one object."""

from dataclasses import dataclass, replace

from pace_agent.types import StopReason


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rollout may spend. None: no limit. 0 means none at all, not unlimited.

    `turn_tokens` and `tokens` count sampled tokens, of one turn and of the rollout; `context` counts the whole
    sequence; `seconds` is time on the runtime's clock.
    """

    turns: int = 8
    turn_tokens: int | None = None
    tokens: int | None = None
    context: int | None = None
    tool_calls: int | None = None
    seconds: float | None = None

    def within(self, context: int) -> "Limits":
        """These limits, in an engine that has room for `context` tokens."""
        return replace(self, context=context if self.context is None else min(context, self.context))

    def turn_budget(self, *, sampled: int, length: int) -> tuple[int, StopReason]:
        """Tokens that the next turn may sample, and the reason that holds if it uses them all.

        `sampled`: tokens sampled so far. `length`: ids in the sequence so far. A budget of 0 or less ends the rollout
        before the turn.
        """
        budget, reason = self.turn_tokens, StopReason.TRUNCATED_TOKENS
        if self.tokens is not None and (budget is None or self.tokens - sampled < budget):
            budget = self.tokens - sampled
        if self.context is not None and (budget is None or self.context - length < budget):
            budget, reason = self.context - length, StopReason.TRUNCATED_CONTEXT
        if budget is None:
            raise ValueError("limits need at least one of turn_tokens, tokens and context")
        return budget, reason
