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
    "check",
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

    return RoomProvider(_backend(backend, unsafe, packages, image, runtime), spec=spec, prewarm=prewarm)


def _backend(name: str, unsafe: bool, packages: bool, image: str | None, runtime: str | None) -> "Backend":
    if name not in BACKENDS:
        raise UserError(f"unknown sandbox backend {name!r}.{did_you_mean(name, BACKENDS)}")
    if name != "docker" and (image or runtime):
        raise UserError(f"an image or a runtime is for sandbox backend 'docker', not for {name!r}.")
    if name == "subprocess":
        from pace_agent.sandbox.unsafe_subprocess import UnsafeSubprocess

        if not unsafe:
            raise UserError(
                "sandbox backend 'subprocess' contains nothing: model-written code would run as you, with your files "
                "and your network. Pass unsafe=True if that is what you want."
            )
        return UnsafeSubprocess()
    if name == "docker":
        from pace_agent.sandbox.docker import rooms

        docker = rooms.Docker(image, runtime)
        _insist(rooms.check(docker))
        return docker
    from pace_agent.sandbox import bwrap

    _insist(bwrap.check())
    return bwrap.backend(interpreter=bwrap.running_interpreter(packages=True) if packages else None)


def _insist(found: BackendCheck) -> None:
    if not found.available:
        raise UserError(
            f"no sandbox: backend {found.backend!r} can't work here: {found.reason}. {found.remedy}".rstrip()
        )


def check(image: str | None = None, runtime: str | None = None) -> list[BackendCheck]:
    """Which backends work on this machine, and if not, why and what to do."""
    from pace_agent.sandbox import bwrap
    from pace_agent.sandbox.docker import rooms

    return [
        bwrap.check(),
        rooms.check(rooms.Docker(image, runtime)),
        BackendCheck("subprocess", True, "contains nothing; only with unsafe=True"),
    ]
