"""The first process of a container: a session on a pair of pipes, which nothing inside can stop, kill or write to."""

from __future__ import annotations

import base64
import os
import signal

from pace_agent.sandbox.inside.confine import install_filter
from pace_agent.sandbox.inside.session import Session
from pace_agent.sandbox.inside.session import serve as serve_session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pace_agent.sandbox.inside.calls import Call
    from pace_agent.sandbox.inside.supervisor import Header

COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Where the container's own control group counts what the kernel killed for want of memory, version 2 and 1."""


class ContainerSession(Session):
    """Tells from its own control group whether a process was killed for want of memory."""

    def __init__(self, reader: int, writer: int, config: Header) -> None:
        super().__init__(reader, writer, config)
        self.oom_seen = oom_kills()

    def watch(self, call: Call, *others: Any) -> tuple[int | None, Header]:
        status, report = super().watch(call, *others)
        if status is not None:
            died = os.waitstatus_to_exitcode(status) in (-signal.SIGKILL, 128 + signal.SIGKILL)
            count = oom_kills()
            report = {"oom": died and not call.killed and count > self.oom_seen}
            self.oom_seen = count
        return status, report


def oom_kills() -> int:
    for path in COUNTERS:
        try:
            with open(path, encoding="ascii") as handle:
                for line in handle:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except OSError:
            continue
    return 0


def serve(reader: int, writer: int, config: Header) -> None:
    """Serve the host until it is gone, at most `lifetime` seconds."""
    if os.getpid() != 1:
        raise SystemExit("refusing to run: this is not the first process of a container")
    # The first process is only sent signals that it handles, and from inside not even SIGKILL.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.alarm(config["lifetime"])
    for fd in (reader, writer):
        os.set_inheritable(fd, False)
    machine = os.uname().machine
    if machine not in config["filters"]:
        raise SystemExit(f"there is no filter on system calls for {machine}")
    install_filter(base64.b64decode(config["filters"][machine]))
    serve_session(reader, writer, config, ContainerSession)
