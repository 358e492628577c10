"""Who a container belongs to, as labels on it, and the end of those whose owner is gone."""

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pace_agent.errors import SandboxError
from pace_agent.sandbox.docker.daemon import told

if TYPE_CHECKING:
    from docker import DockerClient

KIND = "pace-agent.sandbox"
"""Label of every container of ours."""
OWNER = "pace-agent.owner"
"""machine, boot, pid namespace, process id and its start time, which together name one process for good."""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started, in ticks since the boot; empty if there is none."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _is_gone(pid: int, started: str) -> bool:
    """Whether this process has certainly ended: one that we may not look at counts as living."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return _started(pid) not in ("", started)


def here() -> tuple[str, str, str]:
    """This machine, its boot, and the pid namespace in which our numbers count."""
    return (
        _read("/etc/machine-id") or socket.gethostname(),
        _read("/proc/sys/kernel/random/boot_id"),
        os.readlink("/proc/self/ns/pid"),
    )


def labels() -> dict[str, str]:
    pid = os.getpid()
    return {KIND: "1", OWNER: " ".join((*here(), str(pid), _started(pid)))}


def is_stale(owner: str, *, local: bool) -> bool:
    """Whether the owner is known to be gone. Owners of other machines and pid namespaces are left alone.

    Only with a `local` daemon another boot of this machine is over for certain: copies of a machine have its id too.
    """
    try:
        machine, boot, namespace, pid, started = owner.split(" ")
        number = int(pid)
    except ValueError:
        return False
    our_machine, our_boot, our_namespace = here()
    if machine != our_machine:
        return False
    if boot != our_boot:
        return local
    return namespace == our_namespace and _is_gone(number, started)


def sweep(client: "DockerClient") -> int:
    """Remove the containers whose owner is gone; how many there were."""
    found: list[dict[str, Any]] = told(lambda: client.api.containers(all=True, filters={"label": KIND}))
    local = client.api.base_url.startswith("http+docker://")  # by a socket of this machine
    stale = [each["Id"] for each in found if is_stale(each["Labels"].get(OWNER, ""), local=local)]
    for container in stale:
        remove(client, container)
    return len(stale)


def remove(client: "DockerClient", container: str) -> None:
    """Kill and remove, and return when it is gone. Fine if it is gone already, or about to be."""
    import docker

    for _ in range(200):
        try:
            client.api.remove_container(container, force=True, v=True)
            return
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:
            if error.status_code != 409:  # "removal already in progress": wait until it is done
                raise
            time.sleep(0.05)
    raise SandboxError(f"docker did not remove container {container[:12]} in 10 s")
