"""The names that a config may use: dotted keys, short aliases, and the closest one to a wrong one."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic.fields import FieldInfo

from pace_agent.config.models import RunConfig
from pace_agent.config.section import Section
from pace_agent.config.trainer import DEFAULTS

ALIASES: Mapping[str, str] = {
    "model": "model.path",
    "env": "env.id",
    "clock": "clock.kind",
    "seed": "run.seed",
    "run_dir": "run.dir",
}
"""Short options of the command line, and the key that each sets."""


def section_type(field: FieldInfo) -> type[Section] | None:
    """The model of a section; None for a free table."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _fields() -> dict[str, FieldInfo]:
    out: dict[str, FieldInfo] = {}
    for name, field in RunConfig.model_fields.items():
        section = section_type(field)
        if section is None:
            out[name] = field
        else:
            out.update({f"{name}.{key}": inner for key, inner in section.model_fields.items()})
    return out


FIELDS: Mapping[str, FieldInfo] = _fields()
"""Every key by its dotted name, with `trainer` as one free table."""

FREE_TABLES = frozenset({"trainer", "env.kwargs"})
"""Tables whose keys are not ours to know."""


def is_free(key: str) -> bool:
    """Whether `key` lies inside a table whose keys are not ours to know."""
    return any(key.startswith(f"{table}.") for table in FREE_TABLES)


def suggestion(key: str) -> str:
    """' Did you mean ...?' for a key that is not one of ours."""
    if key in RunConfig.model_fields or key in FREE_TABLES:
        return f" It is a table; its keys are written as {key}.NAME."
    known = [*FIELDS, *(f"trainer.{name}" for name in DEFAULTS)]
    section, _, leaf = key.rpartition(".")
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    inside = [name for name in known if section and name.startswith(f"{section}.")]
    for pool in (same_leaf, inside, known):
        close = get_close_matches(key, pool, n=1, cutoff=0.0 if pool is same_leaf else 0.6)
        if close:
            return f" Did you mean {close[0]!r}?"
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)} | dict(ALIASES)
    if close := get_close_matches(leaf, leaves, n=1, cutoff=0.7):
        return f" Did you mean {leaves[close[0]]!r}?"
    if inside:
        return f" Known in [{section}]: {', '.join(name.rpartition('.')[2] for name in inside)}."
    return f" Sections: {', '.join(RunConfig.model_fields)}."


def insert(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested tables, over whatever stood there."""
    *path, leaf = key.split(".")
    for name in path:
        inner = tree.get(name)
        if not isinstance(inner, dict):
            inner = tree[name] = {}
        tree = inner
    tree[leaf] = value
