"""Tool calls out of a turn's text: every attempt is a call, and what can't be read is answered, never executed."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_agent.errors import UserError
from pace_agent.tools.parsers import get_parser, names
from pace_agent.tools.parsers.hermes import parse
from pace_agent.types import ToolCall


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def call(name: str, arguments: dict[str, Any]) -> str:
    return tagged(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))


def only(text: str) -> ToolCall:
    (found,) = parse(text).tool_calls
    return found


def test_text_without_calls_is_content_as_it_is() -> None:
    for text in ("", "ok \n", " <tool> { } </tools>", "<think>a</think>\n\nb"):
        message = parse(text)
        assert (message.role, message.content, message.tool_calls) == ("assistant", text, ())


def test_one_call() -> None:
    message = parse(f"Let me look.\n{call('price', {'item': 'plums'})}")
    assert message.content == "Let me look."
    assert message.tool_calls == (ToolCall("price", {"item": "plums"}, "call_0"),)


def test_two_calls_keep_their_order() -> None:
    message = parse(f"First {call('a', {'x': 1})}\n{call('b', {})} done")
    assert message.tool_calls == (ToolCall("a", {"x": 1}, "call_0"), ToolCall("b", {}, "call_1"))
    assert message.content == "First \n done"


def test_closing_tag_inside_a_string_is_text() -> None:
    command = "echo </tool_call> <tool_call>"
    assert only(call("bash", {"cmd": command})) == ToolCall("bash", {"cmd": command}, "call_0")


def test_line_breaks_in_strings_are_kept() -> None:
    assert only(tagged('{"name": "f", "arguments": {"x": "a\nb\tc"}}')).arguments == {"x": "a\nb\tc"}


def test_non_ascii_is_kept() -> None:
    assert only(call("查价", {"项": "价格 é 🙂"})) == ToolCall("查价", {"项": "价格 é 🙂"}, "call_0")
    assert only(tagged(r'{"name": "f", "arguments": {"x": "\u4ef7\ud83d\ude42"}}')).arguments == {"x": "价🙂"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"\d+", r"\d+"),
        (r"\d\n\\d\"", '\\d\n\\d"'),
        (r"C:\Users\é", r"C:\Users\é"),
        (r"\u12", r"\u12"),
        (r"\'{", r"\'{"),
        (r"</tool_call>\d", r"</tool_call>\d"),
    ],
)
def test_backslashes_that_escape_nothing_stay(written: str, meant: str) -> None:
    body = '{"name": "f", "arguments": {"x": "WRITTEN", "y": {}}}'.replace("WRITTEN", written)
    message = parse(f"<tool_call>{body}</tool_call> and \\d" + call("g", {}))
    assert message.tool_calls == (ToolCall("f", {"x": meant, "y": {}}, "call_0"), ToolCall("g", {}, "call_1"))
    assert message.content == r"and \d"


def test_values_keep_their_types() -> None:
    arguments = {"zip": "02134", "n": 5, "x": 5.0, "s": "5.0", "b": True, "none": None, "list": [1, {"a": "2"}]}
    parsed = only(call("f", arguments)).arguments
    assert parsed == arguments
    assert [type(value) for value in parsed.values()] == [type(value) for value in arguments.values()]


def test_arguments_given_as_a_json_string() -> None:
    for arguments in ({"x": "a\nb", "y": [1]}, {}):
        body = json.dumps({"name": "f", "arguments": json.dumps(arguments)})
        assert only(tagged(body)) == ToolCall("f", arguments, "call_0")


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        (tagged('{"name": "f"}'), "f", '"arguments" is missing'),
        (tagged('{"name": "f", "parameters": {}}'), "f", '"arguments" is missing'),
        ('<tool_call>{"name":', "", "the end of the text"),
        ("<tool_call>", "", "the end of the text"),
        (tagged('{"name": "f", "arguments": {"x": 1'), "f", "delimiter"),
        (tagged('{"name": "f", "arguments": {"x": "a}}'), "f", "Unterminated string"),
        (tagged(r'{"name": "f", "arguments": {"x": "C:\dir\"}}'), "f", "unknown escape"),
        (tagged('{"name": "f", "arguments": {"x": "\\d"'), "f", "does not end"),
        (tagged("{'name': 'f', 'arguments': {}}"), "", "double quotes"),
        (tagged('{"name": "f", "arguments": null}'), "f", "got null"),
        (tagged('{"name": "f", "arguments": [1]}'), "f", "got a list"),
        (tagged('{"name": "f", "arguments": "x"}'), "f", "holds no JSON object"),
        (tagged('{"name": "f", "arguments": "{} {}"}'), "f", "more than a JSON object"),
        (tagged('{"name": "f", "arguments": "3"}'), "f", "got a number"),
        (tagged('{"name": "", "arguments": {}}'), "", '"name" must be'),
        (tagged('{"name": 3, "arguments": {}}'), "", '"name" must be'),
        (tagged('{"arguments": {}}'), "", '"name" must be'),
        (tagged('["f", {}]'), "", "got a list"),
        (tagged("f(x=1)"), "", "Expecting value"),
        ('<tool_call>{"name": "f", "arguments": {}}', "f", "not followed by </tool_call> but by the end"),
        ('<tool_call>{"name": "f", "arguments": {}}</function>', "f", "but by '</function>'"),
        (tagged('{"name": "f", "arguments": {}}}'), "f", "but by '}"),
        (tagged('{"name": "f", "arguments": {"x": NaN}}'), "f", "NaN is no JSON value"),
        (tagged('{"name": "f", "arguments": {"x": %s}}' % ("9" * 5000)), "f", "digits"),
        (tagged('{"name": "f", "arguments": {"x": %s}}' % ("[" * 100_000)), "f", "recursion"),
        (tagged(r'{"name": "f", "arguments": {"x": "\ud83d"}}'), "f", "half a character"),
        ("Answer: 3</tool_call>", "", "without a <tool_call>"),
    ],
)
def test_what_cannot_be_read_is_a_call_with_an_error(text: str, name: str, error: str) -> None:
    found = only(text)
    assert (found.name, dict(found.arguments), found.id) == (name, {}, "call_0")
    assert found.error is not None
    assert error in found.error
    assert len(found.error) < 300
    # What stands after it is read all the same.
    if text.endswith("</tool_call>"):
        after = parse(f"{text}\n{call('g', {'y': 1})} end")
        assert after.tool_calls[1:] == (ToolCall("g", {"y": 1}, "call_1"),)
        assert after.content.endswith("end")


def test_a_call_that_was_given_up_does_not_take_the_next_with_it() -> None:
    message = parse('<tool_call>{"name": "a", hm <tool_call>{"name": "b", "arguments": {}}</tool_call>')
    assert [(found.name, found.error is None) for found in message.tool_calls] == [("a", False), ("b", True)]


def test_tags_in_thoughts_are_no_calls() -> None:
    thought = f"<think>maybe {call('no', {})} or </tool_call></think>"
    message = parse(f"{thought}\n{call('yes', {'x': '</think>'})}")
    assert message.tool_calls == (ToolCall("yes", {"x": "</think>"}, "call_0"),)
    assert message.content == thought
    # A thought that never ends hides nothing.
    assert only(f"<think>so {call('yes', {})}").name == "yes"
    assert [
        found.name for found in parse(f"{call('a', {'x': '<think>'})}{call('b', {'x': '</think>'})}").tool_calls
    ] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("piece", ["<think>", "<tool_call>", "</tool_call>", "<tool_call>{", '<tool_call>{"a": "\\d'])
def test_a_turn_that_repeats_itself_ends_in_one_error(piece: str) -> None:
    calls = parse(piece * 3_000).tool_calls
    assert len(calls) <= 101
    assert all(found.error for found in calls)
    assert piece == "<think>" or "more than 100 calls" in str(calls[-1].error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
WORDS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": {}', "}", '"', "\\", "<think>", "</think>", "a"]
    ),
    max_size=14,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.text(min_size=1, max_size=6), st.dictionaries(WORDS, JSON | WORDS, max_size=3)), max_size=3
    ),
    ascii_only=st.booleans(),
)
def test_calls_come_back_as_they_were_written(calls: list[tuple[str, dict[str, Any]]], ascii_only: bool) -> None:
    bodies = [json.dumps({"name": name, "arguments": given_}, ensure_ascii=ascii_only) for name, given_ in calls]
    message = parse("".join(f"<tool_call>{body}</tool_call>" for body in bodies))
    assert [(found.name, found.arguments, found.error) for found in message.tool_calls] == [
        (*pair, None) for pair in calls
    ]
    assert [found.id for found in message.tool_calls] == [f"call_{i}" for i in range(len(calls))]
    assert message.content == ""


@settings(deadline=None)
@given(text=WORDS)
def test_any_text_is_read_and_no_attempt_is_dropped(text: str) -> None:
    message = parse(text)
    assert [found.id for found in message.tool_calls] == [f"call_{i}" for i in range(len(message.tool_calls))]
    assert all(found.error or found.name for found in message.tool_calls)
    assert all(not found.arguments for found in message.tool_calls if found.error)
    if "<think>" not in text and ("<tool_call>" in text or "</tool_call>" in text):
        assert message.tool_calls
    if not message.tool_calls:
        assert message.content == text


def test_parsers_are_found_by_name() -> None:
    assert "hermes" in names()
    assert get_parser("hermes") is parse
    with pytest.raises(UserError, match=r"'herms'\. Did you mean 'hermes'\?"):
        get_parser("herms")
