"""Limits over a whole room by control groups, where this process may make them."""

import contextlib
import os


class Cgroups:
    """A memory and process limit over a whole room, where this process may create cgroups; else nothing.

    Version 2 is tried first, below the root and beside our own cgroup, then version 1.
    """

    def __init__(self, root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> None:
        self.root = root
        self.membership = membership
        self.bases: list[str] = []
        self.version = 0
        for build in (self._build_v2, self._build_v1):
            try:
                self.bases = build()
            except OSError:
                self.close()
                continue
            self.version = 2 if build == self._build_v2 else 1
            break

    def _own(self, controller: str) -> str:
        with open(self.membership, encoding="utf-8") as lines:
            for line in lines:
                _, names, path = line.rstrip("\n").split(":", 2)
                if controller in names.split(","):
                    return path
        return "/"

    def _make(self, base: str) -> str:
        base = base.rstrip("/")
        for name in os.listdir(base):
            prefix, _, pid = name.rpartition("-")
            if prefix == "pace-agent" and pid.isdigit() and not lives(int(pid)):
                # A launcher that was killed left it; its rooms died with it.
                stale = f"{base}/{name}"
                self.remove([f.path for f in os.scandir(stale) if f.is_dir()] + [stale])
        path = f"{base}/pace-agent-{os.getpid()}"
        os.mkdir(path)
        self.bases.append(path)
        return path

    def _build_v2(self) -> list[str]:
        root = self.root
        beside = os.path.dirname(self._own("").rstrip("/") or "/")
        for base in (root, root + beside):
            try:
                with open(f"{base}/cgroup.subtree_control", encoding="ascii") as handle:
                    if "memory" not in handle.read().split():
                        continue
                made = self._make(base)
                write(f"{made}/cgroup.subtree_control", "+memory")
            except OSError:
                self.close()
                continue
            with contextlib.suppress(OSError):  # each process is limited too; memory has nothing else
                write(f"{made}/cgroup.subtree_control", "+pids")
            return [made]
        raise OSError("no cgroup v2 with a memory controller may be changed by us")

    def _build_v1(self) -> list[str]:
        made = []
        for controller in ("memory", "pids"):
            root = f"{self.root}/{controller}"
            if not os.path.exists(f"{root}/cgroup.procs"):
                if controller == "memory":
                    raise OSError("no cgroup v1 memory controller")
                continue
            own = root + self._own(controller)
            made.append(self._make(own if os.path.isdir(own) else root))
        return made

    def create(self, name: str, memory: int, processes: int) -> list[str]:
        """Folders of one room, limits set and read back; [] where no limit holds."""
        folders: list[str] = []
        try:
            for base in self.bases:
                folder = f"{base}/{name}"
                os.mkdir(folder)
                folders.append(folder)
            limit = f"{folders[0]}/{'memory.max' if self.version == 2 else 'memory.limit_in_bytes'}"
            write(limit, str(memory))
            swap = f"{folders[0]}/{'memory.swap.max' if self.version == 2 else 'memory.memsw.limit_in_bytes'}"
            if os.path.exists(swap):
                write(swap, "0" if self.version == 2 else str(memory))
            if os.path.exists(f"{folders[-1]}/pids.max"):
                write(f"{folders[-1]}/pids.max", str(processes))
            if int(read(limit)) > memory:
                raise OSError("memory limit did not hold")
        except (OSError, IndexError, ValueError):
            self.remove(folders)
            return []
        return folders

    def oom_kills(self, folders: list[str]) -> int:
        if not folders:
            return 0
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        try:
            for line in read(f"{folders[0]}/{name}").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        except OSError:
            pass
        return 0

    @staticmethod
    def remove(folders: list[str]) -> bool:
        """Remove what can be removed; whether all of it is gone."""
        for folder in list(folders):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            folders.remove(folder)
        return not folders

    def close(self) -> None:
        self.remove(self.bases)


def lives(pid: int) -> bool:
    """Not as a zombie: whoever inherits a dead launcher may take its time to reap it."""
    try:
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, UnicodeDecodeError):
        return os.path.exists(f"/proc/{pid}")


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as handle:
        handle.write(text)


def read(path: str) -> str:
    with open(path, encoding="ascii") as handle:
        return handle.read()
