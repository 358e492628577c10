"""What only containers have: images, owners, the daemon, and the end of what was left behind."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
import rooms

from pace_agent.errors import SandboxError, UserError
from pace_agent.sandbox import Outcome, SandboxSpec, open_provider, seccomp
from pace_agent.sandbox.docker import image, owner
from pace_agent.sandbox.docker.daemon import connect
from pace_agent.sandbox.docker.options import creation
from pace_agent.sandbox.docker.rooms import Docker, check
from pace_agent.sandbox.provider import RoomProvider


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    opened = connect()
    yield opened
    opened.close()


DRIVER = """
import asyncio, sys
from pace_agent.sandbox.docker.rooms import Docker
from pace_agent.sandbox.provider import RoomProvider
async def main():
    async with RoomProvider(Docker()) as provider:
        sessions = [await provider.open() for _ in range(2)]
        print("open", flush=True)
        await asyncio.gather(*(s.exec(["sleep", sys.argv[1]], timeout=600) for s in sessions))
asyncio.run(main())
"""


@rooms.needs_docker
async def test_a_killed_driver_leaves_no_container(tmp_path: Path) -> None:
    mark = rooms.mark()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", DRIVER, mark], env=environment, cwd=tmp_path) as process:  # noqa: ASYNC220
        try:
            await rooms.until(lambda: len(rooms.sleepers(mark)) == 3)  # with the driver's own command line
        finally:
            process.kill()
    await rooms.until(lambda: not rooms.sleepers(mark))
    await rooms.until(lambda: not rooms.containers(process.pid))


@rooms.needs_docker
async def test_a_start_removes_what_a_killed_run_left(
    client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that a daemon kept although its owner is gone, beside one of a living owner and a stranger's."""

    def make(labels: dict[str, str]) -> str:
        options = creation(image.build(client), SandboxSpec(), None) | {"labels": labels, "command": ["sleep", "600"]}
        made = client.containers.create(**options)
        made.start()
        return str(made.id)

    with subprocess.Popen(["sleep", "600"]) as dead:  # noqa: ASYNC220
        gone = owner.labels()
        machine, boot, namespace, _, _ = gone[owner.OWNER].split(" ")
        started = owner._started(dead.pid)
        dead.kill()
    left = [
        make({owner.KIND: "1", owner.OWNER: f"{machine} {boot} {namespace} {dead.pid} {started}"}),
        make({owner.KIND: "1", owner.OWNER: f"{machine} another-boot {namespace} {os.getpid()} 1"}),
    ]
    kept = [
        make(owner.labels()),
        make({owner.KIND: "1", owner.OWNER: f"another-machine {boot} {namespace} {dead.pid} {started}"}),
        make({owner.KIND: "1", owner.OWNER: f"{machine} {boot} another-namespace {dead.pid} {started}"}),
        make({"somebody": "else"}),
    ]
    try:
        async with RoomProvider(Docker()):
            there = {each["Id"] for each in client.api.containers(all=True)}
            assert there.isdisjoint(left)
            assert there.issuperset(kept)
    finally:
        for container in kept + left:
            owner.remove(client, container)


@rooms.needs_docker
async def test_a_container_removed_from_outside_ends_its_call(client: docker.DockerClient) -> None:
    async with RoomProvider(Docker()) as provider:
        session = await provider.open()
        await session.run_python("x = 1")
        running = asyncio.ensure_future(session.exec(["sleep", "600"], timeout=60))
        (container,) = rooms.containers()
        owner.remove(client, container)
        result = await running
        assert (result.outcome, result.state_lost) == (Outcome.SANDBOX_DIED, True)
        assert (await session.run_python("'x' in globals()")).stdout == "False\n"


@rooms.needs_docker
@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1, 0.2])
async def test_closing_during_an_open_leaves_no_container(seconds: float) -> None:
    provider = RoomProvider(Docker())
    await provider.__aenter__()
    opening = asyncio.ensure_future(provider.open())
    await asyncio.sleep(seconds)
    await provider.aclose()
    with contextlib.suppress(SandboxError):
        await opening
    await provider.aclose()
    assert rooms.containers() == []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@rooms.needs_docker
async def test_a_fork_does_not_keep_a_container_alive(tmp_path: Path) -> None:
    mark = rooms.mark()
    fork = "import os, time\n        if os.fork() == 0:\n            time.sleep(30)\n            os._exit(0)\n        "
    forking = DRIVER.replace('print("open"', fork + 'print("open"')
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", forking, mark], env=environment, cwd=tmp_path) as process:  # noqa: ASYNC220
        try:
            await rooms.until(lambda: len(rooms.sleepers(mark)) == 4)  # driver, its fork, and one in each container
            (worker,) = (pid for pid in rooms.sleepers(mark) if parent_of(pid) == process.pid)
        finally:
            process.kill()
    try:
        await rooms.until(lambda: not rooms.containers(process.pid), seconds=15)
    finally:
        os.kill(worker, signal.SIGKILL)


@rooms.needs_docker
async def test_an_image_of_ones_own_and_its_errors(client: docker.DockerClient) -> None:
    built = image.build(client)
    async with open_provider("docker", image=built) as provider:
        session = await provider.open(SandboxSpec(modules=("numpy",)))
        assert (await session.run_python("import numpy; print(numpy.arange(3).sum())")).stdout == "3\n"
        with pytest.raises(SandboxError, match="can't load no_such_module"):
            await provider.open(SandboxSpec(modules=("no_such_module",)))
        found = await session.run_python("import sympy; print(sympy.sqrt(4))", timeout=60)
        assert found.stdout == "2\n"
    with pytest.raises(UserError, match="image pace-agent-none:1 is neither on this machine nor to be pulled"):
        open_provider("docker", image="pace-agent-none:1")
    with pytest.raises(UserError, match="nonsense"):
        open_provider("docker", runtime="nonsense")
    with pytest.raises(UserError, match="for sandbox backend 'docker'"):
        open_provider("bwrap", image=built)


@rooms.needs_docker
async def test_limits_are_the_daemons(client: docker.DockerClient) -> None:
    async with RoomProvider(Docker()) as provider:
        await provider.open(SandboxSpec(memory=256 << 20, processes=10, files=100, disk=1 << 20))
        (container,) = rooms.containers()
        host = client.api.inspect_container(container)["HostConfig"]
        assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (256 << 20, 256 << 20, 11)
        assert (host["NetworkMode"], host["ReadonlyRootfs"], host["CapDrop"]) == ("none", True, ["ALL"])
        assert not host["Privileged"]
        assert not host["Binds"]
        profile = next(option for option in host["SecurityOpt"] if option.startswith("seccomp="))
        assert json.loads(profile.removeprefix("seccomp=")) == seccomp.docker_profile()
        assert "nr_inodes=100" in host["Tmpfs"]["/box"]


@rooms.needs_docker
async def test_several_processes_together_are_bounded() -> None:
    async with RoomProvider(Docker()) as provider:
        session = await provider.open(SandboxSpec(memory=128 << 20))
        code = (
            "import subprocess, sys\n"
            "held = [subprocess.Popen([sys.executable, '-c', 'x = b\"x\" * (60 << 20); import time; time.sleep(3)'])"
            " for _ in range(4)]\n"
            "print(sorted(each.wait() for each in held)[0])"
        )
        result = await session.run_python(code, timeout=60)
        assert result.memory_enforced
        assert result.stdout == "-9\n" or result.outcome is Outcome.OOM


def test_without_a_daemon_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    found = check(Docker())
    assert not found.available
    assert "no Docker daemon answers" in found.reason
    assert "DOCKER_HOST" in found.remedy
    with pytest.raises(UserError, match="no Docker daemon answers"):
        open_provider("docker")


NONSENSE = """
import socket, sys
listening = socket.socket(fileno=int(sys.argv[1]))
while True:
    with listening.accept()[0] as connection:
        if connection.recv(9999):
            connection.sendall(b"HTTP/1.1 500 No\\r\\ncontent-length: 0\\r\\n\\r\\n")
"""


def test_a_daemon_that_talks_nonsense_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "docker.sock"))
        listening.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
        command = [sys.executable, "-c", NONSENSE, str(listening.fileno())]
        with subprocess.Popen(command, pass_fds=[listening.fileno()]) as nonsense:
            try:
                assert not check(Docker()).available
            finally:
                nonsense.kill()


def test_owners_that_can_not_be_judged_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "nonsense", "a b c d e f", "a b c 1 2"):
        assert not owner.is_stale(text, local=True)
    ours = owner.labels()[owner.OWNER]
    assert not owner.is_stale(ours, local=True)
    assert owner.is_stale(ours.rpartition(" ")[0] + " 1", local=True)
    machine, _, rest = ours.split(" ", 2)
    assert owner.is_stale(f"{machine} another-boot {rest}", local=True)
    assert not owner.is_stale(f"{machine} another-boot {rest}", local=False)
    monkeypatch.setattr(owner, "_read", lambda path: "" if path.endswith("/stat") else Path(path).read_text().strip())
    assert not owner.is_stale(ours, local=True)  # a process that we may not look at
