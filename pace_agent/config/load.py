"""Read a config: TOML file, then environment, then command line, into one `RunConfig`, or one readable error."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pace_agent.config.keys import insert, suggestion
from pace_agent.config.models import RunConfig
from pace_agent.config.sources import Setting, from_arguments, from_environment, from_file
from pace_agent.errors import UserError, did_you_mean


def load_config(
    config_file: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> RunConfig:
    """The config of a run.

    Args:
        config_file: a TOML file, the weakest source; None for the defaults alone.
        overrides: what the command line holds, as `--section.key value`; the strongest source.
        environ: environment variables; those named `PACE_AGENT_SECTION__KEY` count.

    Raises:
        UserError: for an unknown key, a wrong value, or keys that don't fit together; it names every one of them,
            where it was written, and what is allowed.
    """
    settings: dict[str, Setting] = {}
    for source in (
        from_file(config_file) if config_file else {},
        from_environment(environ or {}),
        from_arguments(overrides),
    ):
        settings.update(source)
    tree: dict[str, Any] = {}
    for key, setting in settings.items():
        insert(tree, key, setting.value)
    return build_config(tree, {key: setting.origin for key, setting in settings.items()})


def build_config(tree: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> RunConfig:
    """A config from nested tables. `origins` says for dotted keys where they were written."""
    try:
        return RunConfig.model_validate(dict(tree))
    except ValidationError as error:
        problems = [_explain(details, origins or {}) for details in error.errors(include_url=False)]
        raise UserError("\n".join(dict.fromkeys(problems))) from None


def _explain(details: ErrorDetails, origins: Mapping[str, str]) -> str:
    key = ".".join(part for part in details["loc"] if isinstance(part, str))
    where = f" ({origins[key]})" if key in origins else ""
    value = details["input"]
    match details["type"]:
        case "extra_forbidden":
            return f"unknown key {key!r}{where}.{suggestion(key)}"
        case "value_error":
            said = str(details["ctx"]["error"])
            return _with_origins(said if "." not in key or key in said else f"{key}: {said}", origins)
        case "model_type" | "dict_type":
            return f"{key} = {value!r}{where}: must be a table, written as [{key}] with its keys below"
        case "literal_error":
            words = str(details["ctx"]["expected"])
            hint = did_you_mean(str(value), [word.strip("'") for word in words.replace(" or ", ", ").split(", ")])
            return f"{key} = {value!r}{where}: must be {words}.{hint if 'Did you' in hint else ''}"
        case _:
            said = details["msg"].replace("Input should be", "must be")
            return f"{key} = {value!r}{where}: {said}"


def _with_origins(message: str, origins: Mapping[str, str]) -> str:
    """Add where each key that the message names was written."""
    named = [key for key in origins if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)", message)]
    return message + "".join(f"\n  {key} comes from {origins[key]}" for key in named)
