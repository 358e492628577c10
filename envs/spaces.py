"""Gymnasium spaces of conversations.

A model's turn is an element of `TurnSpace`; what the environment says is an element of `MessagesSpace`. Neither has an
array form. Samples are for checks: short texts, and now and then a call of a tool that does not exist.
"""

import string
from typing import Any

from gymnasium import Space

from pace_agent.types import Message, ToolCall

_WORDS = string.ascii_lowercase + string.digits


class MessagesSpace(Space[tuple[Message, ...]]):
    """Tuples of messages, the empty one included (nothing is said after the end)."""

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def contains(self, x: Any) -> bool:
        return isinstance(x, tuple) and all(isinstance(each, Message) for each in x)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> tuple[Message, ...]:
        return tuple(Message("user", _text(self)) for _ in range(self.np_random.integers(0, 3)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessagesSpace)

    def __hash__(self) -> int:
        return hash(MessagesSpace)

    def __repr__(self) -> str:
        return "MessagesSpace()"


class TurnSpace(Space[Message | str]):
    """A turn of the model: a message of role `assistant`, or the text that it wrote."""

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) or (isinstance(x, Message) and x.role == "assistant")

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Message | str:
        text = _text(self)
        kind = int(self.np_random.integers(0, 3))
        if kind == 0:
            return text
        return Message("assistant", text, tool_calls=(ToolCall(_text(self), {}),) if kind == 1 else ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TurnSpace)

    def __hash__(self) -> int:
        return hash(TurnSpace)

    def __repr__(self) -> str:
        return "TurnSpace()"


def _text(space: Space[Any]) -> str:
    picks = space.np_random.integers(0, len(_WORDS), size=8)
    return "".join(_WORDS[int(pick)] for pick in picks)
