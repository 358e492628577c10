"""Executions that share nothing, on every backend: by zygotes with bubblewrap, by a session each elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import rooms

from pace_agent.errors import SandboxError
from pace_agent.sandbox import Outcome, SandboxSpec, bwrap
from pace_agent.sandbox.provider import RoomProvider

pytestmark = rooms.needs_namespaces


@pytest.fixture(params=rooms.EVERY)
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[RoomProvider]:
    async with RoomProvider(rooms.backend(request.param)) as opened:
        yield opened


@pytest.fixture
async def zygotes() -> AsyncIterator[RoomProvider]:
    async with RoomProvider(bwrap.backend(interpreter=bwrap.running_interpreter(packages=True))) as opened:
        yield opened


async def test_results_and_standard_input(provider: RoomProvider) -> None:
    cases = {
        "6 * 7": (Outcome.OK, 0, "42\n"),
        "import sys; print(input()[::-1]); print(sys.stdin.read())": (Outcome.OK, 0, "cba\nrest\n\n"),
        "import sys; print('a'); sys.exit(3)": (Outcome.NONZERO, 3, "a\n"),
        "import os; os._exit(5)": (Outcome.NONZERO, 5, ""),
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": (Outcome.KILLED, -9, ""),
        "import ctypes; ctypes.string_at(0)": (Outcome.KILLED, -11, ""),
        "import os; os.write(1, b'a\\xffb'); None": (Outcome.OK, 0, "a\ufffdb"),
    }
    for code, expected in cases.items():
        result = await provider.run_fresh(code, stdin=b"abc\nrest\n", timeout=60)
        assert (result.outcome, result.exit_code, result.stdout) == expected, code
    failed = await provider.run_fresh("1 / 0")
    assert failed.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert failed.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "EOFError" in (await provider.run_fresh("input()")).stderr
    big = await provider.run_fresh("import sys; print(len(sys.stdin.buffer.read()))", stdin=b"x" * 300_000)
    assert big.stdout == "300000\n"


async def test_nothing_is_shared(provider: RoomProvider) -> None:
    left = """
import builtins, os, subprocess, sys
builtins.left = sys.left = 1
open("left", "w").close()
subprocess.Popen(["sleep", "600"], start_new_session=True)
os.environ["LEFT"] = "1"
"""
    found = """
import builtins, glob, os, sys
print(hasattr(builtins, "left"), hasattr(sys, "left"), "LEFT" in os.environ, os.listdir("."))
"""
    for _ in range(2):
        assert (await provider.run_fresh(left)).outcome is Outcome.OK
        assert (await provider.run_fresh(found)).stdout == "False False False []\n"


async def test_each_has_namespaces_and_folders_of_its_own() -> None:
    code = """
import os, subprocess
for folder in ("/box", "/tmp", "/dev/shm"):
    print(os.listdir(folder))
    open(f"{folder}/left", "w").close()
subprocess.Popen(["sleep", "600"], start_new_session=True)
print([name for name in sorted(os.listdir("/proc")) if name.isdigit()])
print(os.getuid(), os.getgid(), os.uname().nodename)
"""
    async with RoomProvider(bwrap.backend()) as provider:
        for _ in range(3):
            said = (await provider.run_fresh(code)).stdout.splitlines()
            assert said == ["[]", "[]", "[]", "['1', '2', '3']", "1000 1000 sandbox"]


async def test_a_deadline_and_a_flood_end_everything(provider: RoomProvider) -> None:
    mark = rooms.mark()
    started = f"import subprocess, sys\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)\n"
    stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    for code in ("while True: pass", stubborn + "while True: pass"):
        result = await provider.run_fresh(started + code, timeout=0.5)
        assert result.outcome is Outcome.TIMEOUT
        await rooms.until(lambda: not rooms.sleepers(mark))
    flood = await provider.run_fresh(started + "while True: print('x' * 1000)", timeout=60)
    assert (flood.outcome, flood.truncated) == (Outcome.OUTPUT_LIMIT, True)
    await rooms.until(lambda: not rooms.sleepers(mark))
    assert (await provider.run_fresh("6 * 7")).stdout == "42\n"


async def test_what_the_code_leaves_running_is_not_waited_for(provider: RoomProvider) -> None:
    mark = rooms.mark()
    code = f"import subprocess; subprocess.Popen(['sleep', '{mark}']); print('done')"
    assert (await provider.run_fresh(code, timeout=60)).stdout == "done\n"
    await rooms.until(lambda: not rooms.sleepers(mark))


async def test_memory_processes_and_files_are_bounded(zygotes: RoomProvider) -> None:
    spec = SandboxSpec(memory=256 << 20, processes=20, files=100)
    alone = await zygotes.run_fresh("x = bytearray(1 << 30)", spec=spec)
    assert alone.outcome is Outcome.OOM
    shared = (
        "import mmap, time\nheld = []\nfor _ in range(6):\n    m = mmap.mmap(-1, 60 << 20)\n    held.append(m)\n"
        "    for at in range(0, len(m), 4096): m[at] = 1\ntime.sleep(9)"
    )
    together = await zygotes.run_fresh(shared, spec=spec)
    assert together.outcome in (Outcome.OOM, Outcome.KILLED)
    forked = (
        "import os, time\nn = 0\ntry:\n    while n < 1000:\n        if os.fork() == 0: time.sleep(60)\n        n += 1\n"
        "except BlockingIOError: print(n)"
    )
    assert 10 < int((await zygotes.run_fresh(forked, spec=spec)).stdout) < 20
    files = "n = 0\ntry:\n    while n < 1000: open(str(n), 'w').close(); n += 1\nexcept OSError: print(n)"
    assert 80 < int((await zygotes.run_fresh(files, spec=spec)).stdout) < 100
    assert (await zygotes.run_fresh("6 * 7", spec=spec)).stdout == "42\n"


async def test_modules_are_loaded_before(zygotes: RoomProvider) -> None:
    code = "import sys; print('numpy' in sys.modules)"
    assert (await zygotes.run_fresh(code)).stdout == "False\n"
    spec = SandboxSpec(modules=("numpy",))
    assert (await zygotes.run_fresh(code, spec=spec)).stdout == "True\n"
    assert (await zygotes.run_fresh("import numpy; print(numpy.arange(3).sum())", spec=spec)).stdout == "3\n"
    with pytest.raises(SandboxError, match=r"can't load no_such_module with .*ModuleNotFoundError"):
        await zygotes.run_fresh("1", spec=SandboxSpec(modules=("no_such_module",)))
    session = await zygotes.open(spec)
    assert (await session.run_python(code)).stdout == "True\n"


async def test_a_zygote_that_dies_is_replaced(zygotes: RoomProvider) -> None:
    assert (await zygotes.run_fresh("6 * 7")).stdout == "42\n"
    mark = rooms.mark()
    running = asyncio.ensure_future(
        zygotes.run_fresh(f"import os; os.execvp('sleep', ['sleep', '{mark}'])", timeout=60)
    )
    await rooms.until(lambda: rooms.sleepers(mark))
    for zygote in zygotes._zygotes._all:
        assert zygote._room is not None
        zygote._room.process.kill()
    assert (await running).outcome is Outcome.SANDBOX_DIED
    await rooms.until(lambda: not rooms.sleepers(mark))
    assert (await zygotes.run_fresh("6 * 7")).stdout == "42\n"


async def test_cancelling_leaves_no_one(provider: RoomProvider) -> None:
    mark = rooms.mark()
    running = asyncio.ensure_future(
        provider.run_fresh(f"import subprocess; subprocess.run(['sleep', '{mark}'])", timeout=60)
    )
    await rooms.until(lambda: rooms.sleepers(mark))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await rooms.until(lambda: not rooms.sleepers(mark))
    assert (await provider.run_fresh("6 * 7")).stdout == "42\n"


async def test_sixty_four_at_once_are_apart(zygotes: RoomProvider) -> None:
    code = "n = int(input())\nopen('n', 'w').write(str(n))\nimport time; time.sleep(0.01)\nprint(n, open('n').read())"
    results = await asyncio.gather(*(zygotes.run_fresh(code, stdin=str(n).encode()) for n in range(64)))
    assert [result.stdout for result in results] == [f"{n} {n}\n" for n in range(64)]


async def test_other_limits_take_the_place_of_those_not_used(zygotes: RoomProvider) -> None:
    for captured in range(2000, 2000 + 8):
        result = await zygotes.run_fresh("print('x' * 9000)", spec=SandboxSpec(captured=captured))
        assert result.truncated
    assert len(zygotes._zygotes._all) == len(zygotes._zygotes._idle) <= 8
    assert zygotes.stats().calls_total == 8


async def test_closing_ends_the_zygotes() -> None:
    async with RoomProvider(bwrap.backend()) as provider:
        await provider.run_fresh("1")
    with pytest.raises(SandboxError, match="closed"):
        await provider.run_fresh("1")


async def test_an_interpreter_below_a_covered_folder_is_seen(tmp_path: Path) -> None:
    """Fresh executions cover /tmp with an empty folder; what the room shows below it stays."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "below_tmp.py").write_text("answer = 42")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    found = bwrap.backend().interpreter
    kind = bwrap.backend(interpreter=bwrap.Interpreter(found.path, (*found.folders, str(tmp_path))))
    code = f"import sys; sys.path.append('{tmp_path}/site'); import below_tmp; print(below_tmp.answer)"
    async with RoomProvider(kind) as provider:
        for _ in range(2):
            assert (await provider.run_fresh(code)).stdout == "42\n"
        refused = await provider.run_fresh(f"open('{tmp_path}/site/new', 'w')")
        assert "Read-only file system" in refused.stderr
        session = await provider.open()
        assert (await session.run_python(code)).stdout == "42\n"
