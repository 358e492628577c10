"""Every attack of `pace_agent.sandbox.probes` on every kind of room; and on rooms with a hole, which must be found."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import ordinary_user
import pytest
import rooms

from pace_agent.sandbox import SandboxSpec, bundle, probes
from pace_agent.sandbox import bwrap as bwrap_module
from pace_agent.sandbox.launch import Plan
from pace_agent.sandbox.probes import PROBES, Group, ProbeResult
from pace_agent.sandbox.provider import RoomProvider

pytestmark = rooms.needs_namespaces

ROOMS = [
    pytest.param(("bwrap", False, bwrap_module.NOBODY), id="bwrap-session"),
    pytest.param(("bwrap", True, bwrap_module.NOBODY), id="bwrap-fresh"),
    pytest.param(("docker", False, 1000), id="docker-session", marks=rooms.needs_docker),
]
"""Backend, whether in fresh executions, and whom its rooms run as where we are root."""

Found = dict[str, ProbeResult]


async def found(name: str, *, fresh: bool = False, user: int | None = None) -> Found:
    async with RoomProvider(rooms.backend(name)) as provider:
        return {result.probe.name: result for result in await probes.run(provider, fresh=fresh, user=user)}


@pytest.fixture(params=ROOMS)
async def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Found]:
    """The results in one kind of room, of a host with a secret in its environment and a file that anyone inherits."""
    name, fresh, user = request.param
    monkeypatch.setenv("PACE_SECRET", "hunter2-in-the-environment")
    ours = os.open(tmp_path / "open-file", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(ours, True)
    yield await found(name, fresh=fresh, user=user)
    os.close(ours)


async def test_every_attack_is_contained(made: Found) -> None:
    assert {name: result.detail for name, result in made.items() if not result.contained} == {}
    expected = {probe.name for probe in PROBES if probe.sessions and probe.fresh}
    assert expected < made.keys()
    assert {result.probe.group for result in made.values()} == set(Group)


@pytest.mark.skipif(os.geteuid() != 0, reason="already an ordinary user")
def test_the_same_holds_for_an_ordinary_user() -> None:
    """Without Docker, whose daemon belongs to root."""
    said = ordinary_user.passes(["test_sandbox_attacks.py", "test_sandbox_memory.py"], "not docker")
    assert "failed" not in said


# -- the checker, checked: what is open must be called open

OPEN_TO_ANYONE = {
    "read a host file", "write a host file", "find a writable host folder", "connect to the host's loopback",
    "connect to an abstract socket", "connect to a socket by its path", "netlink",
    "see the host's processes", "kill a host process", "gain by set-user-ID programs", "ptrace",
    "read another process's memory", "use up asynchronous I/O", "use up inotify", "memfd", "System V shared memory",
    "keyrings",
}  # fmt: skip
# An ordinary user's launcher mounts in a user namespace, from which environments outside can't be read.
OPEN_TO_ROOT = {
    "change the kernel's settings", "packet sockets", "raw sockets", "hold capabilities", "become root",
    "change the host's name", "write the agent's memory", "use the agent's descriptors", "namespaces by unshare",
    "enter namespaces", "mount by fsopen", "chroot", "read the kernel's log", "set the clock", "restart the machine",
    "find the host's environment",
}  # fmt: skip


async def test_without_a_sandbox_nothing_is_called_contained_that_is_not() -> None:
    made = await found("subprocess")
    expected = OPEN_TO_ANYONE | (OPEN_TO_ROOT if os.geteuid() == 0 else set())
    assert expected <= {name for name, result in made.items() if not result.contained}
    exhausting = {name for name, result in made.items() if result.probe.group is Group.EXHAUSTION}
    assert {made[name].detail for name in exhausting} == {"not tried: no room here"}
    assert not any(made[name].contained for name in exhausting)


HOLES = {
    "--unshare-net": {"connect to the host's loopback", "connect to an abstract socket"},
    "--seccomp": {"ptrace", "memfd", "io_uring", "use up inotify", "calls newer than the filter", "netlink"},
}


@pytest.mark.parametrize("option", HOLES)
async def test_a_missing_option_of_bubblewrap_is_noticed(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bwrap_module.Bwrap.arguments

    def without(self: bwrap_module.Bwrap, spec: SandboxSpec, *, fresh: bool, makes_folders: bool) -> list[str]:
        words = whole(self, spec, fresh=fresh, makes_folders=makes_folders)
        at = words.index(option)
        return words[:at] + words[at + (2 if option == "--seccomp" else 1) :]

    monkeypatch.setattr(bwrap_module.Bwrap, "arguments", without)
    made = await found("bwrap", user=bwrap_module.NOBODY)
    assert HOLES[option] <= {name for name, result in made.items() if not result.contained}
    assert made["read a host file"].contained


async def test_a_host_folder_that_is_bound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bwrap_module.Bwrap.arguments

    def wider(self: bwrap_module.Bwrap, spec: SandboxSpec, *, fresh: bool, makes_folders: bool) -> list[str]:
        words = whole(self, spec, fresh=fresh, makes_folders=makes_folders)
        at = words.index("--remount-ro", words.index("/box"))
        folder = str(Path(os.environ.get("TMPDIR", "/tmp")).resolve())
        return [*words[:at], "--bind", folder, folder, *words[at:]]

    monkeypatch.setattr(bwrap_module.Bwrap, "arguments", wider)
    made = await found("bwrap", user=bwrap_module.NOBODY)
    holes = {name for name, result in made.items() if not result.contained}
    assert {"read a host file", "write a host file", "connect to a socket by its path"} <= holes


async def test_limits_that_are_not_set_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bwrap_module.Bwrap.plan

    def looser(self: bwrap_module.Bwrap, spec: SandboxSpec, *, fresh: bool, makes_folders: bool) -> Plan:
        loose = SandboxSpec(memory=16 << 30, processes=500, descriptors=1024)
        return whole(self, replace(loose, captured=spec.captured), fresh=fresh, makes_folders=makes_folders)

    monkeypatch.setattr(bwrap_module.Bwrap, "plan", looser)
    made = await found("bwrap", user=bwrap_module.NOBODY)
    holes = {name for name, result in made.items() if not result.contained}
    expected = {name for name, result in made.items() if result.probe.group is Group.EXHAUSTION}
    assert holes == expected - {"run without end", "write without end", "make timers without end"}


async def test_an_agent_that_follows_links_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without walls, where links lead to what is the host's."""
    whole = bundle.sources

    def careless(package: str, order: tuple[str, ...]) -> bundle.Sources:
        return [(name, text.replace("os.O_NOFOLLOW", "0")) for name, text in whole(package, order)]

    monkeypatch.setattr(bundle, "sources", careless)
    bundle.compiled.cache_clear()
    try:
        made = await found("subprocess")
    finally:
        bundle.compiled.cache_clear()
    assert not made["swap a folder for a link"].contained
