"""No sandbox: the same agent as an ordinary process of this user, in a temporary folder.

For code that you trust, on machines where nothing better runs. Sessions, deadlines, results and limits per process
are the same; but the code reads and writes whatever this user may, reaches the network, and can kill our processes.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from pace_agent.sandbox.base import SandboxSpec
from pace_agent.sandbox.launch import Plan
from pace_agent.sandbox.provider import OWN_PROCESSES, agent_arguments

_AGENT = Path(__file__).with_name("agent.py")


@dataclass(frozen=True, slots=True)
class UnsafeSubprocess:
    name: str = "subprocess"
    user: int | None = None
    expose: tuple[str, ...] = ()

    def plan(self, spec: SandboxSpec) -> Plan:
        return Plan(
            argv=[sys.executable, "-I", "-S", str(_AGENT), *agent_arguments(spec, root="", namespaced=False)],
            files={},
            environment={
                "PATH": os.environ.get("PATH", os.defpath),
                "HOME": "{folder}",
                "TMPDIR": "{folder}",
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
            },
            plain=True,
            memory=spec.memory,
            processes=spec.processes + 2 * OWN_PROCESSES,
        )
