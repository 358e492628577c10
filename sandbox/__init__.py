"""Where model-written code runs. `open_provider()` finds what works here, and never settles for less in silence."""

from pace_agent.errors import UserError, did_you_mean
from pace_agent.sandbox.base import BackendCheck, ExecResult, Outcome, Provider, SandboxSpec, Session

BACKENDS = ("auto", "bwrap", "subprocess")

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
    backend: str = "auto", *, unsafe: bool = False, spec: SandboxSpec | None = None, prewarm: int = 0
) -> Provider:
    """A provider of sessions, not yet started: `async with` it.

    `auto` is bubblewrap. `subprocess` is no sandbox and needs `unsafe=True`. `spec` holds the limits of sessions
    opened without their own; `prewarm` of them are kept ready. UserError where the backend can't work, with what is
    missing and how to get it.
    """
    from pace_agent.sandbox import bwrap
    from pace_agent.sandbox.provider import RoomProvider
    from pace_agent.sandbox.unsafe_subprocess import UnsafeSubprocess

    if backend not in BACKENDS:
        raise UserError(f"unknown sandbox backend {backend!r}.{did_you_mean(backend, BACKENDS)}")
    if backend == "subprocess":
        if not unsafe:
            raise UserError(
                "sandbox backend 'subprocess' contains nothing: model-written code would run as you, with your files "
                "and your network. Pass unsafe=True if that is what you want."
            )
        return RoomProvider(UnsafeSubprocess(), spec=spec, prewarm=prewarm)
    found = bwrap.check()
    if not found.available:
        raise UserError(f"no sandbox: backend 'bwrap' can't work here: {found.reason}. {found.remedy}".rstrip())
    return RoomProvider(bwrap.backend(), spec=spec, prewarm=prewarm)


def check() -> list[BackendCheck]:
    """Which backends work on this machine, and if not, why and what to do."""
    from pace_agent.sandbox import bwrap

    return [
        bwrap.check(),
        BackendCheck("subprocess", True, "contains nothing; only with unsafe=True"),
    ]
