"""Write a config as TOML that reads back as the same config."""

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from pace_agent.config.keys import section_type
from pace_agent.config.models import RunConfig
from pace_agent.errors import UserError


def dump_toml(config: RunConfig, *, comments: bool = False) -> str:
    """All of `config` in TOML, defaults too. `comments` puts each key's description above it."""
    lines: list[str] = []
    for name, field in RunConfig.model_fields.items():
        lines.append("")
        section = section_type(field)
        if comments:
            lines.extend(_comment(field.description if section is None else section.__doc__))
        lines.append(f"[{name}]")
        value = getattr(config, name)
        if section is None:
            lines.extend(f"{toml_key(key)} = {toml_value(inner)}" for key, inner in value.items())
        else:
            for key, inner_field in section.model_fields.items():
                lines.extend(_pair(key, getattr(value, key), inner_field, comments))
    return "\n".join(lines[1:]) + "\n"


def _pair(key: str, value: Any, field: FieldInfo, comments: bool) -> Iterator[str]:
    if comments:
        yield from _comment(field.description)
    mark = "# " if value is None and field.default is None else ""
    yield f"{mark}{toml_key(key)} = {toml_value(value)}"


def _comment(text: str | None) -> Iterator[str]:
    for line in textwrap.wrap(" ".join((text or "").split()), 100):
        yield f"# {line}"


def toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def toml_value(value: Any) -> str:
    """A value on one line; None is the word "none". UserError for what TOML has no words for."""
    match value:
        case None:
            return '"none"'
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value).replace("infinity", "inf")
        case str() | Path():
            return _string(str(value))
        case Mapping():
            inner = ", ".join(f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
    raise UserError(f"{value!r} can't be kept in a config file; use text, numbers, true or false, lists and tables")


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
