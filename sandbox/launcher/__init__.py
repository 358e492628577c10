"""The small process that starts and ends sandboxes. Standalone: standard library only, run as one program.

Why a process of its own: a trainer is large and has many threads, so forking from it is slow and unsafe; the signal
that a child gets when its parent dies follows the parent's *thread*; and privileges can be dropped here, between
fork and exec, where no other thread runs.

What always holds:

* It ends when its owner does (end of file on the control socket, or the owner's process is gone), and nothing that it
  started outlives it: it kills and reaps first; and if it is killed itself, each sandbox dies with its parent.
* A child runs with an empty environment, with exactly the descriptors of its template, and, when this process is
  root, as an unprivileged user.
* Its own children are monitors of rooms. Any other child was orphaned by a dead room and is killed. A room is
  reported `gone` when its monitor is reaped and no such orphan is left.
* A room's memory is bounded over all its processes: by a control group, or where none can be made by looking often
  and killing the largest (`watch`), which is late by what can be allocated between two looks.

One JSON message per packet on a SEQPACKET socket. In: template, spawn (with one descriptor), kill, oom.
Out: started, spawned, gone, oom.
"""

ORDER = ("cgroups", "memory", "mounts", "main")
"""The files of the program, each after those that it imports."""
