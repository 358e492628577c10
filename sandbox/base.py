"""What every sandbox backend does, whatever it is made of.

A `Provider` opens `Session`s. A session belongs to one rollout, keeps Python state between calls, and is closed exactly
once. The host owns every deadline. A result says what happened to the model's code; an exception
(`pace_agent.errors.SandboxError`) says that the sandbox itself was not there, which is never the model's fault.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self


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
    """Limits of one session. Sizes in bytes, times in seconds."""

    timeout: float = 10.0
    memory: int = 1 << 30
    processes: int = 64
    descriptors: int = 256
    disk: int = 64 << 20
    """Of each of /box, /tmp and shared memory."""
    files: int = 16384
    """Files and folders, in each of these."""
    cpu_seconds: int = 60
    captured: int = 1 << 20
    """Bytes of output kept per call; more ends the call with `output_limit`."""
    modules: tuple[str, ...] = ()
    """Loaded by Python before any code runs. SandboxError at the start if one can't be."""


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
        """Run in the session's interpreter; names stay for the next call. The value of a last expression is printed."""

    async def exec(self, argv: list[str], *, stdin: bytes = b"", timeout: float | None = None) -> ExecResult: ...

    async def put(self, path: str, data: bytes) -> None:
        """Write a file below /box."""

    async def get(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """Read a file below /box; SandboxError beyond `limit` bytes."""

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
