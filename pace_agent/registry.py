"""Environments by id, found alike in every process.

An id is one of

* a built-in (`pace/Shop-v0`) or what `register` was given,
* an entry point of the group `pace_agent.envs`: its name is the id (`acme/Dice-v0`), its value `module:Class`,
* an import path: `package.module:Class` or `path/to/file.py:Class`,
* any other id that Gymnasium knows, also in its own form `module:Name-v0`.

What always holds:

* Nothing of an environment is imported before it is made or described; ids are strings until then.
* An id that works here works in a child process: what `register` was given is handed down through the process
  environment.
* A broken entry point is reported by `describe` and by `make` of its own id, and disturbs nothing else.
"""

import inspect
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import TYPE_CHECKING, Any, Literal

from pace_agent.errors import PaceError, UserError, did_you_mean
from pace_agent.importing import is_import_path, load_module, load_object
from pace_agent.tasks import TaskSource
from pace_agent.types import Split, Task

if TYPE_CHECKING:
    import gymnasium

ENTRY_POINTS = "pace_agent.envs"

BUILTIN: Mapping[str, str] = {
    "pace/MathPython-v0": "pace_agent.envs.math_python:MathPythonEnv",
    "pace/Shop-v0": "pace_agent.envs.shop.env:ShopEnv",
}

EVAL_SEEDS = 1 << 30
"""Seeds of a plain Gymnasium environment: below for training, from here on for evaluation."""

_HANDED_DOWN = "PACE_REGISTERED_ENVS"
_ID = re.compile(r"(?:[\w:-]+/)?[\w:.-]+?-v\d+")

Source = Literal["builtin", "registered", "entry point", "import path", "gymnasium"]


@dataclass(frozen=True, slots=True)
class _Entry:
    target: str
    source: Source
    kwargs: dict[str, Any] = field(default_factory=dict)
    package: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Description:
    """What `pace-agent env list` shows. `error` says why the rest is not known."""

    id: str
    source: Source
    target: str = ""
    summary: str = ""
    tools: tuple[str, ...] = ()
    needs_sandbox: bool = False
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tools": list(self.tools)}


_in_gymnasium: dict[str, _Entry] = {}
"""What this module put into Gymnasium's registry."""


def register(env_id: str, target: str, **kwargs: Any) -> None:
    """Give an environment an id, for this process and its children.

    Args:
        env_id: Like `acme/Dice-v0`.
        target: `module:Class`; imported when the environment is made.
        kwargs: Default arguments of the class; JSON values.
    """
    if not _ID.fullmatch(env_id):
        raise UserError(f"{env_id!r} is not an environment id: expected a name and a version like 'acme/Dice-v0'")
    if not is_import_path(target):
        raise UserError(f"{env_id}: {target!r} is not an import path like 'package.module:Class'")
    if env_id in BUILTIN:
        raise UserError(f"{env_id!r} is built in: choose another id")
    table = _handed_down()
    table[env_id] = [target, kwargs]
    try:
        os.environ[_HANDED_DOWN] = json.dumps(table)
    except TypeError as error:
        raise UserError(f"{env_id}: the arguments must be JSON values ({error})") from None


def _handed_down() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(os.environ.get(_HANDED_DOWN, "{}"))
    return table


def _known() -> dict[str, _Entry]:
    """Every id of ours. Earlier sources win: a third party can't replace a built-in."""
    known = {env_id: _Entry(target, "builtin") for env_id, target in BUILTIN.items()}
    for env_id, (target, kwargs) in _handed_down().items():
        known.setdefault(env_id, _Entry(target, "registered", kwargs))
    for point in _entry_points(tuple(sys.path)):
        known.setdefault(point.name, _from_entry_point(point))
    return known


@lru_cache(maxsize=1)
def _entry_points(path: tuple[str, ...]) -> EntryPoints:
    """Read once for each search path: it opens a file of every installed package."""
    return entry_points(group=ENTRY_POINTS)


def _from_entry_point(point: EntryPoint) -> _Entry:
    package = point.dist.name if point.dist is not None else ""
    problem = ""
    if not _ID.fullmatch(point.name):
        problem = f"{point.name!r} is not an environment id like 'acme/Dice-v0'"
    elif not is_import_path(point.value.strip()):
        problem = f"{point.value!r} is not an import path like 'package.module:Class'"
    return _Entry(point.value.strip(), "entry point", package=package, problem=problem)


def install() -> None:
    """Put our ids into Gymnasium's own registry, so that `gymnasium.make` knows them. May be called often."""
    import gymnasium

    for env_id, entry in _known().items():
        if entry.problem or _in_gymnasium.get(env_id) == entry:
            continue
        if env_id in gymnasium.registry and env_id not in _in_gymnasium:
            continue  # somebody registered it with Gymnasium: that stands
        gymnasium.registry.pop(env_id, None)
        gymnasium.register(env_id, entry_point=entry.target, kwargs=dict(entry.kwargs))
        _in_gymnasium[env_id] = entry


def env_ids() -> list[str]:
    """The ids of ours, sorted: built in, registered, and from entry points (broken ones too: `describe` says why)."""
    return sorted(_known())


def make(env_id: str, **kwargs: Any) -> "gymnasium.Env[Any, Any]":
    """A new environment. UserError for an id that is not known, with the closest, and for arguments it doesn't take."""
    import gymnasium

    entry = _known().get(env_id)
    if entry is not None:
        _check_loads(env_id, entry)
    install()
    if entry is None and env_id not in gymnasium.registry:
        made = _make_from_path(env_id, kwargs)
        if made is not None:
            return made
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    except gymnasium.error.UnregisteredEnv:
        raise UserError(_unknown(env_id)) from None
    except TypeError as error:
        raise _wrong_argument(env_id, entry, error, kwargs) from error


def _check_loads(env_id: str, entry: _Entry) -> Any:
    """The class behind an id of ours; UserError says whose it is and why it can't be loaded."""
    owner = f" (from {entry.package})" if entry.package else ""
    if entry.problem:
        raise UserError(f"{env_id}{owner}: {entry.problem}")
    try:
        return load_object(entry.target)
    except UserError as error:
        if entry.source == "builtin":
            raise
        raise UserError(f"{env_id}{owner}: {error}") from error


def _make_from_path(env_id: str, kwargs: dict[str, Any]) -> "gymnasium.Env[Any, Any] | None":
    """The environment that an import path names, or None where Gymnasium is to be asked."""
    import gymnasium

    if not is_import_path(env_id):
        module, colon, _ = env_id.partition(":")
        if not colon:
            raise UserError(_unknown(env_id))
        load_module(module)
        return None
    found = load_object(env_id)
    if not callable(found):
        raise UserError(f"{env_id!r} is a {type(found).__name__}, not an environment class")
    try:
        made = found(**kwargs)
    except TypeError as error:
        raise _wrong_argument(env_id, _Entry(env_id, "import path"), error, kwargs) from error
    if not isinstance(made, gymnasium.Env):
        raise UserError(f"{env_id!r} made a {type(made).__name__}, not a gymnasium.Env")
    return made


def _unknown(env_id: str) -> str:
    import gymnasium

    space, _, name = env_id.rpartition("/")
    bare = name.partition("-v")[0].lower()
    known = {*env_ids(), *gymnasium.registry}
    # A name without its namespace or version is the usual slip: it is looked for before spelling is.
    same = [each for each in known if each.rpartition("/")[2].partition("-v")[0].lower() == bare]
    best = max(same, key=lambda each: (each.rpartition("/")[0] == space, each), default="")
    hint = f" Did you mean {best!r}?" if best else did_you_mean(env_id, known if len(env_id) > 3 else env_ids())
    return f"there is no environment {env_id!r}.{hint} An import path (module:Class or file.py:Class) works, too."


def _wrong_argument(
    env_id: str, entry: _Entry | None, error: TypeError, kwargs: Mapping[str, Any]
) -> PaceError | TypeError:
    """A UserError where an argument isn't taken; any other TypeError is the class's own and stays."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if match is None or match[1] not in kwargs or entry is None:
        return error
    taken: set[str] = set()
    for kind in inspect.getmro(load_object(entry.target)):
        if "__init__" in vars(kind):
            taken.update(inspect.signature(vars(kind)["__init__"]).parameters)
    known = taken - {"self", "args", "kwargs", "options"}
    return UserError(f"{env_id} takes no argument {match[1]!r}.{did_you_mean(match[1], known)}")


def describe(env_id: str) -> Description:
    """What is known of an environment without running it; problems are told in `error`, never raised."""
    import gymnasium

    entry = _known().get(env_id)
    if entry is None:
        source: Source = "gymnasium" if env_id in gymnasium.registry or not is_import_path(env_id) else "import path"
        entry = _Entry(env_id, source)
    env: gymnasium.Env[Any, Any] | None = None
    try:
        env = make(env_id)
        inner = env.unwrapped
        summary = (inspect.getdoc(type(inner)) or "").partition("\n")[0]
        tools = getattr(inner, "toolset", None)
        return Description(
            id=env_id,
            source=entry.source,
            target=f"{type(inner).__module__}:{type(inner).__qualname__}"
            if entry.source == "gymnasium"
            else entry.target,
            summary=summary,
            tools=tuple(tools.names()) if tools is not None else (),
            needs_sandbox=bool(tools is not None and tools.needs_session),
        )
    except Exception as error:
        text = str(error) if isinstance(error, PaceError) else f"{type(error).__name__}: {error}"
        return Description(id=env_id, source=entry.source, target=entry.target, error=text)
    finally:
        if env is not None:
            env.close()


@dataclass(frozen=True, slots=True)
class SeedTasks:
    """The tasks of an environment that has none of its own: one for each seed, train and eval apart."""

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        seed = index % EVAL_SEEDS + (EVAL_SEEDS if split == "eval" else 0)
        return Task(id=f"seed-{seed}", prompt="", seed=seed)


def task_source(env_id: str, **kwargs: Any) -> TaskSource:
    """The tasks that an environment made with these arguments draws from; seeds where it has no source."""
    env = make(env_id, **kwargs)
    try:
        inner = env.unwrapped
        source = getattr(inner, "tasks", None)
        if isinstance(source, TaskSource):
            return source
        if hasattr(inner, "toolset"):
            raise UserError(f"{env_id} has no tasks: set the class attribute `tasks` or give the argument tasks=")
        return SeedTasks()
    finally:
        env.close()
