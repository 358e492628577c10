"""The runtime in a process of its own: what it says, what it survives, and how it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from parts import CharChat, CountingEnv, NumberTasks, parse, say

from pace_agent.engine.scripted import ScriptedEngine
from pace_agent.errors import PaceError, RunError, UserError
from pace_agent.ledger import Ledger
from pace_agent.pool import PacePool, PoolOptions
from pace_agent.rollout.episode import Player
from pace_agent.rollout.journal import Journal, read_lines
from pace_agent.rollout.limits import Limits
from pace_agent.rollout.process import RuntimeProcess
from pace_agent.rollout.runtime import Runtime, RuntimeOptions
from pace_agent.tasks import TaskQueue
from pace_agent.types import Sample

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class OddError(PaceError):
    """Pickles, but does not unpickle."""

    def __init__(self, layer: str, cause: str) -> None:
        super().__init__(f"{layer}: {cause}")


def build(folder: Path, *, delay: float = 0.0) -> Runtime:
    engine, ledger = ScriptedEngine(lambda request: say("x" * (1 + int(request.rid.split("-")[1]) % 4))), Ledger()
    runtime: Runtime = Runtime(
        player=Player(
            env_id="test/Env-v0",
            make_env=lambda: CountingEnv(delay=delay, rewards=lambda env: float(len(env.answers[0]) % 2)),
            engine=engine,
            chat=CharChat(),
            parse=parse,
            limits=Limits(turns=5, turn_tokens=50),
            version=lambda: runtime.version,
        ),
        engine=engine,
        queue=TaskQueue(NumberTasks(), seed=1),
        pool=PacePool[Sample](PoolOptions(batch_size=8, group_size=4), ledger),
        ledger=ledger,
        journal=Journal(folder / "trajectories.jsonl"),
        ledger_log=Journal(folder / "ledger.jsonl"),
        advantages=lambda rewards: [value - sum(rewards) / len(rewards) for value in rewards],
        options=RuntimeOptions(group_size=4, concurrency=16),
    )
    return runtime


def build_nothing(folder: Path) -> Runtime:
    with (folder / "built").open("a") as file:
        file.write("x")
    raise UserError("env.id = 'x' can't be had here")


async def answer(runtime: Runtime, value: object) -> object:
    return value


async def unpicklable(runtime: Runtime) -> Callable[[], None]:
    return lambda: None


async def fail(runtime: Runtime, error: type[Exception], *arguments: str) -> None:
    raise error(*arguments)


async def die(runtime: Runtime) -> None:
    os._exit(7)


async def signals_of_a_program(runtime: Runtime) -> dict[str, int]:
    """The masks of blocked and of ignored signals in a program that an environment would start."""
    program = await asyncio.create_subprocess_exec("cat", "/proc/self/status", stdout=subprocess.PIPE)
    output = (await program.communicate())[0].decode()
    fields = dict(line.split(":", 1) for line in output.splitlines())
    return {name: int(fields[name], 16) for name in ("SigBlk", "SigIgn")}


@contextmanager
def started(build: Callable[[], Runtime]) -> Iterator[RuntimeProcess]:
    process = RuntimeProcess(build)
    process.start()
    try:
        yield process
    finally:
        process.close()


def pid_of(process: RuntimeProcess) -> int:
    pid = process._process.pid
    assert pid is not None
    return pid


def test_it_carries_batches_weights_states_and_ends(tmp_path: Path) -> None:
    with started(partial(build, tmp_path)) as process:
        process.begin()
        batch = process.next_batch()
        assert batch is not None
        assert len(batch.samples) == 8
        assert process.step_ended({}) == 1
        state = process.state_dict()
        assert state["version"] == state["step"] == 1
    process.close()
    with pytest.raises(RunError, match="closed"):
        process.next_batch()
    assert list(read_lines(tmp_path / "ledger.jsonl"))[-1]["running"] == 0

    again = RuntimeProcess(partial(build, tmp_path))
    again.start(state)
    try:
        again.begin()
        batch = again.next_batch()
        assert batch is not None
        assert (batch.step, batch.version) == (2, 1)
    finally:
        again.close()


def test_what_went_wrong_at_the_start_is_raised_here_and_nothing_is_built_twice(tmp_path: Path) -> None:
    with started(partial(build_nothing, tmp_path)) as process:
        for _ in range(2):
            with pytest.raises(UserError, match="can't be had"):
                process.started()
        with pytest.raises(UserError, match="can't be had"):
            process.next_batch()
    assert (tmp_path / "built").read_text() == "x"


def test_an_answer_or_error_that_does_not_travel_is_an_error_and_not_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with started(partial(build, tmp_path)) as process:
        with pytest.raises(RunError, match="pickle"):
            process.ask(unpicklable)
        with pytest.raises(RunError, match="OddError: engine: broken"):
            process.ask(fail, OddError, "engine", "broken")
        with pytest.raises(RunError, match="ValueError: broken"):
            process.ask(fail, ValueError, "broken")
        with pytest.raises(UserError, match="broken"):
            process.ask(fail, UserError, "broken")
        assert process.ask(answer, 5) == 5
    assert "in fail" in capfd.readouterr().err


def test_a_question_that_can_not_be_read_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    with started(partial(build, tmp_path)) as process:
        with pytest.raises(RunError, match="TypeError"):
            process.ask(answer, OddError("engine", "broken"))
        assert process.ask(answer, 5) == 5


def test_a_child_that_died_is_an_error(tmp_path: Path) -> None:
    with started(partial(build, tmp_path)) as process:
        with pytest.raises(RunError, match="exit code 7"):
            process.ask(die)
        with pytest.raises(RunError, match="exit code 7"):
            process.next_batch()


def test_signals_that_come_before_the_child_is_ready_neither_kill_it_nor_are_lost(tmp_path: Path) -> None:
    with started(partial(build, tmp_path)) as process:
        os.kill(pid_of(process), signal.SIGINT)
        os.kill(pid_of(process), signal.SIGTERM)
        process.stop()
        process.started()
        process.begin()
        assert process.next_batch() is None


def test_ctrl_c_is_not_for_the_child_but_programs_that_it_starts_can_be_ended(tmp_path: Path) -> None:
    with started(partial(build, tmp_path)) as process:
        process.started()
        os.kill(pid_of(process), signal.SIGINT)
        os.kill(pid_of(process), signal.SIGTERM)
        found = process.ask(signals_of_a_program)
    for mask in found.values():
        assert not any(mask >> (number - 1) & 1 for number in SIGNALS)


def test_stop_ends_a_wait_for_a_batch(tmp_path: Path) -> None:
    with started(partial(build, tmp_path, delay=60.0)) as process:
        process.begin()
        timer = threading.Timer(0.2, process.stop)
        timer.start()
        assert process.next_batch() is None
        timer.join()


PARENT = """
import json, sys, time
from functools import partial
from pathlib import Path
sys.path[:] = json.loads(sys.argv[2])
from pace_agent.rollout.process import RuntimeProcess
from test_runtime_process import build
process = RuntimeProcess(partial(build, Path(sys.argv[1]), delay=60.0))
process.start()
process.begin()
print(process._process.pid, flush=True)
process.next_batch()
"""


def test_it_closes_everything_and_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    path: list[Any] = [entry or os.getcwd() for entry in sys.path]
    command = [sys.executable, "-c", PARENT, str(tmp_path), json.dumps(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(200):
        if not Path(f"/proc/{child}").exists() or ") Z" in Path(f"/proc/{child}/stat").read_text():
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the child is still there")
    last = list(read_lines(tmp_path / "ledger.jsonl"))[-1]
    assert last["running"] == 0
    assert last["cancelled"] == last["submitted"] > 0
