"""What a sandbox costs, against a bare Python process, other sandboxes and the tools of other packages.

    python benchmarks/sandbox.py [--repeats 30] [--peers VENV] [--docker-image NAME | --no-docker]

    python -m venv VENV && VENV/bin/pip install skyrl-gym "llm-sandbox[docker]" verifiers

Rows take turns in every repeat, so that other work on the machine hits all alike. A row shows the median of wall and
CPU milliseconds, the median of its ratios to the row that it is compared with in the same repeat, and what is demanded
of the wall ratio. CPU time is that of this program and of everything that it started, ended or not: from a control
group where one can be made, else from /proc, in steps of 10 ms. What a Docker daemon spends is added from /proc. Work
that the kernel puts off, such as taking down a network namespace, is in neither.

- `bare print`: `python -c print(1)` by the interpreter that rooms run (the system's), its output read to the end.
- `bwrap one-shot`: the same command as the only program of a fresh room, with the options of a session's room.
- `session start`: `open()` while no room is ready. `start, run, close`: a whole session with one run.
- `run in a session`: `run_python("print(1)")`.
- `fresh run`: `run_fresh("print(1)")`. `fresh run, numpy` finds numpy loaded, `bare numpy` loads it; for these two
  it is the interpreter that runs this program, with its packages.
- `docker exec`: the SDK's `exec_run` in a running container. `run in docker`: ours, with the same image.
- `32 sessions` and `32 bare`: milliseconds for each of many runs, 32 at once, each with its own output;
  `runs_at_32` turns the ratio around. `32 bare, one pipe`: the cheapest that Python can do, all output in one pipe.
- Peers, all with `print(1)`: llm-sandbox in an open session, by bubblewrap (a fresh room for each run, its files on the
  host) and by Docker; skyrl-gym's Python tool and verifiers' subprocess runtime, which contain nothing.
  `sandbox_peers.py` runs them in an environment of their own, since their pins and ours may clash.

Last line, JSON: the wall ratio of each row with a demand; null where it could not run, and the table says why.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cpu_clock import CpuClock

from pace_agent.errors import PaceError
from pace_agent.sandbox import ExecResult, SandboxSpec, Session, bwrap, open_provider
from pace_agent.sandbox.provider import RoomProvider

CODE = "print(1)"
NUMPY = "import numpy; print(numpy.arange(3).sum())"
AT_ONCE = 32
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Work = Callable[[], Awaitable[None] | None]


def nothing() -> None: ...


@dataclass(slots=True)
class Row:
    name: str
    work: Work
    after: Work = nothing
    """Not counted."""
    runs: int = 1
    """That `work` does."""
    against: str = "bare print"
    figure: str = ""
    demand: float = 0.0
    """Largest ratio; for `runs_at_32` the smallest of the ratio turned around."""
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


# ---- processes -------------------------------------------------------------------------------------------------------


def check_printed(printed: str | bytes, expected: str = "1") -> None:
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
    if text.strip() != expected:
        raise SystemExit(f"a row printed {text.strip()!r}, not {expected!r}")


def checked(result: ExecResult, expected: str = "1") -> None:
    if result.exit_code != 0:
        raise SystemExit(f"a run in a sandbox ended as {result.outcome}: {result.stderr.strip()}")
    check_printed(result.stdout, expected)


def process(argv: Sequence[str], expected: str = "1", **options: Any) -> Callable[[], None]:
    """A process from its start to its end, output read."""

    def work() -> None:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, **{"env": ENVIRONMENT, **options}) as started:
            assert started.stdout is not None
            printed = started.stdout.read()
        check_printed(printed, expected)

    return work


def bare_at_once(argv: Sequence[str], runs: int) -> Callable[[], Awaitable[None]]:
    """Always 32 processes, each with its own output read back, as asyncio does it."""

    async def one(slots: asyncio.Semaphore) -> None:
        async with slots:
            process = await asyncio.create_subprocess_exec(
                *argv, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            printed, _ = await process.communicate()
        check_printed(printed, "1")

    async def work() -> None:
        slots = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(one(slots) for _ in range(runs)))

    return work


def spawned_at_once(argv: Sequence[str], runs: int) -> Work:
    """Always 32 processes, the next one when one ends, spawned as cheaply as Python can: all write to one pipe."""

    def work() -> None:
        reader, writer = os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, writer, 1)]
        running: set[int] = set()
        for _ in range(runs):
            if len(running) == AT_ONCE:
                running.remove(os.waitpid(-1, 0)[0])
            running.add(os.posix_spawn(argv[0], argv, ENVIRONMENT, file_actions=actions))
        while running:
            running.remove(os.waitpid(-1, 0)[0])
        os.close(writer)
        with open(reader, "rb") as pipe:
            check_printed(pipe.read(), "\n".join(["1"] * runs))

    return work


def one_shot(backend: bwrap.Bwrap) -> Work:
    """A program in a fresh room without the agent: the room's options, contents of files and user."""
    plan = backend.plan(SandboxSpec(), fresh=False, makes_folders=False)
    words = backend.arguments(SandboxSpec(), fresh=False, makes_folders=False)
    fds = {}
    for number, data in plan.files.items():
        fds[str(number)] = fd = os.memfd_create("contents")
        os.write(fd, data)
    for at, word in enumerate(words[:-1]):
        if word in ("--ro-bind-data", "--seccomp"):
            words[at + 1] = str(fds[words[at + 1]])
    options = os.memfd_create("options")
    os.write(options, b"".join(word.encode() + b"\0" for word in words))
    held = (options, *fds.values())
    argv = [str(backend.binary), "--args", str(options), "--", backend.interpreter.path, "-c", CODE]
    user = {} if backend.user is None else {"user": backend.user, "group": backend.user, "extra_groups": ()}
    run = process(argv, pass_fds=held, env={}, **user)

    def work() -> None:
        for fd in held:
            os.lseek(fd, 0, os.SEEK_SET)
        run()

    return work


# ---- sessions --------------------------------------------------------------------------------------------------------


def runs_of(session: Session, count: int) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        for _ in range(count):
            checked(await session.run_python(CODE))

    return work


async def session_rows(stack: AsyncExitStack, bare: Sequence[str]) -> list[Row]:
    provider = await stack.enter_async_context(RoomProvider(bwrap.backend()))
    opened: list[Session] = []

    async def start() -> None:
        opened.append(await provider.open())

    async def close() -> None:
        await opened.pop().close()

    async def whole() -> None:
        await start()
        checked(await opened[-1].run_python(CODE))
        await close()

    async def fresh() -> None:
        checked(await provider.run_fresh(CODE))

    sessions = [await provider.open() for _ in range(AT_ONCE)]
    each = 50

    async def at_once() -> None:
        await asyncio.gather(*(runs_of(session, each)() for session in sessions))

    return [
        Row("session start", start, close, figure="session_start", demand=4),
        Row("start, run, close", whole),
        Row("run in a session", runs_of(await provider.open(), 100), runs=100, figure="session_run", demand=0.03),
        Row("fresh run", fresh, figure="zygote_print", demand=0.7),
        Row("32 bare", bare_at_once(bare, 64), runs=64),
        Row("32 bare, one pipe", spawned_at_once(bare, 64), runs=64, against="32 bare"),
        Row("32 sessions", at_once, runs=AT_ONCE * each, against="32 bare", figure="runs_at_32", demand=40),
    ]


async def numpy_rows(stack: AsyncExitStack) -> list[Row]:
    backend = bwrap.backend(interpreter=bwrap.running_interpreter(packages=True))
    provider = await stack.enter_async_context(RoomProvider(backend, spec=SandboxSpec(modules=("numpy",))))

    async def fresh() -> None:
        checked(await provider.run_fresh(NUMPY), "3")

    return [
        Row("bare numpy", process([sys.executable, "-c", NUMPY], "3")),
        Row("fresh run, numpy", fresh, against="bare numpy", figure="zygote_numpy", demand=0.1),
    ]


# ---- docker ----------------------------------------------------------------------------------------------------------


async def docker_rows(stack: AsyncExitStack, image: str | None) -> tuple[list[Row], str]:
    """The rows, and the image. PaceError where there is no daemon."""
    from pace_agent.sandbox.docker.daemon import connect
    from pace_agent.sandbox.docker.image import ready

    client = connect()
    stack.callback(client.close)
    image = ready(client, image)
    provider = await stack.enter_async_context(open_provider("docker", image=image))
    container = client.containers.run(
        image, ["sleep", "3600"], detach=True, network_mode="none", labels={"pace-benchmark": str(os.getpid())}
    )
    stack.callback(container.remove, force=True)

    def by_sdk() -> None:
        check_printed(container.exec_run(["python3", "-c", CODE]).output)

    return [
        Row("docker exec", by_sdk),
        Row(
            "run in docker",
            runs_of(await provider.open(), 50),
            runs=50,
            against="docker exec",
            figure="docker_run",
            demand=0.02,
        ),
    ], image


# ---- peers -----------------------------------------------------------------------------------------------------------


class Peers:
    """`sandbox_peers.py` in another environment, kept running so that its imports are paid once."""

    def __init__(self, venv: Path, image: str | None) -> None:
        python = venv / "bin" / "python"
        if not python.exists():
            raise SystemExit(f"{venv} is no virtual environment; {Path(__file__).name} says at its top how to make it")
        interpreter = bwrap.backend().interpreter.path
        setup = {"python": interpreter, "bwrap": str(bwrap.backend().binary), "image": image}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("sandbox_peers.py")), json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.names = [name for name, why in self._ask("names").items() if not why]
        self.missing = {name: why for name, why in self._ask("names").items() if why}

    def _ask(self, line: str) -> dict[str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith("{"):
                said: dict[str, str] = json.loads(answer)
                return said
        raise SystemExit(f"the peers ended without an answer to {line!r}; what they said stands above")

    def work(self, name: str) -> Work:
        def work() -> None:
            check_printed(self._ask(name)["printed"])

        return work

    def close(self) -> None:
        self._process.communicate()


# ---- the run ---------------------------------------------------------------------------------------------------------


async def finish(working: Awaitable[None] | None) -> None:
    if working is not None:
        await working


async def measure(rows: Sequence[Row], clock: CpuClock, repeats: int) -> None:
    """Each once to warm up, then in turns."""
    for repeat in range(repeats + 1):
        for row in rows:
            clock.start(daemon="docker" in row.name)
            wall = time.perf_counter()
            await finish(row.work())
            wall = (time.perf_counter() - wall) / row.runs
            cpu = clock.stop() / row.runs
            await finish(row.after())
            if repeat:
                row.wall.append(wall)
                row.cpu.append(cpu)


def show(rows: Sequence[Row], missing: dict[str, str]) -> dict[str, float | None]:
    by_name = {row.name: row for row in rows}
    figures: dict[str, float | None] = {}
    print(f"{'':<26} {'ms':>9} {'CPU ms':>9} {'ratio':>8} {'CPU ratio':>9}  {'to':<12} demand")
    for row in rows:
        other = by_name[row.against]
        wall, cpu = (
            median(a / b if b else 0.0 for a, b in zip(ours, theirs, strict=True))
            for ours, theirs in ((row.wall, other.wall), (row.cpu, other.cpu))
        )
        verdict = ""
        if row.figure == "runs_at_32":
            figures[row.figure] = figure = round(1 / wall, 1)
            held = figure >= row.demand
            verdict = f"{figure:.0f} times as many, at least {row.demand:g}: {'held' if held else 'MISSED'}"
        elif row.figure:
            figures[row.figure] = round(wall, 4)
            verdict = f"at most {row.demand:g}: {'held' if wall <= row.demand else 'MISSED'}"
        print(
            f"{row.name:<26} {median(row.wall) * 1e3:>9.3f} {median(row.cpu) * 1e3:>9.3f} {wall:>8.4f} {cpu:>9.4f}"
            f"  {row.against:<12} {verdict}".rstrip()
        )
    for name, why in missing.items():
        print(f"{name:<26} not run: {why}")
    return figures


async def run(options: argparse.Namespace) -> None:
    missing: dict[str, str] = {}
    clock = CpuClock()
    async with AsyncExitStack() as stack:
        backend = bwrap.backend()
        bare = [backend.interpreter.path, "-c", CODE]
        rows = [
            Row("bare print", process(bare)),
            Row("bwrap one-shot", one_shot(backend), figure="bwrap_print", demand=2),
            *await session_rows(stack, bare),
            *await numpy_rows(stack),
        ]
        image = None
        if options.no_docker:
            missing["run in docker"] = "--no-docker"
        else:
            try:
                found, image = await docker_rows(stack, options.docker_image)
                rows += found
            except (PaceError, ImportError) as error:
                missing["run in docker"] = str(error)
        if options.peers is not None:
            peers = Peers(options.peers, image)
            stack.callback(peers.close)
            rows += [Row(name, peers.work(name)) for name in peers.names]
            missing |= peers.missing
        counted = f"from {clock.group.parent}" if clock.group else "from /proc, in steps of 10 ms"
        print(f"rooms run {backend.interpreter.path}; medians of {options.repeats}; CPU time {counted}\n", flush=True)
        await measure(rows, clock, options.repeats)
    figures = dict.fromkeys(
        ("bwrap_print", "session_start", "session_run", "zygote_print", "zygote_numpy", "docker_run", "runs_at_32")
    )
    print(json.dumps(figures | show(rows, missing)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--peers", type=Path, help="virtual environment with skyrl-gym, llm-sandbox and verifiers")
    parser.add_argument("--docker-image", help="image with python3; without it the backend's own is used")
    parser.add_argument("--no-docker", action="store_true")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
