"""The SGLang engine with many turns, and how it closes."""

import asyncio
import gc
import logging
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fake_sglang import FakeServer
from sglang_world import quick, until, world

from pace_agent.errors import EngineError


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


# -- many ------------------------------------------------------------------------------------------------------------


async def test_a_session_stays_where_it_is_while_it_can(tmp_path: Path) -> None:
    async with world(tmp_path, 3, token_seconds=0.0) as it:
        for turn in range(3):
            await asyncio.gather(*(it.begin(f"{s}-{turn}", 3, session=f"s{s}") for s in range(9)))
        homes = {rid.partition("-")[2]: number for number, server in enumerate(it.servers) for rid in server.requests}
        assert all(homes[f"{s}-0"] == homes[f"{s}-1"] == homes[f"{s}-2"] for s in range(9))
        assert Counter(homes.values()) == {0: 9, 1: 9, 2: 9}
        lost = it.servers[homes["0-0"]]
        await lost.die()
        await asyncio.gather(*(it.begin(f"{s}-3", 3, session=f"s{s}") for s in range(9)))
        assert sorted(server.sessions for server in it.engine._fleet.servers) == [0, 4, 5]
        await lost.start()
        await until(lambda: it.health() == ["serving"] * 3)
        for s in range(9):
            await it.engine.release(f"s{s}")
        await it.engine.release("unknown")
        assert [server.sessions for server in it.engine._fleet.servers] == [0, 0, 0]
        await it.check_all([0])


async def test_a_thousand_turns_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # this loop is too busy for short waits
    async with world(tmp_path, 2, token_seconds=0.05, options={"stream_interval": 8}) as it:
        for server in it.servers:
            server.set_faults(stall=True)  # until all are there
        for i in range(1000):
            it.begin(str(i), 17, session=str(i))
        await until(lambda: sum(server.streams for server in it.servers) == 1000, 60)
        for server in it.servers:
            server.set_faults(stall=False)
        await until(lambda: all(server.scheduler.sampled_tokens > 1000 for server in it.servers))
        await it.publish(1)
        async with asyncio.timeout(60):
            await asyncio.gather(*it.tasks.values())
        generations = await it.check_all()
        assert all(each.spans[-1].version == 1 for each in generations)
        assert sum(server.peak_streams for server in it.servers) == 1000
        assert [server.peak_streams for server in it.servers] == [500, 500]
        assert it.engine.stats().running == 0
        assert sum(server.streams for server in it.servers) == 0
        assert all(not server.attempts for server in it.engine._fleet.servers)
        await asyncio.sleep(2.1)  # what is kept alive has expired, and goes with the next turns
        await asyncio.gather(*(it.begin(f"after-{i}", 2, session=f"after-{i}") for i in range(2)))
        await until(lambda: sum(server.connections for server in it.servers) <= 4)


def test_the_limit_of_open_files_is_lifted() -> None:
    code = """if True:
        import resource
        from pace_agent.engine.sglang.engine import _allow_open_files
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        _allow_open_files()
        print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    soft, hard = map(int, run.stdout.split())
    assert soft == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16))


# -- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["running", "paused", "out", "hung", "between", "dropped"])
async def test_closing_ends_everything(tmp_path: Path, moment: str, caplog: pytest.LogCaptureFixture) -> None:
    before = asyncio.all_tasks()
    async with world(tmp_path, 2) as it:
        if moment == "between":
            for server in it.servers:
                server.set_faults(error_requests=99)
            for i in range(4):
                it.begin(str(i), session=str(i))
            await asyncio.sleep(0.05)
        else:
            await it.begun(6, 100)
        if moment == "paused":
            await it.engine.pause()
            it.begin("gate")
            await asyncio.sleep(0.01)
        elif moment == "out":
            for server in it.servers:
                await server.die()
        elif moment == "hung":
            for server in it.servers:
                server.set_faults(stall=True, hang_calls={"/abort_request": 99, "/model_info": 99})
        elif moment == "dropped":
            it.tasks["0"].cancel()
            await asyncio.sleep(0)
        await it.engine.aclose()
        await it.engine.aclose()
        ended = await asyncio.gather(*it.tasks.values(), return_exceptions=True)
        for name, error in zip(it.tasks, ended, strict=True):
            if (moment, name) == ("dropped", "0"):
                assert isinstance(error, asyncio.CancelledError)
            elif moment != "between" or "8 attempts" not in str(error):
                assert isinstance(error, EngineError)
                assert "the engine was closed" in str(error)
        with pytest.raises(EngineError, match="was closed"):
            await it.begin("late")
        it.tasks.clear()
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == before
    gc.collect()
    assert "exception was never retrieved" not in caplog.text
    assert "was destroyed" not in caplog.text


async def test_closing_an_engine_that_never_generated(tmp_path: Path) -> None:
    async with FakeServer() as server:
        async with world(tmp_path, 0, urls=[server.url]):
            pass
        await asyncio.sleep(0)


async def test_turns_that_ended_leave_no_notes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with world(tmp_path, 2) as it:
        await it.begun(4)
        await it.publish(1)
        await it.check_all()
    assert [record.message for record in caplog.records if record.name.startswith("pace_agent")] == []
