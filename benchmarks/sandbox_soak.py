"""10,000 runs in sandboxes by a driver that is killed in the end: what is left of it?

    python benchmarks/sandbox_soak.py [--runs 10000] [--backend bwrap|docker|subprocess] [--user UID]

The driver (`sandbox_soak_driver.py`) is a process of its own: 16 tasks open sessions, use them for 8 to 24 runs and
close them; every fourth run or so is a `run_fresh`. A third of the runs go wrong on purpose: time-outs of 0.05 to 0.2 s
(busy code, code that ignores the interrupt, a child that sleeps), daemons with sessions of their own, fork bombs (not
with `subprocess`, which bounds no processes), floods of output, a kernel (and without walls a supervisor) that is
killed. Every result is checked. Then the driver starts 16 calls that would never end, and is killed with SIGKILL while
they run.

All that is counted is counted from outside, by this program. While everything is closed: descriptors and memory of
driver and launcher, processes and control groups of rooms, each against the same after a warm-up (memory: after a fifth
of the runs). After the kill: processes, temporary files, shared memory, control groups, containers, memory of the host.
Processes are found by the tree as it was before the kill and by their user: as root, rooms (and with `--user` the
driver) run as a user id that nobody else has here. Other work on the machine counts in the host's memory.

A last part kills driver and launcher at once. The kernel then ends every room; empty control groups have nobody who
could remove them, and stay until the next start of a provider, which is what the table shows.

Exit status 1 if a row fails. Last line, JSON: the figures of the rows.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cpu_clock import below, processes, stat_of
from sandbox_soak_driver import TASKS, Plan

DRIVER = Path(__file__).with_name("sandbox_soak_driver.py")
MOST_MB = {"driver": 4.0, "launcher": 2.0, "host": 256.0}
"""Growth that is no leak: what allocators keep."""
UNPRIVILEGED = 61_000


def kids(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def available_mb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1024


def identity(pid: int) -> tuple[int, str]:
    """Tells a process from a later one of the same number."""
    stat = stat_of(pid)
    return pid, stat[19] if stat else ""


def alive(pid: int) -> bool:
    stat = stat_of(pid)
    return bool(stat) and stat[0] not in "ZX"


def of_user(user: int | None) -> set[int]:
    found = set()
    for pid in processes() if user is not None else ():
        try:
            if os.stat(f"/proc/{pid}").st_uid == user or f"Uid:\t{user}\t" in Path(f"/proc/{pid}/status").read_text():
                found.add(pid)
        except OSError:
            continue
    return found


def temporary() -> set[str]:
    folders = {"/tmp", tempfile.gettempdir()}
    return {str(path) for folder in folders for path in Path(folder).glob("pace-agent-*")}


def shared_memory() -> set[str]:
    return {entry.path for entry in os.scandir("/dev/shm")}


def cgroups(launchers: set[int]) -> set[str]:
    names = {f"pace-agent-{pid}" for pid in launchers}
    return {
        os.path.join(folder, name)
        for folder, inside, _ in os.walk("/sys/fs/cgroup")
        for name in inside
        if name in names or os.path.basename(folder) in names
    }


def containers(backend: str, driver: int) -> list[str]:
    if backend != "docker":
        return []
    from pace_agent.sandbox.docker.daemon import connect
    from pace_agent.sandbox.docker.owner import KIND, OWNER

    client = connect()
    try:
        found = client.api.containers(all=True, filters={"label": KIND})
        return [each["Id"] for each in found if each["Labels"].get(OWNER, "").split(" ")[-2:-1] == [str(driver)]]
    finally:
        client.close()


@dataclass(slots=True)
class Seen:
    """What a driver has while everything is closed."""

    descriptors: int
    launcher_descriptors: int
    mb: float
    launcher_mb: float
    room_processes: int
    cgroups: int
    containers: int


class Driven:
    """A driver, looked at from outside."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.launchers: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, str(DRIVER), json.dumps(asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def until(self, where: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"at"'):
                said: dict[str, Any] = json.loads(line)
                if said["at"] != where:
                    raise SystemExit(f"the driver is at {said['at']}, not at {where}")
                self.launchers |= set(kids(self.pid))
                return said
        raise SystemExit(f"the driver ended before it was at {where}; what it said stands above")

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def look(self, like: Seen | None = None) -> Seen:
        """When closing is through: what `like` shows is waited for, 30 s at most."""
        give_up = time.monotonic() + 30
        while True:
            seen = self._look()
            same = like is not None and replace(seen, mb=0, launcher_mb=0) == replace(like, mb=0, launcher_mb=0)
            if same or time.monotonic() > give_up - (0 if like else 28):
                return seen
            time.sleep(0.2)

    def _look(self) -> Seen:
        launchers = kids(self.pid)
        return Seen(
            descriptors=len(os.listdir(f"/proc/{self.pid}/fd")),
            launcher_descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in launchers),
            mb=resident_mb(self.pid),
            launcher_mb=sum(map(resident_mb, launchers)),
            room_processes=len(below([self.pid])) - 1 - len(launchers),
            cgroups=len(cgroups(self.launchers)),
            containers=len(containers(self.plan.backend, self.pid)),
        )

    def kill(self, *, launchers: bool) -> set[tuple[int, str]]:
        """SIGKILL in the middle of calls; the processes there were, by tree and by user."""
        there = {identity(pid) for pid in below([self.pid]) | of_user(self.plan.room_user)}
        for pid in (self.pid, *(self.launchers if launchers else ())):
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        return there


@dataclass(slots=True)
class Table:
    failed: bool = False
    figures: dict[str, Any] = field(default_factory=dict)

    def row(self, name: str, before: Any, after: Any, held: bool | None, key: str, value: Any) -> None:
        verdict = "" if held is None else "PASS" if held else "FAIL"
        print(f"{name:<44} {before!s:>14} {after!s:>14}  {verdict}".rstrip(), flush=True)
        self.failed |= held is False
        self.figures[key] = value


def left_of(plan: Plan, driven: Driven, there: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Processes that were there and are still, and any of the user."""
    return {one for one in there if alive(one[0]) and identity(one[0]) == one} | {
        identity(pid) for pid in of_user(plan.room_user) if alive(pid)
    }


def wait_for(done: Callable[[], bool], seconds: float = 60.0) -> float:
    """Seconds that it took, at most these."""
    began = time.monotonic()
    while not done() and time.monotonic() - began < seconds:
        time.sleep(0.02)
    return time.monotonic() - began


def soak(plan: Plan, table: Table) -> None:
    mb, temp, shm = available_mb(), temporary(), shared_memory()
    began = time.monotonic()
    driven = Driven(plan)
    driven.until("warm")
    warm = driven.look()
    driven.go_on()
    driven.until("fifth")
    fifth = driven.look(warm)
    driven.go_on()
    said = driven.until("end")
    seconds = time.monotonic() - began
    end = driven.look(warm)
    driven.go_on()
    unexpected = sum(said["unexpected"].values())
    print(f"{'runs: ' + str(plan.runs) + f' in {seconds:.0f} s':<44} {'after warm-up':>14} {'at the end':>14}")
    table.row("unexpected results", "", unexpected, unexpected == 0, "unexpected", unexpected)
    for what, count in said["unexpected"].items():
        print(f"  {count} x {what!r}")
    for name in ("descriptors", "launcher_descriptors", "room_processes", "cgroups", "containers"):
        old, new = getattr(warm, name), getattr(end, name)
        table.row(name.replace("_", " "), old, new, old == new, name, new - old)
    for name, old_mb, new_mb in (
        ("driver", fifth.mb, end.mb),
        ("launcher", fifth.launcher_mb, end.launcher_mb),
    ):
        grown = new_mb - old_mb
        label = f"MB of the {name}, from a fifth of the runs on"
        table.row(label, f"{old_mb:.1f}", f"{new_mb:.1f}", grown <= MOST_MB[name], f"{name}_mb", round(grown, 1))

    failed = driven.until("going")["failed"]
    going = driven._look()
    there = driven.kill(launchers=False)
    took = wait_for(
        lambda: not (left_of(plan, driven, there) or cgroups(driven.launchers) or containers(plan.backend, driven.pid))
    )
    left = left_of(plan, driven, there)
    print(f"\n{f'after SIGKILL, all gone in {took:.2f} s':<44} {'before':>14} {'after':>14}")
    table.row("calls that ended before", "", len(failed), not failed, "ended_before", failed)
    table.row(
        "processes",
        len(there),
        len(left),
        not left and (len(there) > TASKS or going.containers > 0),
        "processes_left",
        len(left),
    )
    for pid, _ in sorted(left):
        print(f"  {pid} {stat_of(pid)[:3]} {Path(f'/proc/{pid}/cmdline').read_bytes()[:100]!r}")
    new_temp = temporary() - temp
    wait_for(lambda: not new_temp & temporary(), 10)  # other work on the machine has its own for a while
    new_temp &= temporary()
    table.row("temporary folders", len(temp), len(temp | new_temp), not new_temp, "temporary_left", len(new_temp))
    new_shm = shared_memory() - shm
    wait_for(lambda: not new_shm & shared_memory(), 10)
    new_shm &= shared_memory()
    table.row("shared memory files", len(shm), len(shm | new_shm), not new_shm, "shared_memory_left", len(new_shm))
    groups = cgroups(driven.launchers)
    table.row("control groups", going.cgroups, len(groups), not groups, "cgroups_left", len(groups))
    left_containers = containers(plan.backend, driven.pid)
    table.row("containers", going.containers, len(left_containers), not left_containers, "containers_left",
              len(left_containers))  # fmt: skip
    wait_for(lambda: mb - available_mb() <= MOST_MB["host"], 30)
    now = available_mb()
    table.row(
        "MB available on the host", round(mb), round(now), mb - now <= MOST_MB["host"], "host_mb", round(mb - now)
    )
    table.figures |= {"runs": plan.runs, "seconds": round(seconds), "gone_in_s": round(took, 2)}


def kill_both(plan: Plan, table: Table) -> None:
    """Driver and launcher die at once; then a provider starts and ends."""
    driven = Driven(replace(plan, runs=5))
    for where in ("warm", "fifth", "end"):
        driven.until(where)
        driven.go_on()
    driven.until("going")
    there = driven.kill(launchers=True)
    took = wait_for(lambda: not left_of(plan, driven, there))
    left, groups = left_of(plan, driven, there), cgroups(driven.launchers)
    print(f"\n{f'driver and launcher killed at once, {took:.2f} s':<44} {'before':>14} {'after':>14}")
    table.row("processes", len(there), len(left), not left, "processes_left_of_both", len(left))
    table.row("empty control groups until the next start", "", len(groups), None, "cgroups_until_next", len(groups))
    other = Driven(replace(plan, runs=5))
    other.until("warm")
    groups = cgroups(driven.launchers)
    table.row("control groups after the next start", "", len(groups), not groups, "cgroups_after_next", len(groups))
    other.kill(launchers=False)
    wait_for(lambda: not of_user(plan.room_user))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--backend", choices=("bwrap", "docker", "subprocess"), default="bwrap")
    parser.add_argument("--user", type=int, help="as root: the user id that the driver becomes")
    options = parser.parse_args()
    become = room_user = options.user
    if os.geteuid() == 0 and options.backend != "docker" and room_user is None:
        room_user = UNPRIVILEGED + os.getpid() % 4000
        become = room_user if options.backend == "subprocess" else None
    if of_user(room_user):
        raise SystemExit(f"user {room_user} has processes already; give another one with --user")
    mark = f"{random.randrange(10**6, 10**7)}.{random.randrange(10**6)}"
    plan = Plan(options.backend, options.runs, mark, room_user, become)
    who = f"as user {become}" if become is not None else f"as user {os.geteuid()}, rooms as {room_user}"
    print(f"{plan.backend}, {who}\n", flush=True)
    table = Table()
    soak(plan, table)
    if plan.backend != "docker":
        kill_both(plan, table)
    print(json.dumps(table.figures))
    sys.exit(table.failed)


if __name__ == "__main__":
    main()
