"""Readers of tool calls, one module for each way in which models write them."""

from collections.abc import Callable

from pace_agent.errors import UserError, did_you_mean
from pace_agent.tools.parsers import hermes
from pace_agent.types import Message

Parser = Callable[[str], Message]
"""Text of one assistant turn to a message. Never raises: what can't be read is a call with `error` set."""

_PARSERS: dict[str, Parser] = {"hermes": hermes.parse}


def names() -> tuple[str, ...]:
    """Names that `get_parser` knows."""
    return tuple(sorted(_PARSERS))


def get_parser(name: str) -> Parser:
    """The parser of that name. UserError for an unknown one, with the closest."""
    if name not in _PARSERS:
        raise UserError(f"Unknown tool-call parser {name!r}.{did_you_mean(name, names())}")
    return _PARSERS[name]
