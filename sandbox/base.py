"""What every sandbox backend does, whatever it is made of.

A `Provider` opens `Session`s. A session belongs to one rollout, keeps Python state between calls, and is closed exactly
once. The host owns every deadline. A result says what happened to the model's code; an exception
(`pace_agent.errors.SandboxError`) says that the sandbox itself was not there, which is never the model's fault.
"""

import os
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Protocol, Self

from pace_agent.errors import UserError

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/box",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
"""All of it, in every room with walls."""


class Outcome(StrEnum):
    """What became of one execution."""

    OK = "ok"
    """It ended with status 0."""
    NONZERO = "nonzero"
    """It ended with another status, or raised."""
    TIMEOUT = "timeout"
    """It was stopped at its deadline, with every process that it started."""
    OOM = "oom"
    """It ran out of memory."""
    KILLED = "killed"
    """A signal ended it that no limit of ours explains."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than is captured; the output is cut."""
    SANDBOX_DIED = "sandbox_died"
    """The session ended under it; state is lost."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Limits of one session. Sizes in bytes, times in seconds. UserError for what no sandbox can keep to."""

    timeout: float = 10.0
    memory: int = 1 << 30
    processes: int = 64
    descriptors: int = 256
    disk: int = 64 << 20
    """Of each of /box, /tmp and shared memory."""
    files: int = 16384
    """Files and folders, in each of these."""
    cpu_seconds: int = 600
    """Of each process, over all the calls of its life."""
    captured: int = 1 << 20
    """Bytes of output kept of a call, three quarters for stdout, the head and the tail of each. More makes the outcome
    `output_limit`; much more stops the call."""
    modules: tuple[str, ...] = ()
    """Imported by Python before any code runs, so that importing them again takes no time; the names are not bound.
    SandboxError at the start if one can't be."""

    def __post_init__(self) -> None:
        modules: object = self.modules
        if not isinstance(modules, list | tuple) or not all(isinstance(name, str) for name in modules):
            raise UserError(f"SandboxSpec.modules must be a list of names of modules, got {modules!r}")
        object.__setattr__(self, "modules", tuple(modules))
        for name, (lowest, words) in _LOWEST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise UserError(f"SandboxSpec.{name} must be a whole number, {words}; got {value!r}")
        if not isinstance(self.timeout, int | float) or not 0 < self.timeout < float("inf"):
            raise UserError(f"SandboxSpec.timeout must be a number of seconds above 0, got {self.timeout!r}")

    def over(self, base: "SandboxSpec") -> "SandboxSpec":
        """`base` with whatever is set here to other than its default."""
        mine = {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }
        return replace(base, **mine)


_LOWEST = {
    "memory": (16 << 20, "at least 16 MiB"),
    "processes": (1, "at least 1"),
    "descriptors": (16, "at least 16"),
    "disk": (1 << 16, "at least 64 KiB"),
    "files": (16, "at least 16"),
    "cpu_seconds": (1, "at least 1"),
    "captured": (4, "at least 4"),
}
"""Below these no room can start."""


class FileError(OSError):
    """A file of a sandbox can't be read or written as the code inside has left it: the model's doing.

    Of the matching kind too: one for a file that is missing is a FileNotFoundError as well.
    """


_kinds: dict[str, type[FileError]] = {"OSError": FileError}


def file_error(number: int, path: str) -> FileError:
    """For an error number of the system."""
    text = os.strerror(number)
    ordinary = type(OSError(number, text))
    name = ordinary.__name__
    if name not in _kinds:
        _kinds[name] = type(f"Sandbox{name}", (FileError, ordinary), {})
    return _kinds[name](number, text, path)


@dataclass(frozen=True, slots=True)
class ExecResult:
    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    truncated: bool = False
    """Output was cut; the cut is marked in the text."""
    state_lost: bool = False
    """The Python state of the session is gone; the next call starts fresh."""
    memory_enforced: bool = True
    """False where no control group bounds the whole process tree: it is watched then, and killed a little late."""


class Session(Protocol):
    """One rollout's sandbox. Closing twice is fine; using it after that raises SandboxError."""

    async def run_python(self, code: str, *, timeout: float | None = None) -> ExecResult:
        """Run in the session's interpreter; names stay for the next call. The value of a last expression is printed.

        A call that is cancelled closes the session: nothing of it may go on. Use `timeout` to end code and go on.
        """

    async def exec(self, argv: list[str], *, stdin: bytes = b"", timeout: float | None = None) -> ExecResult:
        """Run a program with /box as its folder. A child that runs out of memory is the program's to report."""

    async def put(self, path: str, data: bytes) -> None:
        """Write a file below /box, folders included. FileError where the code inside stands in the way."""

    async def get(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """Read a regular file below /box. FileError if there is none; SandboxError beyond `limit` bytes."""

    async def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the running code, as Ctrl-C would."""

    async def reset(self) -> None:
        """Forget the Python state; files stay."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BackendCheck:
    """Whether a backend works here, and if not, why and what to do."""

    backend: str
    available: bool
    reason: str = ""
    remedy: str = ""


class Provider(Protocol):
    """Opens sessions. `async with provider:` starts and closes it."""

    @property
    def spec(self) -> SandboxSpec:
        """Limits of sessions that are opened without their own."""

    async def open(self, spec: SandboxSpec | None = None) -> Session: ...

    async def run_fresh(
        self, code: str, *, stdin: bytes = b"", timeout: float | None = None, spec: SandboxSpec | None = None
    ) -> ExecResult:
        """Run Python code that shares no state, file or process with any other run, and leaves none.

        `spec.modules` are loaded already. As many run at once as there are cores; the others wait their turn.
        """

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...
