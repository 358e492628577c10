"""Memory over a tree of processes where no control group bounds it: look often, kill the largest."""

import os
import signal
import time

PAGE = os.sysconf("SC_PAGE_SIZE")
FASTEST = 4 << 30
"""Bytes a second that a room is expected to grow at most; what is left up to its limit decides when to look again."""
SHORTEST, LONGEST = 0.02, 0.25
"""Seconds between two looks at a room."""

Seen = tuple[int, int, str]
"""Bytes, process id, and when the process started, which tells it from a later one of the same number."""


def below(pid: int) -> list[int]:
    """Every process below `pid`."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", encoding="ascii") as handle:
                    children = [int(word) for word in handle.read().split()]
                found += children
                waiting += children
        except OSError:
            continue  # it ended meanwhile
    return found


def started(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as handle:
        return handle.read().rpartition(")")[2].split()[19]


def resident(pid: int) -> int:
    """Bytes of physical memory, each shared page counted whole."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as handle:
        return int(handle.read().split()[1]) * PAGE


def proportional(pid: int) -> int:
    """Bytes of physical memory, each shared page by its share; more than that where we may not look closely."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as handle:
            for line in handle:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return resident(pid)


def sizes(pids: list[int], measure: object = resident) -> list[Seen]:
    assert callable(measure)
    seen = []
    for pid in pids:
        try:
            seen.append((measure(pid), pid, started(pid)))
        except (OSError, IndexError):
            continue
    return seen


def kill(pid: int, start: str) -> bool:
    """Kill exactly this process, not one that got its number later; whether there was one to kill."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if started(pid) != start:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


class Watch:
    """When to look at a room again, and what was killed in it so far."""

    def __init__(self, pid: int, limit: int) -> None:
        self.pid = pid
        self.limit = limit
        self.kills = 0
        self.due = time.monotonic() + SHORTEST

    def look(self, now: float) -> None:
        """Kill the largest processes below the room's first one, until the rest keep to the limit."""
        if now < self.due:
            return
        pids = below(self.pid)
        seen = sizes(pids)
        total = sum(size for size, _, _ in seen)
        if total > self.limit:  # shared pages were counted more than once: look closely
            seen = sizes(pids, proportional)
            total = sum(size for size, _, _ in seen)
        for size, pid, start in sorted(seen, reverse=True):
            if total <= self.limit:
                break
            self.kills += kill(pid, start)
            total -= size
        self.due = now + min(max((self.limit - total) / FASTEST, SHORTEST), LONGEST)
