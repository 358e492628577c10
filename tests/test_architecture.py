"""Imports run one way: envs -> tools -> sandbox -> core <- trainers; the command line sees all, nothing sees it."""

import ast
from collections.abc import Iterator

import pytest
from source_tree import ROOMS, modules

MAY_IMPORT = {
    "core": {"core"},
    "sandbox": {"core", "sandbox"},
    "tools": {"core", "sandbox", "tools"},
    "envs": {"core", "sandbox", "tools", "envs"},
    "trainers": {"core", "trainers"},
    "cli": {"core", "sandbox", "tools", "envs", "trainers", "cli"},
}
BANNED_ROOTS = {*ROOMS, "tests", "benchmarks", "examples"}


def room_of(module: str) -> str:
    parts = module.split(".")
    if module == "pace_agent.__main__":
        return "cli"
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "core"


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of every import in `source`, also inside functions, also by a constant name at run time."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def wrong_imports(module: str, source: str) -> list[str]:
    wrong = []
    for line, name in imports_of(source):
        root = name.split(".")[0]
        if name.startswith("."):
            wrong.append(f"{module}:{line} imports {name}: relative")
        elif root in BANNED_ROOTS:
            wrong.append(f"{module}:{line} imports {name}: outside the package, or under its folder's bare name")
        elif root == "pace_agent" and room_of(name) not in MAY_IMPORT[room_of(module)]:
            wrong.append(f"{module}:{line} imports {name}: {room_of(module)} may not import {room_of(name)}")
    return wrong


def test_imports_run_one_way() -> None:
    wrong = [problem for name, path in modules().items() for problem in wrong_imports(name, path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_every_room_is_scanned() -> None:
    assert {room_of(name) for name in modules()} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pace_agent.pool.pool", "from pace_agent.envs.shop import env"),
        ("pace_agent.pool.pool", "from pace_agent import envs"),
        ("pace_agent.registry", "def f():\n    import pace_agent.cli.app"),
        ("pace_agent.rollout.episode", "import importlib\nimportlib.import_module('pace_agent.sandbox')"),
        ("pace_agent.sandbox.bwrap", "import pace_agent.tools"),
        ("pace_agent.trainers.data", "if True:\n    from pace_agent.envs import registry"),
        ("pace_agent.envs.shop.env", "from pace_agent.trainers import loss"),
        ("pace_agent.envs.shop.env", "from tools import calculator"),
        ("pace_agent.errors", "from . import types"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert len(wrong_imports(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pace_agent.envs.shop.env", "from pace_agent.tools.base import tool\nimport numpy"),
        ("pace_agent.trainers.data", "from pace_agent.types import Batch"),
        ("pace_agent.cli.train", "from pace_agent.trainers import loss\nfrom pace_agent.envs import shop"),
        ("pace_agent.__main__", "from pace_agent.cli import main"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert wrong_imports(module, source) == []
