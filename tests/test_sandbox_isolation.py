"""What a bubblewrap room consists of, beside the attacks on it that test_sandbox_attacks.py makes."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import rooms

from pace_agent.sandbox import Outcome, SandboxSpec
from pace_agent.sandbox import bwrap as bwrap_module
from pace_agent.sandbox.provider import RoomProvider
from pace_agent.sandbox.session import RoomSession

pytestmark = rooms.needs_namespaces


@pytest.fixture
async def provider() -> AsyncIterator[RoomProvider]:
    async with RoomProvider(bwrap_module.backend()) as opened:
        yield opened


@pytest.fixture
async def session(provider: RoomProvider) -> RoomSession:
    return await provider.open()


async def said(session: RoomSession, code: str) -> str:
    result = await session.run_python(code, timeout=60)
    assert result.outcome is Outcome.OK, result
    return result.stdout.strip()


TRY = """
def attempt(what):
    try:
        what()
    except OSError as error:
        import errno
        return errno.errorcode[error.errno]
    return "allowed"
"""


# -- files


async def test_host_files_are_not_there(session: RoomSession, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("for us only")
    secret.chmod(0o644)
    names = await said(session, "import os\nfor name in os.listdir('/'): print(name)")
    system = {"bin", "sbin", "lib", "lib32", "lib64"}
    assert set(names.split()) - system == {".pace", "box", "dev", "etc", "proc", "tmp", "usr"}
    assert await said(session, f"{TRY}print(attempt(lambda: os.listdir('/proc/1/root')))") == "EACCES"
    assert await said(session, "print(sorted(set(os.listdir('/etc')) - {'alternatives', 'ld.so.cache'}))") == (
        "['group', 'hosts', 'passwd']"
    )
    for path in (str(secret), __file__, "/etc/shadow", "/root", "/home", "/sys", "/run", "/var"):
        assert await said(session, f"{TRY}print(attempt(lambda: os.stat({path!r})))") == "ENOENT", path
    assert await said(session, "print(os.listdir('/tmp'), os.listdir('/box'))") == "[] []"


async def test_nothing_outside_the_three_folders_can_be_written(session: RoomSession) -> None:
    code = TRY + "\nimport os\nfor path in {!r}: print(path, attempt(lambda: open(path, 'w')))"
    refused = ["/usr/x", "/x", "/etc/passwd", "/dev/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger",
               "/.pace/agent.pyc", "/proc/sys/vm/drop_caches"]  # fmt: skip
    for line in (await said(session, code.format(refused))).splitlines():
        assert line.split()[1] in ("EROFS", "EACCES", "EPERM", "ENOENT"), line
    allowed = await said(session, code.format(["/box/x", "/tmp/x", "/dev/shm/x", "/dev/null"]))
    assert [line.split()[1] for line in allowed.splitlines()] == ["allowed"] * 4


# -- network


async def test_its_own_loopback_works(session: RoomSession) -> None:
    code = f"""{TRY}
import socket
server = socket.create_server(("127.0.0.1", 0))
print(attempt(lambda: socket.create_connection(server.getsockname(), timeout=5)))
"""
    assert await said(session, code) == "allowed"
    assert "gaierror" in (await session.run_python("socket.getaddrinfo('example.org', 80)")).stderr


# -- identity


async def test_the_environment_and_the_command_line_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACE_SECRET", "hunter2-in-the-environment")
    async with RoomProvider(bwrap_module.backend()) as provider:
        session = await provider.open()
        assert "PACE_SECRET" not in (await said(session, "import os; print(sorted(os.environ))"))
        assert "hunter2" not in (await session.exec(["env"])).stdout
        assert "/site-packages" not in (await said(session, "print(open('/proc/1/cmdline').read())"))


async def test_no_privileges_inside_or_outside(session: RoomSession) -> None:
    status = await said(session, "print(open('/proc/self/status').read())")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert fields["Uid"].split() == ["1000"] * 4
    mark = rooms.mark()
    await session.exec(["sh", "-c", f"exec setsid sleep {mark} > /dev/null 2>&1 & sleep 0.5"])
    await rooms.until(lambda: len(rooms.sleepers(mark)) == 1)
    (pid,) = rooms.sleepers(mark)
    outside = status_fields(pid)
    expected = bwrap_module.NOBODY if os.geteuid() == 0 else os.geteuid()
    assert outside["Uid"].split() == [str(expected)] * 4
    assert outside["Groups"].split() in ([], [str(expected)], [str(g) for g in os.getgroups()])


def status_fields(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


# -- exhaustion


async def test_a_fork_bomb_is_contained(provider: RoomProvider) -> None:
    session = await provider.open(SandboxSpec(processes=40))
    counted = await session.run_python(
        "import os, time\nn = 0\ntry:\n    while n < 1000:\n        if os.fork() == 0:\n"
        "            time.sleep(600)\n        n += 1\nexcept BlockingIOError:\n    print(n)"
    )
    assert 20 < int(counted.stdout) < 40
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    for _ in range(2):
        result = await session.run_python(bomb, timeout=0.5)
        assert result.outcome is Outcome.TIMEOUT
    shell = await session.exec(["sh", "-c", "b() { b | b & }; b; sleep 600"], timeout=0.5)
    assert shell.outcome in (Outcome.TIMEOUT, Outcome.NONZERO)
    await session.reset()
    assert await said(session, "print(6 * 7)") == "42"
    assert len((await session.exec(["ps", "ax"])).stdout.splitlines()) < 8


# -- interpreters


@pytest.mark.parametrize("packages", [False, True])
async def test_the_running_interpreter_can_be_the_rooms(packages: bool) -> None:
    """Also where it lives in a closed home that the unprivileged user can't enter."""
    backend = bwrap_module.backend(interpreter=bwrap_module.running_interpreter(packages=packages))
    async with RoomProvider(backend) as provider:
        session = await provider.open()
        version = await said(session, "import sys, ssl, sqlite3; print(sys.version)")
        assert version == __import__("sys").version
        found = await session.run_python("import numpy; print(numpy.arange(3).sum())")
        assert (found.stdout == "3\n") is packages or not packages


async def test_covering_a_closed_home_shows_nothing_else_of_it() -> None:
    backend = bwrap_module.backend(interpreter=bwrap_module.running_interpreter())
    async with RoomProvider(backend) as provider:
        session = await provider.open()
        for folder in backend.interpreter.folders:
            code = f"""
import os
folder = {folder!r}
while folder != "/":
    folder, kept = os.path.split(folder)
    if folder != "/":
        print(os.listdir(folder) == [kept])
"""
            assert set((await said(session, code)).split()) <= {"True"}


async def test_many_rooms_do_not_share_the_bound_on_processes(provider: RoomProvider) -> None:
    """Twelve rooms with twenty processes each, under a bound of forty that would be passed if it were one."""
    sessions = await asyncio.gather(*(provider.open(SandboxSpec(processes=40)) for _ in range(12)))
    code = "import subprocess; held = [subprocess.Popen(['sleep', '600']) for _ in range(20)]"
    results = await asyncio.gather(*(session.run_python(code, timeout=60) for session in sessions))
    assert {result.outcome for result in results} == {Outcome.OK}
