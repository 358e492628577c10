"""How a container of ours is made: what it may not do, and how much it may use."""

import base64
import json
from functools import cache
from typing import Any

from pace_agent.sandbox import bundle, inside, seccomp
from pace_agent.sandbox.base import ENVIRONMENT, SandboxSpec
from pace_agent.sandbox.docker.owner import labels
from pace_agent.sandbox.launched import OWN_PROCESSES, agent_config

USER = 1000
LIFETIME = 24 * 3600
"""Seconds after which a container ends by itself, whatever became of its host."""

BOOT = f"""
import json, os
{bundle.COMPILE}{bundle.MAKE}
def read(size):
    parts = []
    while size:
        parts.append(os.read(0, min(size, 1 << 20)))
        if not parts[-1]:
            raise SystemExit("the stream closed before the program had come")
        size -= len(parts[-1])
    return b"".join(parts)
given = json.loads(read(int.from_bytes(read(4), "big")))
reader, writer, nothing = os.dup(0), os.dup(1), os.open("/dev/null", os.O_RDWR)
os.dup2(nothing, 0)
os.dup2(nothing, 1)
os.close(nothing)
make(compiled(given["sources"])).serve(reader, writer, given["config"])
"""
"""Takes the program from the attached stream, moves the stream away from where code can write to it, and starts."""


@cache
def _sources() -> bundle.Sources:
    return bundle.sources(inside.__name__, inside.CONTAINER)


@cache
def _filters() -> dict[str, str]:
    architectures = (seccomp.X86_64, seccomp.AARCH64)
    return {each.name: base64.b64encode(seccomp.program(each.name)).decode() for each in architectures}


@cache
def _profile() -> str:
    return json.dumps(seccomp.docker_profile())


def first_message(spec: SandboxSpec) -> bytes:
    """The program and what it keeps to, for BOOT."""
    # Numbers of processes are bounded by the container's control group: a limit by user would count other containers'.
    config = agent_config(spec, root="/box", namespaced=True, own_user=False)
    config |= {"lifetime": LIFETIME, "filters": _filters()}
    data = json.dumps({"sources": _sources(), "config": config}).encode()
    return len(data).to_bytes(4, "big") + data


def creation(image: str, spec: SandboxSpec, runtime: str | None) -> dict[str, Any]:
    """Arguments of the SDK's `containers.create`."""
    folder = f"rw,nosuid,nodev,size={spec.disk},nr_inodes={spec.files},uid={USER},gid={USER}"
    chosen = {} if runtime is None else {"runtime": runtime}
    return {
        **chosen,
        "image": image,
        "command": ["python3", "-I", "-S", "-c", BOOT],
        "entrypoint": [],
        "environment": ENVIRONMENT,
        "working_dir": "/box",
        "hostname": "sandbox",
        "user": f"{USER}:{USER}",
        "stdin_open": True,
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges", f"seccomp={_profile()}"],
        "pids_limit": spec.processes + OWN_PROCESSES,
        "mem_limit": spec.memory,
        "memswap_limit": spec.memory,
        "nano_cpus": 10**9,
        "tmpfs": {
            "/box": f"{folder},mode=0755,exec",
            "/tmp": f"{folder},mode=1777,exec",
            "/dev/shm": f"{folder},mode=1777,noexec",
        },
        "log_config": {"type": "none", "config": {}},
        "auto_remove": True,
        "labels": labels(),
    }
