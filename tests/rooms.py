"""Parts of the sandbox tests: who is left, and whether this machine can have a sandbox at all."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from pace_agent.sandbox import bwrap

FOUND = bwrap.check()

needs_namespaces = pytest.mark.skipif(
    not FOUND.available and "user namespaces" in FOUND.reason, reason=f"{FOUND.reason} {FOUND.remedy}"
)
"""Any other reason for an unavailable backend is a failure."""


def mark() -> str:
    """Seconds for a `sleep` that can be told from every other one; it never ends while a test runs."""
    return f"{random.randrange(10**6, 10**7)}.{random.randrange(10**6)}"


def sleepers(seconds: str) -> list[int]:
    """Host processes whose command line holds this mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if seconds.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def until(condition: object, seconds: float = 30.0) -> None:
    """Wait for a callable to become true; TimeoutError if it doesn't."""
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the kernel sends no event for what is waited for
            await asyncio.sleep(0.01)
