"""Parts of the sandbox tests: who is left, and whether this machine can have a sandbox at all."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from pace_agent.errors import SandboxError
from pace_agent.sandbox import bwrap
from pace_agent.sandbox.docker import daemon, owner
from pace_agent.sandbox.docker.rooms import Docker
from pace_agent.sandbox.provider import Backend
from pace_agent.sandbox.unsafe_subprocess import UnsafeSubprocess

FOUND = bwrap.check()

needs_namespaces = pytest.mark.skipif(
    not FOUND.available and "user namespaces" in FOUND.reason, reason=f"{FOUND.reason} {FOUND.remedy}"
)
"""Any other reason for an unavailable backend is a failure."""


def _no_docker() -> str:
    """Why there is no Docker here; empty if there is."""
    try:
        daemon.connect().close()
    except SandboxError as error:
        return str(error)
    return ""


NO_DOCKER = _no_docker()

needs_docker = pytest.mark.skipif(bool(NO_DOCKER) and not os.environ.get("CI"), reason=NO_DOCKER)
"""With CI set it fails instead: a run that claims all starts a daemon."""

EVERY = ["bwrap", pytest.param("docker", marks=needs_docker), "subprocess"]
"""Names of every backend, as parameters."""


def backend(name: str) -> Backend:
    return {"bwrap": bwrap.backend, "docker": Docker, "subprocess": UnsafeSubprocess}[name]()


def containers(pid: int | None = None) -> list[str]:
    """Containers that a process has, this one by default."""
    if NO_DOCKER:
        return []
    client = daemon.connect()
    try:
        found = client.api.containers(all=True, filters={"label": owner.KIND})
    finally:
        client.close()
    wanted = str(pid or os.getpid())
    return [str(each["Id"]) for each in found if each["Labels"].get(owner.OWNER, "").split(" ")[3:4] == [wanted]]


def mark() -> str:
    """Seconds for a `sleep` that can be told from every other one; it never ends while a test runs."""
    return f"{random.randrange(10**6, 10**7)}.{random.randrange(10**6)}"


def sleepers(seconds: str) -> list[int]:
    """Host processes whose command line holds this mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if seconds.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def until(condition: object, seconds: float = 30.0) -> None:
    """Wait for a callable to become true; TimeoutError if it doesn't."""
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the kernel sends no event for what is waited for
            await asyncio.sleep(0.01)
