"""Processes of a sandbox: how they start, which there are, and their end."""

# ruff: noqa: SIM105 - contextlib is an import that every session would pay for
from __future__ import annotations

import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Children:
    """Processes that end below us, ours and those that we inherit. Whoever is `awaited` keeps its status."""

    def __init__(self) -> None:
        self._awaited: set[int] = set()
        self._statuses: dict[int, int] = {}

    def awaits(self, pid: int) -> int:
        self._awaited.add(pid)
        return pid

    def reap(self) -> None:
        """Everyone who has ended so far."""
        self.status(0)

    def status(self, pid: int, *, wait: bool = False) -> int | None:
        """The wait status of `pid`, once; None while it lives. Everyone else who has ended is reaped by the way."""
        while pid not in self._statuses:
            try:
                done, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
            except ChildProcessError:
                break
            if not done:
                break
            if done in self._awaited:
                self._awaited.discard(done)
                self._statuses[done] = status
        return self._statuses.pop(pid, None)


def first_to_die() -> None:
    """Where memory runs out, the model's code goes before the supervisor, and long before the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "w") as handle:
            handle.write("1000")
    except OSError:
        pass


in_child: list[Callable[[], None]] = []
"""What else a fork of the supervisor has to undo."""


def become_child(stdin: int, stdout: int, stderr: int) -> None:
    """In a fork of the supervisor: a session of its own, the given streams, signals as a program expects them."""
    os.setsid()
    for undo in in_child:
        undo()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
        if source != target:
            os.dup2(source, target)


def processes_below(root: int) -> set[int]:
    """Every living process below `root` in the tree of parents."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as handle:
                    state, parent = handle.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            parents[int(name)] = (int(parent), state)
    below = {root}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in parents.items() if parent in below} - below
        grown = bool(more)
        below |= more
    return {pid for pid in below - {root} if parents[pid][1] not in (b"Z", b"X")}


def processes_here() -> set[int]:
    """Every living process of this pid namespace but its first and ourselves."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try:
                with open(f"/proc/{name}/stat", "rb") as handle:
                    state = handle.read().rpartition(b")")[2].split()[0]
            except OSError:
                continue
            if state not in (b"Z", b"X"):
                found.add(int(name))
    return found


def signal_quietly(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def limit(limits: dict[str, int]) -> None:
    """Set limits on ourselves: all that we start inherits them, and nothing can raise them again."""
    import resource

    for name, value in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # A second more for the processor's: at the hard limit it would be SIGKILL, which says less than SIGXCPU.
        ceiling = value + 1 if name == "CPU" and hard == resource.RLIM_INFINITY else value
        resource.setrlimit(kind, (value, ceiling))


def become_reaper() -> None:
    """Without a pid namespace: processes whose parents end become our children, so that none gets out of sight."""
    import ctypes

    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) != 0:
        raise SystemExit("PR_SET_CHILD_SUBREAPER failed")


def sweep(*, namespaced: bool, keep: set[int]) -> bool:
    """Kill every process but ourselves, the first one and `keep`; whether all went.

    All are stopped before any is killed, so that none can start another meanwhile.
    """

    def targets() -> set[int]:
        return (processes_here() if namespaced else processes_below(os.getpid())) - keep

    stopped: set[int] = set()
    for _ in range(100):
        fresh = targets() - stopped
        if not fresh:
            break
        for pid in fresh:
            signal_quietly(pid, signal.SIGSTOP)
        stopped |= fresh
    give_up = time.monotonic() + 2
    while left := targets():
        for pid in left:
            signal_quietly(pid, signal.SIGKILL)
        if time.monotonic() > give_up:
            return False
        time.sleep(0.001)
    return True
