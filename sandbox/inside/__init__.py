"""What runs inside a sandbox: a supervisor, and apart from it the kernel that runs the code.

Standalone: standard library only, Python 3.9 or later, because `pace_agent.sandbox.bundle` hands these files, as one
program, to an interpreter that sees nothing of this package. They import little, because every session pays for it.

The supervisor holds the one link to the host and never runs a line of the model's. It starts the kernel (a fork that
keeps a Python namespace), starts commands, reads what they write into bounded buffers, and kills.

A frame is `!II` (length of header, length of body), a JSON header, a body. Requests: run, exec, fresh, put, get, reset,
and while one of these is going on, interrupt and kill with its id. Each request gets one reply.

What always holds:

* A reply holds at most the limits that were set at the start, whatever was written.
* After a deadline (`interrupt` with `sweep`, or `kill`) every process but supervisor and kernel is gone before the
  reply.
* Without a namespace of its own it signals only processes below itself.

What is not promised: code that runs in the same sandbox can disturb or impersonate this process. The host believes
nothing in a reply beyond its form, keeps its own deadline, and then ends the whole sandbox.
"""

_COMMON = ("frames", "calls", "processes", "cells", "files", "supervisor")

SESSION = (*_COMMON, "confine", "session")
"""The files of each program, every one after those that it imports; the last one starts it."""
FRESH = (*_COMMON, "confine", "fresh")
CONTAINER = (*_COMMON, "confine", "session", "container")
