"""The engine with a real router between it and two fake servers; and servers that give their memory up."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_routers import real_router
from sglang_world import quick, until, world

from pace_agent.engine.sglang.serving.router import KINDS, Router


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@pytest.fixture(scope="module", params=KINDS)
def router(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with real_router(request.param, tmp_path_factory.mktemp("router")) as made:
        yield made


@pytest.mark.timeout(600)
async def test_turns_go_through_the_router_and_outlive_an_update_and_a_server(router: Router, tmp_path: Path) -> None:
    async with world(tmp_path, 2, options={"router": router}, token_seconds=0.02) as it:
        assert set(await router.workers()) == {server.url for server in it.servers}
        await it.begun(12, tokens=100)
        await it.publish(1)
        for _ in range(2):
            it.begin("again", 4, session="session-0")
            await it.tasks.pop("again")
        assert len({id(server) for server in it.servers for rid in server.requests if "again" in rid}) == 1
        used = [server for server in it.servers if server.scheduler.running]
        assert sum(len(server.scheduler.running) for server in used) == 12
        used[0].kill()
        await until(lambda: it.health().count("lost") == 1, 60)
        done = await it.check_all()
        assert {span.version for generation in done for span in generation.spans} == {0, 1}
    for server in it.servers:
        await router.remove(server.url)


@pytest.mark.timeout(600)
async def test_turns_wait_for_a_router_that_comes_back(router: Router, tmp_path: Path) -> None:
    async with world(tmp_path, 1, options={"router": router}, token_seconds=0.02) as it:
        await it.begun(4, tokens=60)
        assert router.pid is not None
        os.kill(router.pid, signal.SIGKILL)
        await until(lambda: it.engine.stats().out_seconds > 0, 30)
        async with asyncio.timeout(200):
            for task in it.tasks.values():
                await task
        await it.check_all()
    await router.remove(it.servers[0].url)


async def test_servers_give_their_memory_up_for_a_step(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as it:
        turn = it.begin("before", 30)
        await until(lambda: it.engine.stats().running == 1)
        await it.engine.release_memory()
        assert turn.done()
        waiting = it.begin("during", 4)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await it.publish(1)
        await it.check("during", [1])
        for server in it.servers:
            calls = [call.path for call in server.calls if "memory" in call.path or "update" in call.path]
            order = ["/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk"]
            assert calls[-3:] == order
        await it.engine.release_memory()
        await it.engine.resume()  # a step that failed: the old weights come back
        it.begin("after", 4)
        await it.check("after", [1])
