"""The bound on memory over a whole room: the watch over real processes, and control groups of version 2."""

import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import rooms

from pace_agent.sandbox import Outcome, SandboxSpec
from pace_agent.sandbox import bwrap as bwrap_module
from pace_agent.sandbox.launcher import cgroups, memory
from pace_agent.sandbox.launcher.cgroups import Cgroups
from pace_agent.sandbox.launcher.memory import Watch
from pace_agent.sandbox.provider import RoomProvider

MEGABYTE = 1 << 20

# -- the watch


@contextmanager
def program(code: str, answers: int) -> Iterator[tuple[int, list[int]]]:
    """A process that runs Python code, and the numbers that it prints, the smallest first. It ends with its group."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as root:
        try:
            assert root.stdout is not None
            yield root.pid, sorted(int(root.stdout.readline()) for _ in range(answers))
        finally:
            os.killpg(root.pid, signal.SIGKILL)


@contextmanager
def tree(*megabytes: int, first: str = "") -> Iterator[tuple[int, list[int]]]:
    """A process and its children, which hold so much each: their ids. `first` is what each child does at first."""
    code = f"""
import os, sys, time
for size in {megabytes!r}:
    pid = os.fork()
    if pid == 0:
        {first or "pass"}
        held = bytearray(b"x") * (size << 20)
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(600)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(600)
"""
    with program(code, len(megabytes)) as (root, children):
        yield root, children


def lives(pid: int) -> bool:
    try:
        return memory.stat(pid)[0] not in "ZX"
    except OSError:
        return False


def look(watch: Watch) -> None:
    watch.look(watch.due)


async def test_the_largest_goes_and_the_rest_stays() -> None:
    with tree(20, 120, 60) as (root, (small, large, middle)):
        watch = Watch(root, 150 * MEGABYTE)
        look(watch)
        await rooms.until(lambda: not lives(large))
        assert watch.kills == 1
        look(watch)
        assert (watch.kills, lives(small), lives(middle), lives(root)) == (1, True, True, True)


async def test_several_that_keep_to_the_limit_alone_do_not_together() -> None:
    with tree(50, 50, 50, 50) as (root, children):
        watch = Watch(root, 140 * MEGABYTE)
        look(watch)
        await rooms.until(lambda: sum(map(lives, children)) == 2)
        assert watch.kills == 2


async def test_a_process_that_hides_its_memory_is_counted() -> None:
    with tree(100, first="__import__('ctypes').CDLL(None).prctl(4, 0, 0, 0, 0)") as (root, (hidden,)):
        watch = Watch(root, 50 * MEGABYTE)
        look(watch)
        await rooms.until(lambda: not lives(hidden))
        assert watch.kills == 1


async def test_pages_that_are_shared_are_counted_once() -> None:
    code = """
import os, time
if os.fork() == 0:
    held = bytearray(b"x") * (100 << 20)
    for _ in range(3):
        if os.fork() == 0:
            os.write(1, b"%d\\n" % os.getpid())
            break
time.sleep(600)
"""
    with program(code, 3) as (root, _):
        assert sum(map(memory.resident, memory.below(root))) > 350 * MEGABYTE
        watch = Watch(root, 300 * MEGABYTE)
        look(watch)
        assert watch.kills == 0


def test_threads_that_end_meanwhile_hide_no_children() -> None:
    code = """
import os, random, threading, time
for _ in range(400):
    threading.Thread(target=time.sleep, args=(random.uniform(0, 2),)).start()
def keep():
    if os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)
threading.Thread(target=keep).start()
"""
    with program(code, 1) as (root, (child,)):
        seen = []
        while len(os.listdir(f"/proc/{root}/task")) > 20:
            seen.append(child in memory.below(root))
        assert len(seen) > 10
        assert all(seen)


def test_nobody_else_is_killed() -> None:
    with tree(1) as (root, (child,)), tree(1) as (other_root, (stranger,)):
        assert not memory.kill(stranger, memory.started(stranger), root), "of another tree"
        assert not memory.kill(child, "1", root), "a later process with the same number"
        assert not memory.kill(root, memory.started(root), root), "the first one itself"
        assert all(map(lives, (child, stranger, root, other_root)))
        assert memory.kill(child, memory.started(child), root)
        assert not memory.kill(child, "1", root)


def test_a_process_that_ended_is_no_error() -> None:
    with subprocess.Popen(["true"]) as done:
        done.wait()
    assert memory.sizes([done.pid]) == []
    assert not memory.kill(done.pid, "1", os.getpid())
    watch = Watch(done.pid, MEGABYTE)
    look(watch)
    assert watch.kills == 0


def test_what_was_swapped_out_counts(tmp_path: Path) -> None:
    """From text, because a machine need not have a place to swap to."""
    text = tmp_path / "status"
    text.write_text("Name:\tpython\nVmRSS:\t    1000 kB\nRssAnon:\t  900 kB\nVmSwap:\t    24 kB\n")
    assert memory.summed(str(text), ("VmRSS:", "VmSwap:")) == 1 << 20
    assert memory.resident(os.getpid()) > MEGABYTE


def test_the_next_look_comes_sooner_the_less_is_left() -> None:
    with tree(40) as (root, _):
        near, far = Watch(root, 60 * MEGABYTE), Watch(root, 64 << 30)
        for watch in (near, far):
            look(watch)
        assert near.due < far.due
        before = near.kills, near.due
        near.look(near.due - 0.001)
        assert (near.kills, near.due) == before


@rooms.needs_namespaces
async def test_a_room_without_a_control_group_is_watched() -> None:
    """As root where control groups can be made, these hold it instead: then this shows the same of them."""
    spec = SandboxSpec(memory=128 << 20)
    async with RoomProvider(bwrap_module.backend(), spec=spec) as provider:
        session, other = await provider.open(), await provider.open()
        await other.run_python("held = bytearray(b'x') * (60 << 20)")
        result = await session.run_python(
            "import os, time\npids = []\nfor _ in range(4):\n    pid = os.fork()\n    if pid == 0:\n"
            "        held = bytearray(b'x') * (60 << 20)\n        time.sleep(1)\n        os._exit(0)\n"
            "    pids.append(pid)\nprint(sum(os.waitpid(pid, 0)[1] == 9 for pid in pids) > 0)"
        )
        assert (result.outcome, result.stdout) == (Outcome.OK, "True\n")
        alone = await session.run_python(
            "import mmap\nheld = []\nfor _ in range(4):\n    m = mmap.mmap(-1, 60 << 20)\n    held.append(m)\n"
            "    for at in range(0, len(m), 4096): m[at] = 1\nimport time; time.sleep(9)"
        )
        assert (alone.outcome, alone.state_lost) == (Outcome.OOM, True)
        if os.geteuid() != 0:
            assert not alone.memory_enforced
        assert (await session.run_python("6 * 7")).stdout == "42\n"
        assert (await other.run_python("len(held) >> 20")).stdout == "60\n"


# -- control groups of version 2


@pytest.fixture
def make_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a folder tree that behaves as cgroupfs in what `Cgroups` does with it.

    A new group has its files, removing it removes them, and only controllers that the parent has can be handed on. What
    this does not show: that a kernel keeps to the limits, that a process may be moved, that a group with one stays.
    """
    write = cgroups.write

    def furnish(folder: str) -> None:
        for name, text in (("memory.max", "max"), ("memory.swap.max", "max"), ("pids.max", "max"),
                           ("memory.events", "low 0\noom 0\noom_kill 0\noom_group_kill 0\n"),
                           ("cgroup.subtree_control", ""), ("cgroup.procs", "")):  # fmt: skip
            Path(folder, name).write_text(text)

    def mkdir(path: str) -> None:
        os.mkdir(path)
        furnish(path)

    def remove(path: str) -> None:
        if os.path.isdir(path):
            for entry in os.scandir(path):
                if entry.is_file():
                    os.unlink(entry)
        os.rmdir(path)

    def checked_write(path: str, text: str) -> None:
        folder, name = os.path.split(path)
        if name == "cgroup.subtree_control":
            above = Path(folder).parent / name
            for word in text.split():
                if word.removeprefix("+") not in above.read_text().split():
                    raise FileNotFoundError(2, "No such file or directory", path)
            text = " ".join([Path(path).read_text(), *(word.removeprefix("+") for word in text.split())])
        write(path, text)

    def build(controllers: str, own: str = "/", below: dict[str, str] | None = None) -> Path:
        root = tmp_path / "cgroup"
        for path, text in {"": controllers, **(below or {})}.items():
            (root / path).mkdir(parents=True, exist_ok=True)
            furnish(str(root / path))
            (root / path / "cgroup.subtree_control").write_text(text)
        (tmp_path / "membership").write_text(f"0::{own}\n")
        return root

    monkeypatch.setattr(cgroups, "os", types.SimpleNamespace(**{**vars(os), "mkdir": mkdir, "rmdir": remove}))
    monkeypatch.setattr(cgroups, "write", checked_write)
    return build


def test_version_2_limits_a_room_and_takes_its_group_away(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    root = make_tree("cpu memory pids")
    made = Cgroups(str(root), str(tmp_path / "membership"))
    base = root / f"pace-agent-{os.getpid()}"
    assert (made.version, made.bases) == (2, [str(base)])
    assert sorted((base / "cgroup.subtree_control").read_text().split()) == ["memory", "pids"]
    (folder,) = made.create("7", 1 << 28, 68)
    read = {name: Path(folder, name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")}
    assert read == {"memory.max": str(1 << 28), "memory.swap.max": "0", "pids.max": "68"}
    assert made.oom_kills([folder]) == 0
    Path(folder, "memory.events").write_text("low 0\noom 5\noom_kill 3\noom_group_kill 1\n")
    assert made.oom_kills([folder]) == 3
    assert Cgroups.remove([folder])
    made.close()
    assert not base.exists()


def test_version_2_without_a_bound_on_processes_still_bounds_memory(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    made = Cgroups(str(make_tree("memory")), str(tmp_path / "membership"))
    assert made.version == 2
    assert made.create("7", 1 << 28, 68) != []


def test_version_2_beside_our_own_group_where_the_root_hands_nothing_on(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    own = "/user.slice/app.slice/terminal.scope"
    root = make_tree("", own, {"user.slice/app.slice": "memory pids", own.lstrip("/"): ""})
    made = Cgroups(str(root), str(tmp_path / "membership"))
    assert made.bases == [str(root / "user.slice/app.slice" / f"pace-agent-{os.getpid()}")]


def test_no_memory_controller_is_no_control_group(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    made = Cgroups(str(make_tree("cpu pids")), str(tmp_path / "membership"))
    assert (made.version, made.bases, made.create("7", 1 << 28, 68)) == (0, [], [])
    assert made.oom_kills([]) == 0


def test_a_limit_that_does_not_hold_is_no_limit(
    make_tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Cgroups(str(make_tree("memory pids")), str(tmp_path / "membership"))
    monkeypatch.setattr(cgroups, "read", lambda path: "max\n")
    assert made.create("7", 1 << 28, 68) == []
    assert list(Path(made.bases[0]).glob("*/")) == []


def test_what_a_killed_launcher_left_is_taken_away(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    left, alive = f"pace-agent-{dead.pid}", f"pace-agent-{os.getppid()}"
    root = make_tree("memory pids", "/", {left: "memory pids", f"{left}/3": "", alive: "memory pids", f"{alive}/3": ""})
    Cgroups(str(root), str(tmp_path / "membership"))
    assert not (root / left).exists()
    assert (root / alive / "3").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make control groups here")
def test_a_real_hierarchy_without_memory_is_not_taken() -> None:
    mounted = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    real = next((words[1] for words in mounted if words[2] == "cgroup2"), None)
    if real is None or "memory" in Path(real, "cgroup.subtree_control").read_text().split():
        pytest.skip("no control groups of version 2 without memory")
    before = set(os.listdir(real))
    assert Cgroups(real, "/proc/self/cgroup").version == 0
    assert set(os.listdir(real)) == before
