"""From a function's signature and docstring to what the model reads and to what checks its arguments.

Nothing here calls the function. A function that can't be described is refused with a UserError when it is declared,
not when a model first calls it.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from pace_agent.errors import UserError, did_you_mean
from pace_agent.sandbox.base import Session

_ARGS = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$")
_SECTION = re.compile(r"^\s*(?:Returns|Return|Raises|Yields|Examples?|Notes?):\s*$")
_ENTRY = re.compile(r"^(\s*)\*?(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


class Arguments(BaseModel):
    """Base of the models that check arguments: unknown names are refused, numbers given for text become text."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, arbitrary_types_allowed=True)


@dataclass(frozen=True, slots=True)
class Signature:
    """What is known of a function: `method` if it takes `self`; `session`: the parameter filled by the environment."""

    name: str
    description: str
    arguments: type[Arguments]
    fields: tuple[str, ...]
    method: bool
    session: str | None


def read_signature(function: Callable[..., Any], name: str | None = None) -> Signature:
    """Read a function; UserError names the function and what is missing."""
    name = name or str(getattr(function, "__name__", type(function).__name__))
    description, notes = read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise UserError(f"tool {name!r} has no docstring: it is what the model reads to know what the tool does")
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UserError(f"tool {name!r}: an annotation can't be resolved ({error})") from error
    parameters = list(inspect.signature(function).parameters.values())
    method = bool(parameters) and parameters[0].name == "self"
    fields: dict[str, Any] = {}
    session: str | None = None
    for parameter in parameters[1:] if method else parameters:
        hint = _hint(name, parameter, hints)
        if hint is Session:
            session = parameter.name
            continue
        required = parameter.default is inspect.Parameter.empty
        # Aliased, because a model's field may not start with an underscore or hide an attribute of BaseModel.
        fields[f"arg_{parameter.name}"] = (
            hint,
            Field(
                default=... if required else parameter.default,
                alias=parameter.name,
                description=notes.get(parameter.name),
            ),
        )
    unknown = set(notes) - {parameter.name for parameter in parameters}
    for word in sorted(unknown):
        known = [parameter.name for parameter in parameters if parameter.name != "self"]
        hint = did_you_mean(word, known)
        raise UserError(f"tool {name!r}: the docstring describes {word!r}, which isn't a parameter.{hint}")
    arguments = create_model(f"{name}_arguments", __base__=Arguments, **fields)
    return Signature(
        name=name,
        description=description,
        arguments=arguments,
        fields=tuple(field.removeprefix("arg_") for field in fields),
        method=method,
        session=session,
    )


def _hint(name: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise UserError(f"tool {name!r}: parameter {parameter} must be an ordinary or keyword-only parameter")
    if parameter.name not in hints:
        raise UserError(f"tool {name!r}: parameter {parameter.name!r} has no type annotation")
    return hints[parameter.name]


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description (what stands before the first section) and the notes of the `Args:` section by name."""
    description: list[str] = []
    notes: dict[str, str] = {}
    where, indent, current = "description", None, ""
    for line in text.splitlines():
        if _ARGS.match(line):
            where = "args"
        elif _SECTION.match(line):
            where = "other"
        elif where == "description":
            description.append(line)
        elif where == "args" and line.strip():
            entry = _ENTRY.match(line)
            if entry and (indent is None or len(entry[1]) <= indent):
                indent, current = len(entry[1]), entry[2]
                notes[current] = entry[3].strip()
            elif current:
                notes[current] = f"{notes[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), notes


def json_schema(signature: Signature) -> dict[str, Any]:
    """A new OpenAI-style description of a tool, without titles (they repeat the names)."""
    described: dict[str, Any] = json.loads(_schema_text(signature))
    return described


@lru_cache(maxsize=1024)
def _schema_text(signature: Signature) -> str:
    """Kept, because every rollout asks for it and pydantic takes most of a millisecond."""
    parameters = _without_titles(signature.arguments.model_json_schema(by_alias=True))
    for key in ("additionalProperties", "description"):
        parameters.pop(key, None)
    parameters.setdefault("properties", {})
    function = {"name": signature.name, "description": signature.description, "parameters": parameters}
    return json.dumps({"type": "function", "function": function})


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs") and isinstance(value, dict):
            # The keys in here are the author's names; one of them may well be "title".
            out[key] = {name: _without_titles(part) for name, part in value.items()}
        else:
            out[key] = value if key in ("default", "enum", "const", "examples") else _without_titles(value)
    return out


def check_arguments(signature: Signature, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    """The arguments as the function expects them, or a sentence for the model that names every bad one."""
    try:
        checked = signature.arguments.model_validate(dict(arguments), by_alias=True, by_name=False)
    except ValidationError as error:
        return "; ".join(_explain(signature, dict(detail)) for detail in error.errors(include_url=False))
    # Only what was given: defaults stay the function's own objects.
    return {field.removeprefix("arg_"): getattr(checked, field) for field in sorted(checked.model_fields_set)}


def _explain(signature: Signature, detail: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in detail["loc"]) or "arguments"
    if detail["type"] == "missing" and len(detail["loc"]) == 1:
        return f"argument {where!r} is missing"
    if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1:
        return f"there is no argument {where!r}.{did_you_mean(where, signature.fields)}".rstrip(".")
    given = repr(detail["input"])
    shown = given if len(given) <= 80 else given[:77] + "..."
    return f"argument {where!r}: {_plain(detail['msg'])}, got {shown}"


def _plain(message: str) -> str:
    return message[:1].lower() + message[1:]
