"""Where model-written code runs. `open_provider()` finds what works here, and never settles for less in silence."""

from typing import TYPE_CHECKING

from pace_agent.errors import UserError, did_you_mean
from pace_agent.sandbox.base import BackendCheck, ExecResult, Outcome, Provider, SandboxSpec, Session

if TYPE_CHECKING:
    from pace_agent.sandbox.provider import Backend

BACKENDS = ("auto", "bwrap", "docker", "subprocess")

__all__ = [
    "BACKENDS",
    "BackendCheck",
    "ExecResult",
    "Outcome",
    "Provider",
    "SandboxSpec",
    "Session",
    "backend_named",
    "check",
    "check_one",
    "open_provider",
]


def open_provider(
    backend: str = "auto",
    *,
    unsafe: bool = False,
    spec: SandboxSpec | None = None,
    prewarm: int = 0,
    packages: bool = False,
    image: str | None = None,
    runtime: str | None = None,
) -> Provider:
    """A provider of sessions, not yet started: `async with` it.

    Args:
        backend: `auto` is bubblewrap. `docker` wants a daemon. `subprocess` is no sandbox and needs `unsafe=True`.
        spec: Limits of sessions opened without their own.
        prewarm: Sessions kept ready.
        packages: With bubblewrap, give code the running Python with what is installed beside it, read-only, instead of
            the system's Python. A built Docker image has numpy and sympy in any case.
        image: With Docker, an image with `python3`, pulled if it isn't there; None builds one of this machine's Python.
        runtime: With Docker, a runtime that the daemon knows: `runsc` for gVisor.

    Raises:
        UserError: The backend can't work here; says what is missing and how to get it.
    """
    from pace_agent.sandbox.provider import RoomProvider

    if backend not in BACKENDS:
        raise UserError(f"unknown sandbox backend {backend!r}.{did_you_mean(backend, BACKENDS)}")
    if backend != "docker" and (image or runtime):
        raise UserError(f"an image or a runtime is for sandbox backend 'docker', not for {backend!r}.")
    if backend == "docker" and packages:
        raise UserError("packages are for sandbox backend 'bwrap'; a container has those of its image.")
    if backend == "subprocess" and not unsafe:
        raise UserError(
            "sandbox backend 'subprocess' contains nothing: model-written code would run as you, with your files "
            "and your network. Pass unsafe=True if that is what you want."
        )
    found = check_one(backend, image, runtime)
    if not found.available:
        raise UserError(
            f"no sandbox: backend {found.backend!r} can't work here: {found.reason}. {found.remedy}".rstrip()
        )
    return RoomProvider(backend_named(backend, image, runtime, packages=packages), spec=spec, prewarm=prewarm)


def backend_named(
    name: str, image: str | None = None, runtime: str | None = None, *, packages: bool = False
) -> "Backend":
    """The backend of one of the names, whether it works here or not. See `open_provider`, which asks first."""
    if name == "subprocess":
        from pace_agent.sandbox.unsafe_subprocess import UnsafeSubprocess

        return UnsafeSubprocess()
    if name == "docker":
        from pace_agent.sandbox.docker.rooms import Docker

        return Docker(image, runtime)
    from pace_agent.sandbox import bwrap

    return bwrap.backend(interpreter=bwrap.running_interpreter(packages=True) if packages else None)


def check_one(name: str, image: str | None = None, runtime: str | None = None) -> BackendCheck:
    """Whether a backend works on this machine, and if not, why and what to do."""
    if name == "subprocess":
        return BackendCheck("subprocess", True, "contains nothing; only with unsafe=True")
    if name == "docker":
        from pace_agent.sandbox.docker import rooms

        return rooms.check(rooms.Docker(image, runtime))
    from pace_agent.sandbox import bwrap

    return bwrap.check()


def check(image: str | None = None, runtime: str | None = None) -> list[BackendCheck]:
    """Which backends work on this machine, and if not, why and what to do."""
    return [check_one(name, image, runtime) for name in BACKENDS if name != "auto"]
