"""The real routers, for tests: those that are installed beside SGLang."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_sglang import sglang_python

from pace_agent.engine.sglang.serving.router import Router, RouterKind, start_router
from pace_agent.errors import UserError


@contextmanager
def real_router(kind: RouterKind, logs: Path) -> Iterator[Router]:
    """A router without workers. Skips the test where it is not installed."""
    try:
        made = start_router(kind, logs, python=sglang_python())
    except UserError as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.close()
