"""Memory over a tree of processes where no control group bounds it: look often, kill the largest."""

import os
import signal
import time

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
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue  # it ended meanwhile
        for task in tasks:
            try:
                with open(f"/proc/{parent}/task/{task}/children", encoding="ascii") as handle:
                    children = [int(word) for word in handle.read().split()]
            except OSError:
                continue  # one thread ended; what the others started still counts
            found += children
            waiting += children
    return found


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third one, the state, on."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as handle:
        return handle.read().rpartition(")")[2].split()


def started(pid: int) -> str:
    return stat(pid)[19]


def is_below(pid: int, root: int) -> bool:
    while pid > 1:
        pid = int(stat(pid)[1])
        if pid == root:
            return True
    return False


def resident(pid: int) -> int:
    """Bytes in physical memory or swapped out, each shared page counted whole."""
    return summed(f"/proc/{pid}/status", ("VmRSS:", "VmSwap:"))


def proportional(pid: int) -> int:
    """The same, each shared page by its share; more than that where we may not look closely."""
    try:
        return summed(f"/proc/{pid}/smaps_rollup", ("Pss:", "SwapPss:"))
    except OSError:
        return resident(pid)


def summed(path: str, fields: tuple[str, ...]) -> int:
    """The sum of these lines, which count in kB."""
    with open(path, encoding="utf-8", errors="replace") as handle:
        return sum(int(line.split()[1]) << 10 for line in handle if line.startswith(fields))


def sizes(pids: list[int], measure: object = resident) -> list[Seen]:
    assert callable(measure)
    seen = []
    for pid in pids:
        try:
            seen.append((measure(pid), pid, started(pid)))
        except (OSError, IndexError):
            continue
    return seen


def kill(pid: int, start: str, root: int) -> bool:
    """Kill exactly this process, below `root`, not one that got its number later; whether there was one to kill."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if started(pid) != start or not is_below(pid, root):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except (OSError, IndexError):
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
            self.kills += kill(pid, start, self.pid)
            total -= size
        self.due = now + min(max((self.limit - total) / FASTEST, SHORTEST), LONGEST)
