"""Whether a sandbox holds, tried for real: attacks from inside, judged by what they say and by what the host sees.

What always holds:

* `contained` is True only where the attack was made and failed in a way that its probe knows. An unknown answer, a
  crash or silence is not containment.
* The attacks are harmless where nothing contains them (see `attacks`). Those that use something up are not even tried
  in a room that sees the processes of the host, and count as not contained there.

What is not shown: that a kernel without known holes has none, and limits that depend on the size of the machine.
"""

from pace_agent.sandbox.probes.judging import Group, Probe
from pace_agent.sandbox.probes.run import ProbeResult, run
from pace_agent.sandbox.probes.table import PROBES

__all__ = ["PROBES", "Group", "Probe", "ProbeResult", "run"]
