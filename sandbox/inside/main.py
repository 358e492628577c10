"""The start of the program: limits first, then the supervisor that was asked for."""

from __future__ import annotations

import json
import os
import sys

from pace_agent.sandbox.inside.fresh import Zygote
from pace_agent.sandbox.inside.processes import become_reaper, limit
from pace_agent.sandbox.inside.supervisor import Session, Supervisor


def main(reader: int, writer: int, text: str) -> None:
    """Serve the host at these descriptors until it is gone. `text` is the configuration, as JSON."""
    config = json.loads(text)
    if not config["namespaced"]:
        become_reaper()
    elif os.readlink("/proc/self/ns/pid") == config["outside"]:
        # It is about to signal every process that it sees.
        raise SystemExit("refusing to run: this is the host's own process namespace")
    for fd in (reader, writer):
        os.set_inheritable(fd, False)
    if config["fresh"]:
        supervisor: Supervisor = Zygote(reader, writer, config)
    else:
        limit(config["limits"])
        supervisor = Session(reader, writer, config)
    supervisor.serve()


def start() -> None:
    """On a socket at descriptor 3, with the configuration as the last argument."""
    main(3, 3, sys.argv[-1])
