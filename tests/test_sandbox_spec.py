"""Limits that no sandbox can keep to are refused, the same on every backend, before any room starts."""

import errno

import pytest
import rooms

from pace_agent.errors import UserError
from pace_agent.sandbox import SandboxSpec
from pace_agent.sandbox.base import FileError, file_error
from pace_agent.sandbox.provider import RoomProvider
from pace_agent.tools.base import ToolError, tool


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"modules": "numpy"}, "modules must be a list of names of modules, got 'numpy'"),
        ({"modules": [1]}, "modules must be a list"),
        ({"memory": 0}, "memory must be a whole number, at least 16 MiB; got 0"),
        ({"memory": 1e9}, "memory must be a whole number"),
        ({"processes": -1}, "processes must be a whole number, at least 1"),
        ({"files": True}, "files must be a whole number"),
        ({"timeout": -1.0}, "timeout must be a number of seconds above 0, got -1.0"),
        ({"timeout": float("nan")}, "timeout must be"),
        ({"captured": 0}, "captured must be"),
    ],
)
def test_a_wrong_limit_is_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        SandboxSpec(**wrong)  # type: ignore[arg-type]


def test_modules_may_be_a_list() -> None:
    assert SandboxSpec(modules=["json"]) == SandboxSpec(modules=("json",))  # type: ignore[arg-type]


def test_what_is_set_wins_over_the_base() -> None:
    base = SandboxSpec(timeout=1.0, disk=1 << 20)
    assert SandboxSpec(modules=("json",), disk=1 << 21).over(base) == SandboxSpec(
        timeout=1.0, disk=1 << 21, modules=("json",)
    )
    assert SandboxSpec().over(base) == base


def test_a_file_error_is_of_the_matching_kind() -> None:
    missing = file_error(errno.ENOENT, "a")
    assert isinstance(missing, FileError)
    assert isinstance(missing, FileNotFoundError)
    assert (missing.errno, missing.filename) == (errno.ENOENT, "a")
    assert type(file_error(errno.ENOENT, "b")) is type(missing)
    assert type(file_error(errno.ENOSPC, "a")) is FileError


async def test_a_file_in_the_way_is_told_to_the_model() -> None:
    """The code inside put it there, so it must not make the rollout fail as if the environment had."""

    @tool
    async def save(text: str) -> str:
        """Save a text.

        Args:
            text: The text.
        """
        raise file_error(errno.EISDIR, "in.txt")

    with pytest.raises(ToolError, match=r"in.txt: Is a directory"):
        await save.run({"text": "x"})


@rooms.needs_namespaces
async def test_wrong_arguments_are_told_to_the_caller() -> None:
    async with RoomProvider(rooms.backend("bwrap")) as provider:
        session = await provider.open()
        with pytest.raises(UserError, match="code must be str, got int"):
            await session.run_python(5)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="argv must be a list"):
            await session.exec("ls -la")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="data must be bytes, got str"):
            await session.put("a", "text")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="stdin must be bytes, got str"):
            await provider.run_fresh("1", stdin="text")  # type: ignore[arg-type]
        await session.exec(["mkdir", "folder"])
        with pytest.raises(FileError, match="Is a directory"):
            await session.put("folder", b"x")
        assert (await session.run_python("6 * 7")).stdout == "42\n"
