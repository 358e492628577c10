"""What a chat template writes around the messages of one shape, so that most turns need no rendering at all.

A shape is the roles and the optional fields of the messages. Where a template copies their texts, trims them or quotes
them as JSON, its own ids are always the same and only the texts have to be encoded. Templates may do more (look for a
tag, say), so a skeleton counts only after it has predicted the ids for texts made to set such code off: those that hold
each string that stands in the template, spaces at the ends, quotes, and a lot. It is measured, not assumed.
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pace_agent.chat.encoding import MARK, TextEncoder

Render = Callable[[Sequence[str]], str]
"""Hidden texts to rendered text."""
Change = Callable[[str], str]

_SLOT_BASE = 0x100000
_SLOT = re.compile(f"{MARK}([\U00100000-\U0010fffd])")
_MOST_PROBES = 400
_TELLING = ' a "b"\n'
_PROBES = (_TELLING, " ", "0", "[]", '{"a": 1}', "\n\na\r\n\t", "'a' & <b>\\n \\\\", "é 价格 🙂", "a b\n" * 500)


def _same(text: str) -> str:
    return text


def _inside_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_CHANGES: tuple[Change, ...] = (_same, str.strip, _inside_json)
"""What templates commonly do with a text."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Fixed ids, each followed by a text in which a number is the place of a value; and what is done with each value.

    Holds for values that are not empty.
    """

    parts: tuple[tuple[tuple[int, ...], tuple[str | int, ...]], ...]
    changes: tuple[Change, ...]

    def fill(self, values: Sequence[str], encoder: TextEncoder, *, first: bool) -> list[int]:
        """The ids with `values` in their places. `first`: they open the sequence."""
        texts = [change(value) for change, value in zip(self.changes, values, strict=True)]
        out: list[int] = []
        for ids, mixed in self.parts:
            out.extend(ids)
            if mixed:
                text = "".join([part if isinstance(part, str) else texts[part] for part in mixed])
                out.extend(encoder.plain(text, first=first and not out))
        return out


def find_skeleton(
    render: Render, n_values: int, encoder: TextEncoder, template: str, *, first: bool
) -> Skeleton | None:
    """The skeleton behind `render`, or None where the template does more with texts than a skeleton can."""
    probes = _probes(template)
    if not encoder.plain_borders or "strftime_now" in template or len(probes) > _MOST_PROBES:
        return None

    def predicts(skeleton: Skeleton, values: Sequence[str]) -> bool:
        expected = encoder.ids(render([encoder.hide(value) for value in values]), first=first)
        return skeleton.fill(values, encoder, first=first) == expected

    written = render([f"{MARK}{chr(_SLOT_BASE + i)}" for i in range(n_values)])
    skeleton = Skeleton(_cut(written, encoder, first=first), (_same,) * n_values)
    for place in range(n_values):
        values = [_TELLING if i == place else "a" for i in range(n_values)]
        others = skeleton.changes[:place], skeleton.changes[place + 1 :]
        tries = (replace(skeleton, changes=(*others[0], change, *others[1])) for change in _CHANGES)
        fitting = next((tried for tried in tries if predicts(tried, values)), None)
        if fitting is None:
            return None
        skeleton = fitting
    for probe in probes:
        if not predicts(skeleton, [probe] * n_values):
            return None
        # Different texts too, for a template that looks at one message alone.
        if n_values > 1 and not predicts(skeleton, [probe if i % 2 else f"{i}" for i in range(n_values)]):
            return None
    return skeleton


def _cut(
    rendered: str, encoder: TextEncoder, *, first: bool
) -> tuple[tuple[tuple[int, ...], tuple[str | int, ...]], ...]:
    """`Skeleton.parts` of a text in which slots stand for the values."""
    parts: list[tuple[tuple[int, ...], tuple[str | int, ...]]] = []
    ids: list[int] = []
    for piece in encoder.split(rendered):
        if isinstance(piece, int):
            ids.append(piece)
        elif _SLOT.search(piece):
            # Odd places hold the slot characters that the group caught.
            cut = enumerate(_SLOT.split(piece))
            parts.append(
                (tuple(ids), tuple(ord(part) - _SLOT_BASE if i % 2 else part for i, part in cut if i % 2 or part))
            )
            ids = []
        else:
            ids.extend(encoder.plain(piece, first=first and not ids and not parts))
    return (*parts, (tuple(ids), ()))


def _probes(template: str) -> list[str]:
    """Texts that set off what a template may do with a content: its own strings, around, together and alone."""
    from jinja2 import Environment, TemplateError

    try:
        literals = [value for _, kind, value in Environment().lex(template) if kind == "string"]
    except TemplateError:
        literals = []
    strings = [text for text in dict.fromkeys(map(_value, literals)) if text]
    together = [first + second for first, second in pairwise(strings)]
    return [*_PROBES, *strings, *(f"a{text}b" for text in strings), *together]


def _value(literal: str) -> str:
    """The value of a Jinja string literal, quotes included in `literal`."""
    try:
        return str(ast.literal_eval(literal))
    except (SyntaxError, ValueError):  # Jinja allows line breaks in it
        return literal[1:-1]
