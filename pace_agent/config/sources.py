"""Where values come from: a TOML file, the environment, the command line. Later ones win.

Each source becomes a flat mapping from a dotted key to a `Setting`, a value with its origin, so that an error can say
where the wrong value was written. Text from the environment and the command line is read by the type of its field.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pace_agent.config.keys import ALIASES, FIELDS, FREE_TABLES, is_free, suggestion
from pace_agent.config.models import RunConfig
from pace_agent.errors import UserError

PREFIX = "PACE_AGENT_"
NOT_SETTINGS = frozenset({"PACE_AGENT_SGLANG_PYTHON"})
"""Variables that look like a setting with a missing underscore, and belong to the project's tests."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, and where it was written."""

    value: Any
    origin: str


def from_file(path: Path) -> dict[str, Setting]:
    """The settings of a TOML file; UserError when it can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"config file {path} is not valid TOML: {error}") from error
    lines = _line_numbers(text)
    settings = {}
    for key, value in _flatten(tree, ""):
        line = lines.get(key)
        settings[key] = Setting(value, f"{path}, line {line}" if line else str(path))
    return settings


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and (key in RunConfig.model_fields or key in FREE_TABLES or is_free(key)):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _line_numbers(text: str) -> dict[str, int]:
    """Lines of the plain `key = value` pairs under plain `[section]` heads; what is written otherwise is left out."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if head := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            section = f"{head[1]}."
        elif pair := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault(section + pair[1], number)
    return lines


def from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    """Settings from `PACE_AGENT_SECTION__KEY`. Other variables with the prefix are not ours."""
    settings = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name in NOT_SETTINGS:
            continue
        key = name.removeprefix(PREFIX).lower().replace("__", ".")
        origin = f"environment variable {name}"
        if "." not in key:
            section, _, rest = key.partition("_")
            if rest and section in RunConfig.model_fields:
                hint = f"{PREFIX}{section.upper()}__{rest.upper()}"
                raise UserError(f"{origin}: a section and its key are joined by two underscores: {hint}")
            continue
        settings[key] = Setting(read_text(key, text, origin), origin)
    return settings


def from_arguments(arguments: Sequence[str]) -> dict[str, Setting]:
    """Settings from `--section.key value`, `--section.key=value`, and `--section.flag` for true."""
    settings = {}
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--") or option == "--":
            raise UserError(f"unexpected argument {option!r}. Settings are written as --section.key VALUE")
        name, equals, text = option[2:].partition("=")
        key = name.replace("-", "_")
        key = ALIASES.get(key, key)
        origin = f"--{name}"
        if not equals:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            elif is_free(key) or (key in FIELDS and FIELDS[key].annotation is bool):
                text = "true"
            else:
                _check_known(key, origin)
                raise UserError(f"{origin} needs a value")
        settings[key] = Setting(read_text(key, text, origin), origin)
    return settings


def _check_known(key: str, origin: str) -> None:
    if (key not in FIELDS and not is_free(key)) or key in FREE_TABLES:
        raise UserError(f"unknown key {key!r} ({origin}).{suggestion(key)}")


def read_text(key: str, text: str, origin: str) -> Any:
    """The value that `text` means for the field at `key`; UserError when there is no such field."""
    _check_known(key, origin)
    if key not in FIELDS:
        return _literal(text)
    kinds = _kinds(FIELDS[key].annotation)
    if Path in kinds or (str in kinds and int not in kinds):
        return text
    if list in kinds:
        if text.startswith("["):
            return _literal(text)
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return parts if str in get_args(FIELDS[key].annotation) else [_literal(part) for part in parts]
    return _literal(text)


def _kinds(annotation: Any) -> set[Any]:
    """The plain types that a field may hold; a Literal counts as the type of its words."""
    origin = get_origin(annotation)
    if origin is Literal:
        return {type(word) for word in get_args(annotation)}
    if origin in (Union, UnionType):
        return set().union(*(_kinds(part) for part in get_args(annotation)))
    if hasattr(annotation, "__metadata__"):
        return _kinds(get_args(annotation)[0])
    return {origin or annotation}


def _literal(text: str) -> Any:
    """`text` as a TOML value, or as it stands where it is none."""
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return tomllib.loads(f"value = {word}")["value"] if "\n" not in word else text
    except tomllib.TOMLDecodeError:
        return text
