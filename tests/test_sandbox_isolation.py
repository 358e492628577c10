"""What code in a bubblewrap room can't do, tried for real."""

import asyncio
import os
import platform
import socket
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
    assert await said(session, "print(sorted(os.listdir('/')) == sorted(os.listdir('/proc/1/root')))") == "True"
    assert await said(session, "print(sorted(set(os.listdir('/etc')) - {'alternatives', 'ld.so.cache'}))") == (
        "['group', 'hosts', 'passwd']"
    )
    for path in (str(secret), __file__, "/etc/shadow", "/root", "/home", "/sys", "/run", "/var", "/proc/1/root/home"):
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


async def test_disks_are_small(provider: RoomProvider) -> None:
    session = await provider.open(SandboxSpec(disk=1 << 20))
    for folder in ("/box", "/tmp", "/dev/shm"):
        code = f"import os\nfor n in range(3): open(f'{folder}/{{n}}', 'wb').write(b'x' * 500_000)"
        result = await session.run_python(code)
        assert result.outcome is Outcome.NONZERO
        assert "No space left" in result.stderr
    one = await session.run_python("open('/dev/shm/../../tmp/big', 'wb').write(b'x' * 2_000_000)")
    assert one.outcome is Outcome.NONZERO


# -- network


async def test_the_network_is_unreachable(session: RoomSession) -> None:
    code = TRY + "\nimport socket\nprint(attempt(lambda: socket.create_connection(('1.1.1.1', 80), timeout=5)))"
    assert await said(session, code) == "ENETUNREACH"
    assert "gaierror" in (await session.run_python("socket.getaddrinfo('example.org', 80)")).stderr


async def test_the_hosts_own_sockets_are_unreachable(session: RoomSession) -> None:
    name = f"\0pace-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        port = tcp.getsockname()[1]
        code = f"""{TRY}
import socket
print(attempt(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=5)))
print(attempt(lambda: socket.socket(socket.AF_UNIX).connect({name!r})))
"""
        assert (await said(session, code)).split() == ["ECONNREFUSED", "ECONNREFUSED"]


async def test_its_own_loopback_works_and_other_families_do_not_exist(session: RoomSession) -> None:
    code = f"""{TRY}
import socket
server = socket.create_server(("127.0.0.1", 0))
print(attempt(lambda: socket.create_connection(server.getsockname(), timeout=5)))
for family in (socket.AF_NETLINK, socket.AF_PACKET, socket.AF_ALG, socket.AF_VSOCK, 44):
    print(attempt(lambda: socket.socket(family, socket.SOCK_RAW)))
"""
    assert (await said(session, code)).split() == ["allowed", *["EAFNOSUPPORT"] * 5]


# -- identity


async def test_no_environment_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACE_SECRET", "hunter2-in-the-environment")
    async with RoomProvider(bwrap_module.backend()) as provider:
        session = await provider.open()
        code = """
import glob, os
print(sorted(os.environ))
print(repr(open("/proc/1/environ").read()))
print([path for path in glob.glob("/proc/*/environ") if "hunter2" in open(path).read()])
print("/site-packages" in open("/proc/1/cmdline").read())
"""
        lines = (await said(session, code)).splitlines()
        assert lines[1:] == ["''", "[]", "False"]
        assert "PACE_SECRET" not in lines[0]
        assert "hunter2" not in (await session.exec(["env"])).stdout


async def test_no_privileges_inside_or_outside(session: RoomSession) -> None:
    status = await said(session, "print(open('/proc/self/status').read())")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert fields["Uid"].split() == ["1000"] * 4
    mark = rooms.mark()
    await session.exec(["sh", "-c", f"sleep {mark} &"])
    (pid,) = rooms.sleepers(mark)
    outside = status_fields(pid)
    expected = bwrap_module.NOBODY if os.geteuid() == 0 else os.geteuid()
    assert outside["Uid"].split() == [str(expected)] * 4
    assert outside["Groups"].split() in ([], [str(expected)], [str(g) for g in os.getgroups()])


def status_fields(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


async def test_the_hosts_processes_are_not_to_be_seen(session: RoomSession) -> None:
    assert await said(session, f"{TRY}import os\nprint(attempt(lambda: os.kill({os.getpid()}, 0)))") == "ESRCH"
    names = await said(session, "print([p for p in os.listdir('/proc') if p.isdigit()])")
    assert len(names.split(",")) <= 4


async def test_descriptors_of_the_host_do_not_come_along(tmp_path: Path) -> None:
    ours = os.open(tmp_path / "open-file", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(ours, True)
    async with RoomProvider(bwrap_module.backend()) as provider:
        session = await provider.open()
        links = await said(
            session,
            "import os\nfor pid in ('1', '2', 'self'):\n    for fd in os.listdir(f'/proc/{pid}/fd'):\n"
            "        try: print(os.readlink(f'/proc/{pid}/fd/{fd}'))\n        except OSError: pass",
        )
    os.close(ours)
    kinds = {link.split(":")[0] for link in links.splitlines()}
    assert kinds <= {"/dev/null", "socket", "pipe", "anon_inode"}, links


# -- system calls

CALLS = {  # by name: the numbers for x86-64 and aarch64, arguments, what must come back
    "ptrace": (101, 117, (0, 0, 0, 0), "EPERM"),
    "process_vm_writev": (311, 271, (1, 0, 0, 0, 0, 0), "EPERM"),
    "memfd_create": (319, 279, (b"x", 0), "ENOSYS"),
    "shmget": (29, 194, (0, 4096, 0o1600), "EPERM"),
    "io_uring_setup": (425, 425, (1, 0), "ENOSYS"),
    "keyctl": (250, 219, (0, 0), "EPERM"),
    "bpf": (321, 280, (0, 0, 0), "EPERM"),
    "userfaultfd": (323, 282, (0,), "EPERM"),
    "perf_event_open": (298, 241, (0, 0, -1, -1, 0), "EPERM"),
    "mount": (165, 40, (b"none", b"/box", b"tmpfs", 0, 0), "EPERM"),
    "umount2": (166, 39, (b"/tmp", 0), "EPERM"),
    "fsopen": (430, 430, (b"tmpfs", 0), "EPERM"),
    "unshare user": (272, 97, (0x10000000,), "EPERM"),
    "clone user": (56, 220, (0x10000000 | 17, 0, 0, 0, 0), "EPERM"),
    "clone3": (435, 435, (0, 0), "ENOSYS"),
    "setns": (308, 268, (0, 0), "EPERM"),
    "pidfd_getfd": (438, 438, (0, 0, 0), "EPERM"),
    "open_by_handle_at": (304, 265, (0, 0, 0), "EPERM"),
    "a call of tomorrow": (500, 500, (), "ENOSYS"),
}


async def test_dangerous_system_calls_are_refused(session: RoomSession) -> None:
    column = 1 if platform.machine() in ("aarch64", "arm64") else 0
    calls = {name: (row[column], row[2]) for name, row in CALLS.items()}
    code = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, (number, arguments) in {calls!r}.items():
    back = libc.syscall(number, *arguments)
    print(f"{{name}}={{errno.errorcode.get(ctypes.get_errno()) if back == -1 else back}}")
"""
    answers = dict(line.split("=") for line in (await said(session, code)).splitlines())
    assert answers == {name: row[3] for name, row in CALLS.items()}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 has two more interfaces")
@pytest.mark.parametrize(
    "code",
    [
        "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39)",
        # int 0x80: getpid by the 32-bit interface
        "import ctypes, mmap; page = mmap.mmap(-1, 4096, prot=7); page.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()",
    ],
    ids=["x32", "i386"],
)
async def test_other_interfaces_are_killed(session: RoomSession, code: str) -> None:
    result = await session.run_python(code)
    assert (result.outcome, result.exit_code) == (Outcome.KILLED, -31)


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


async def test_descriptors_are_bounded(session: RoomSession) -> None:
    result = await session.run_python("held = [open('/dev/null') for _ in range(1000)]")
    assert "Too many open files" in result.stderr


async def test_limits_can_not_be_raised(session: RoomSession) -> None:
    code = """
import resource
for name in ("NPROC", "AS", "DATA", "FSIZE", "NOFILE", "CPU"):
    kind = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(kind)
    assert hard != resource.RLIM_INFINITY, name
    try:
        resource.setrlimit(kind, (hard + 1, hard + 1))
        print("raised", name)
    except (ValueError, PermissionError):
        pass
"""
    assert await said(session, code) == ""


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
