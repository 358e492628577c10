"""CPU time of a program and of everything that it starts."""

import atexit
import os
from collections.abc import Collection
from pathlib import Path


class CpuClock:
    """Seconds of CPU time that we, all below us and a Docker daemon of this machine have used."""

    def __init__(self) -> None:
        self.daemon = [pid for pid in processes() if name_of(pid).startswith(("dockerd", "containerd"))]
        self.group = self._enter_group()

    def _enter_group(self) -> Path | None:
        """A control group for us and whatever we start from now on."""
        own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        for root, path, file in (
            ("/sys/fs/cgroup/cpuacct", own.get("cpuacct", "/"), "cpuacct.usage"),
            ("/sys/fs/cgroup", own.get("", "/"), "cpu.stat"),
            ("/sys/fs/cgroup/unified", own.get("", "/"), "cpu.stat"),
        ):
            base = Path(root + path)
            folder = base / f"pace-benchmark-{os.getpid()}"
            if not (base / "cgroup.procs").exists():
                continue
            try:
                folder.mkdir()
                (folder / "cgroup.procs").write_text(str(os.getpid()))
            except OSError:
                continue
            atexit.register(self._leave, base, folder)
            return folder / file
        return None

    @staticmethod
    def _leave(base: Path, folder: Path) -> None:
        (base / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()

    def start(self, daemon: bool) -> None:
        """`daemon`: also count what the daemon spends."""
        self._daemon_at = ticks(below(self.daemon)) if daemon else None
        self._own_at = self._own()

    def stop(self) -> float:
        """Seconds since the start."""
        own = self._own() - self._own_at
        return own if self._daemon_at is None else own + ticks(below(self.daemon)) - self._daemon_at

    def _own(self) -> float:
        os.sched_yield()  # has the kernel book what we used until here
        if self.group is None:
            return ticks(below([os.getpid()]))
        text = self.group.read_text()
        return int(text) / 1e9 if self.group.name == "cpuacct.usage" else int(text.split()[1]) / 1e6


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def below(roots: Collection[int]) -> set[int]:
    """These processes and all below them."""
    parents = {pid: int(stat[1]) for pid in processes() if (stat := stat_of(pid))}
    found, more = set(roots), True
    while more:
        new = {pid for pid, parent in parents.items() if parent in found} - found
        found, more = found | new, bool(new)
    return found


def ticks(pids: set[int]) -> float:
    """Seconds of these processes and of their children that have ended."""
    return sum(sum(map(int, stat[11:15])) for pid in pids if (stat := stat_of(pid))) / os.sysconf("SC_CLK_TCK")
