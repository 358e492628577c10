"""What only an engine in a process of its own can do: die, fail to start, outlive nobody."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from tiny_models import make_model

import pace_agent
from pace_agent.engine.base import GenerationRequest, SamplingParams
from pace_agent.engine.local.process import SHARED_MEMORY, ProcessEngine
from pace_agent.errors import EngineError


def ask(rid: str, tokens: int) -> GenerationRequest:
    return GenerationRequest(rid, [1, 2, 3], SamplingParams(tokens))


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_a_child_that_dies_fails_every_turn_with_its_exit_code(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    engine = ProcessEngine(tmp_path, max_slots=4)
    await engine.start()
    assert engine._process is not None
    pid = engine._process.pid
    os.kill(pid, signal.SIGINT)  # Ctrl-C is not the child's business
    assert len((await engine.generate(ask("fine", 3))).output_ids) == 3
    await engine.pause()
    await engine.update_weights(make_model(1).state_dict(), 1)
    assert not list(SHARED_MEMORY.glob("pace-weights-*"))
    turns = [asyncio.create_task(engine.generate(ask(f"{i}", 100))) for i in range(6)]
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    for turn in turns:
        with pytest.raises(EngineError, match="ended with exit code -9"):
            await turn
    with pytest.raises(EngineError, match="exit code -9"):
        await engine.generate(ask("late", 3))
    with pytest.raises(EngineError, match="exit code -9"):
        await engine.resume()
    await engine.aclose()
    await engine.aclose()


@pytest.mark.parametrize("name", ["missing", "empty"])
async def test_a_model_that_can_not_be_loaded_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    engine = ProcessEngine(tmp_path / name)
    with pytest.raises(EngineError, match=name):
        await engine.start()
    with pytest.raises(EngineError, match=name):
        await engine.generate(ask("a", 1))


async def test_before_start_and_after_close_there_is_no_engine(tmp_path: Path) -> None:
    engine = ProcessEngine(tmp_path)
    with pytest.raises(EngineError, match="start"):
        await engine.generate(ask("a", 1))
    await engine.aclose()
    with pytest.raises(EngineError, match="closed"):
        await engine.start()


def environment() -> dict[str, str]:
    """Where a child finds the package that this test runs."""
    return {**os.environ, "PYTHONPATH": str(Path(pace_agent.__file__).resolve().parents[1])}


PARENT = """
import asyncio, sys
from pace_agent.engine.base import GenerationRequest, SamplingParams
from pace_agent.engine.local.process import ProcessEngine

async def run():
    engine = ProcessEngine(sys.argv[1], max_slots=2)
    await engine.start()
    print(engine._process.pid, flush=True)
    await engine.generate(GenerationRequest("a", [1], SamplingParams(150)))
    await asyncio.sleep(600)

asyncio.run(run())
"""


async def test_the_child_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(tmp_path), stdout=asyncio.subprocess.PIPE, env=environment()
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(30):
        while not gone(pid):  # noqa: ASYNC110 - another process's child can only be looked at
            await asyncio.sleep(0.05)
