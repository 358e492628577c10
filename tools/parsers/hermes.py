"""Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

What always holds:

* Every `<tool_call>` outside a thought becomes one call, in order, with the ids `call_0`, `call_1`, ... What can't be
  read, or is not closed, becomes a call with `error` set: it is answered, not dropped, and not executed. So does a
  `</tool_call>` that closes nothing. After 100 calls in one turn the rest of it becomes one such call.
* A call is read by a JSON decoder up to the end of its object, so tags inside strings are text.
* Argument values are those that the JSON holds: no string becomes a number here.

More lenient than JSON in two things that models do and that have one meaning: line breaks and other control characters
in strings, and a backslash before a character that JSON does not know as an escape (`"\\d+"`), which stays a backslash.
A tag inside `<think>...</think>` is part of a thought; a thought that the prompt opened can't be told from other text.
"""

import json
import re
from typing import Any, NoReturn

from pace_agent.types import Message, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"

_TAG = re.compile(f"{OPEN}|{CLOSE}|{_THINK}")
_CALL_TAG = re.compile(f"{OPEN}|{CLOSE}")
_BETWEEN_CALLS = re.compile(rf"{CLOSE}\s*(?={OPEN})")
_NOT_SPACE = re.compile(r"\S|$")
_STRING_OR_BRACE = re.compile(r'"(?:[^"\\]|\\.)*"|[{}]', re.DOTALL)
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_SHOWN = 40
_MOST_CALLS = 100


class _Unreadable(Exception):
    """What is wrong with a call, and how far it was read."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.position = position


def parse(text: str) -> Message:
    """The assistant's message: its calls, and as content the text outside them (stripped where there are calls)."""
    calls: list[ToolCall] = []
    content: list[str] = []
    last_thought = text.rfind(_THOUGHT)
    outside = seen = 0
    while tag := _TAG.search(text, seen):
        if tag[0] == _THINK:
            seen = text.index(_THOUGHT, tag.end()) if tag.end() <= last_thought else tag.end()
            continue
        content.append(text[outside : tag.start()])
        call_id = f"call_{len(calls)}"
        if len(calls) == _MOST_CALLS:  # a model that repeats a tag must not cost the square of its output
            call, outside = ToolCall("", {}, call_id, f"more than {_MOST_CALLS} calls in one turn"), len(text)
        elif tag[0] == OPEN:
            call, outside = _read_call(text, tag.end(), call_id)
        else:
            call, outside = ToolCall("", {}, call_id, f"{CLOSE} without a {OPEN} before it"), tag.end()
        calls.append(call)
        seen = outside
    content.append(text[outside:])
    joined = "".join(content)
    return Message("assistant", joined.strip() if calls else joined, tuple(calls))


def _read_call(text: str, start: int, call_id: str) -> tuple[ToolCall, int]:
    """The call whose opening tag ends at `start`, and where the text after it begins."""
    try:
        value, end = _decode(text, start)
        name, arguments = _fields(value, end)
        end = _past_space(text, end)
        if not text.startswith(CLOSE, end):
            found = _shown(text, end)
            raise _Unreadable(f"the call's object is not followed by {CLOSE} but by {found}", end)
    except _Unreadable as error:
        stop = _end_of_unreadable(text, start, error.position)
        named = _NAME.search(text, start, stop)
        return ToolCall(named[1] if named else "", {}, call_id, f"tool call not readable: {error}"), stop
    return ToolCall(name, arguments, call_id), end + len(CLOSE)


def _end_of_unreadable(text: str, start: int, position: int) -> int:
    """Where to read on after a call that starts at `start` and could be read up to `position`.

    A string that was never closed runs on into the next call, so a border between two calls ends it first.
    """
    if border := _BETWEEN_CALLS.search(text, start, position):
        return border.end()
    tag = _CALL_TAG.search(text, position)
    if tag is None:
        return len(text)
    return tag.start() if tag[0] == OPEN else tag.end()


def _fields(value: Any, end: int) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a decoded call that ends at `end`."""
    if not isinstance(value, dict):
        raise _Unreadable(f"expected an object with name and arguments, got {_kind(value)}", end)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _Unreadable('"name" must be the name of a tool', end)
    if "arguments" not in value:
        raise _Unreadable('"arguments" is missing; give an object, {} for none', end)
    arguments = value["arguments"]
    if isinstance(arguments, str):
        try:
            arguments, inner_end = _decode(arguments, 0)
        except _Unreadable as error:
            raise _Unreadable(f'"arguments" is a string that holds no JSON object: {error}', end) from error
        if _past_space(value["arguments"], inner_end) < len(value["arguments"]):
            raise _Unreadable('"arguments" is a string that holds more than a JSON object', end)
    if not isinstance(arguments, dict):
        raise _Unreadable(f'"arguments" must be an object, got {_kind(arguments)}', end)
    return name, arguments


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start` (after white space) and its end."""
    start = _past_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Invalid \\"):
            raise _Unreadable(f"{error.msg} at {_shown(text, error.pos)}", error.pos) from error
        value, end = _decode_repaired(text, start, error.pos)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(str(error), start) from error
    if "\\u" in text[start:end] and _HALF_PAIR.search(json.dumps(value, ensure_ascii=False)):
        raise _Unreadable("a \\u escape stands for half a character", end)
    return value, end


def _decode_repaired(text: str, start: int, bad: int) -> tuple[Any, int]:
    """The object at `start` with every backslash that opens no JSON escape taken as itself; the first is at `bad`."""
    end = _object_end(text, start)
    if end is None:
        raise _Unreadable(f"unknown escape at {_shown(text, bad)}, and the object does not end", bad)
    repaired = _ESCAPE.sub(lambda match: match[0] if len(match[0]) > 1 else "\\\\", text[start:end])
    try:
        return _DECODER.decode(repaired), end
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"unknown escape at {_shown(text, bad)}, then: {error}", bad) from error


def _object_end(text: str, start: int) -> int | None:
    depth = 0
    for token in _STRING_OR_BRACE.finditer(text, start):
        if token[0] == "{":
            depth += 1
        elif token[0] == "}":
            depth -= 1
            if depth == 0:
                return token.end()
    return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _past_space(text: str, position: int) -> int:
    found = _NOT_SPACE.search(text, position)
    return found.start() if found else len(text)


def _shown(text: str, position: int) -> str:
    return repr(text[position : position + _SHOWN]) if position < len(text) else "the end of the text"


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")
