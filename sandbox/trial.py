"""Whether a backend works: by a first program in a first session."""

import asyncio
import threading

from pace_agent.errors import SandboxError
from pace_agent.sandbox.base import Outcome
from pace_agent.sandbox.provider import Backend, RoomProvider

_PROGRAM = "import os; print(os.statvfs('/tmp').f_files)"


async def _first_program(backend: Backend) -> str:
    async with RoomProvider(backend) as provider:
        session = await provider.open()
        result = await session.run_python(_PROGRAM, timeout=30)
        await session.close()
    if result.outcome is not Outcome.OK or not result.stdout.strip().isdigit():
        raise SandboxError(f"a first program ended as {result.outcome}: {result.stderr.strip()}")
    notes = []
    if not result.memory_enforced:
        notes.append("memory is watched, not enforced: no control group can be made by this user")
    if int(result.stdout) != provider.spec.files:
        notes.append("the number of files is not bounded: this user may not mount")
    return "; ".join(notes)


def first_program(backend: Backend) -> str:
    """Run it; what is weaker here than it could be. SandboxError, OSError or UserError where it doesn't work.

    Works with or without a running event loop: it waits apart from it.
    """
    notes: list[str] = []
    failures: list[BaseException] = []

    def apart() -> None:
        try:
            notes.append(asyncio.run(_first_program(backend)))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=apart)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return notes[0]
