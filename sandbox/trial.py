"""Whether a backend works: by a first program in a first session."""

import asyncio
import threading

from pace_agent.errors import SandboxError
from pace_agent.sandbox.base import Outcome
from pace_agent.sandbox.provider import Backend, RoomProvider


async def _first_program(backend: Backend) -> None:
    async with RoomProvider(backend) as provider:
        session = await provider.open()
        result = await session.run_python("print(6 * 7)", timeout=30)
        await session.close()
    if result.outcome is not Outcome.OK or result.stdout != "42\n":
        raise SandboxError(f"a first program ended as {result.outcome}: {result.stderr.strip()}")


def failure(backend: Backend) -> BaseException | None:
    """What went wrong, or None. Works with or without a running event loop: it waits apart from it."""
    failures: list[BaseException] = []

    def apart() -> None:
        try:
            asyncio.run(_first_program(backend))
        except (SandboxError, OSError) as error:
            failures.append(error)

    thread = threading.Thread(target=apart)
    thread.start()
    thread.join()
    return failures[0] if failures else None
