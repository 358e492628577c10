"""No sandbox: the same agent as an ordinary process of this user, in a temporary folder.

For code that you trust, on machines where nothing better runs. Sessions, deadlines, results and limits per process
are the same; but the code reads and writes whatever this user may, reaches the network, and can kill our processes.
"""

import json
import os
import sys
from dataclasses import dataclass

from pace_agent.sandbox import bundle, inside
from pace_agent.sandbox.base import SandboxSpec
from pace_agent.sandbox.launch import Plan
from pace_agent.sandbox.launched import OWN_PROCESSES, LaunchedRooms, agent_config

_AGENT_FD = 4


@dataclass(frozen=True, slots=True)
class UnsafeSubprocess:
    name: str = "subprocess"
    user: int | None = None
    expose: tuple[str, ...] = ()
    has_zygote: bool = False

    def rooms(self) -> LaunchedRooms:
        return LaunchedRooms(self)

    def plan(self, spec: SandboxSpec, *, fresh: bool, makes_folders: bool) -> Plan:
        config = agent_config(spec, root="", namespaced=False, own_user=False)
        return Plan(
            argv=[sys.executable, "-I", "-S", "-c", bundle.run_compiled(_AGENT_FD), json.dumps(config)],
            files={_AGENT_FD: bundle.compiled(inside.__name__, inside.SESSION, sys.executable)},
            environment={
                "PATH": os.environ.get("PATH", os.defpath),
                "HOME": "{folder}",
                "TMPDIR": "{folder}",
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
            },
            plain=True,
            memory=spec.memory,
            processes=spec.processes + OWN_PROCESSES,
        )
