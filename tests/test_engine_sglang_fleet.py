"""The SGLang engine's servers: they die, hang, refuse weights, and come back with others."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from parts import CharChat, CountingEnv, NumberTasks, parse
from sglang_world import World, make_weights, quick, until, world

from pace_agent.engine.base import UpdateRefused
from pace_agent.engine.sglang import fleet as fleet_module
from pace_agent.errors import EngineError, RunError
from pace_agent.ledger import Ledger
from pace_agent.pool import PacePool, PoolOptions
from pace_agent.rollout.episode import Episode, Player
from pace_agent.rollout.journal import Journal
from pace_agent.rollout.limits import Limits
from pace_agent.rollout.runtime import Runtime, RuntimeOptions
from pace_agent.tasks import TaskQueue
from pace_agent.types import Sample, StopReason, Task

UPDATE, PAUSE, CONTINUE = "/update_weights_from_disk", "/pause_generation", "/continue_generation"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@contextmanager
def made_runtime(it: World, folder: Path) -> Iterator[Runtime]:
    """A runtime over the engine, of which only `publish` is used."""
    ledger = Ledger()
    with closing(Journal(folder / "trajectories.jsonl")) as journal, closing(Journal(folder / "ledger.jsonl")) as log:
        yield Runtime(
            player=make_player(it, 60.0),
            engine=it.engine,
            queue=TaskQueue(NumberTasks(), seed=1, max_attempts=1),
            pool=PacePool[Sample](PoolOptions(batch_size=8, group_size=4), ledger),
            ledger=ledger,
            journal=journal,
            ledger_log=log,
            advantages=lambda rewards: rewards,
            options=RuntimeOptions(group_size=4),
        )


def make_player(it: World, seconds: float) -> Player:
    class SmallChat(CharChat):
        stop_token_ids = ()  # type: ignore[assignment]

        def prompt_ids(self, messages: Any, tools: Any = ()) -> list[int]:
            return [1, 2, 3]

    return Player(
        env_id="test/Env-v0",
        make_env=lambda: CountingEnv(rounds=1),
        engine=it.engine,
        chat=SmallChat(),
        parse=parse,
        limits=Limits(turns=1, turn_tokens=40, seconds=seconds),
    )


# -- servers that die ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("incremental", [False, True])
async def test_one_of_two_dies_and_its_turns_go_on_at_the_other(tmp_path: Path, incremental: bool) -> None:
    async with world(tmp_path, 2, incremental=incremental) as it:
        await it.begun(8, 60)
        await it.servers[0].die()
        await it.check_all([0])
        moved = [name for name in it.tasks if len(it.seen(name)) == 2]
        assert len(moved) == 4
        assert all(0 < it.seen(name)[1].max_new_tokens < 60 for name in moved)  # type: ignore[operator]
        assert it.health() == ["lost", "serving"]
        assert it.engine.stats().out_seconds == 0.0


async def test_both_die_and_one_returns_with_old_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with world(tmp_path, 2, token_seconds=0.005) as it:
        await it.begun(6, 80)
        for version in (1, 2, 3):
            await it.publish(version)
        for server in it.servers:
            await server.die()
        await until(lambda: "no SGLang server is left: rollouts wait for one, up to 300 s" in caplog.text)
        assert not any(task.done() for task in it.tasks.values())
        out = it.engine.stats().out_seconds
        it.servers[1].requests.clear()
        await it.servers[1].start()
        assert it.servers[1].version == "0"
        await it.check_all()
        assert 0.0 < out < it.engine.stats().out_seconds
        assert it.servers[1].version == "3"
        assert it.servers[1].paths()[-1] == CONTINUE
        updated = [call.at for call in it.servers[1].calls if call.path == UPDATE][-1]
        later = [many[0] for many in it.servers[1].requests.values()]
        assert len(later) == 6
        assert all(seen.at > updated for seen in later)
        assert all(generation.result().spans[-1].version == 3 for generation in it.tasks.values())
        settled = it.engine.stats().out_seconds
        await asyncio.sleep(0.05)
        assert it.engine.stats().out_seconds == settled


async def test_weights_published_while_nobody_serves_are_for_who_returns(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.servers[0].die()
        await until(lambda: it.health() == ["lost"])
        await it.publish(1)
        it.begin("a")
        await it.servers[0].start()
        await it.check("a", [1])


async def test_nobody_returns_in_time(tmp_path: Path) -> None:
    async with world(tmp_path, 2, options={"wait_seconds": 0.2}) as it:
        await it.begun(3)
        for server in it.servers:
            await server.die()
        for task in it.tasks.values():
            with pytest.raises(RunError, match=r"no SGLang server came back within 0.2 s. http://127.*reached"):
                await task
        with pytest.raises(RunError, match="no SGLang server came back"):
            await it.begin("late")
        with pytest.raises(RunError, match="no SGLang server came back"):
            await it.engine.pause()


async def test_an_outage_counts_for_no_time_limit(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        episode = Episode(id=1, group_id=1, task=Task("t", "question"))
        playing = asyncio.create_task(make_player(it, 2.0).play(episode))
        await until(lambda: it.servers[0].running == 1)
        await it.servers[0].die()
        await asyncio.sleep(2.3)
        assert not playing.done()
        await it.servers[0].start()
        trajectory = await playing
        assert trajectory.stop is StopReason.TRUNCATED_TOKENS
        assert trajectory.n_sampled == 40
        assert it.engine.stats().out_seconds > 2.0
        await it.servers[0].die()
        it.engine._fleet._wait_seconds = 0.1
        with pytest.raises(RunError):  # not the rollout's fault
            await make_player(it, 2.0).play(episode)


# -- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_change", [False, True])
async def test_one_of_three_refuses_an_update(tmp_path: Path, after_change: bool) -> None:
    async with world(tmp_path, 3) as it:
        await it.begun(9, 80)
        it.servers[1].set_faults(fail_updates=1, fail_after_change=after_change)
        await it.engine.pause()
        with pytest.raises(UpdateRefused, match=r"1 of 3 servers refused .* 2 serve version 0 again") as said:
            await it.engine.update_weights(it.weights, 1)
        assert it.servers[1].url in str(said.value)
        assert "the fake was told so" in str(said.value)
        assert it.health() == ["serving", "fenced", "serving"]
        assert [server.version for server in it.servers] == ["0"] * 3
        await it.engine.resume()
        await it.check_all([0])
        await until(lambda: it.health() == ["serving"] * 3)
        await it.publish(1)
        for i in range(3):
            it.begin(f"later-{i}", 5)
            await it.check(f"later-{i}", [1])


@pytest.mark.parametrize("refusals", [1, 3])
async def test_the_runtime_publishes_without_who_refuses(tmp_path: Path, refusals: int) -> None:
    """A server that refuses again and again stays out, and the others go on."""
    async with world(tmp_path, 3) as it:
        with made_runtime(it, tmp_path) as runtime:
            await it.begun(9, 100)
            for version in (1, 2):
                it.servers[2].set_faults(fail_updates=refusals if version == 1 else 0, fail_after_change=True)
                await runtime.publish(it.weights, version)
                assert runtime.version == version
                sampled = it.sampled()
                await until(lambda sampled=sampled: it.sampled() > sampled)  # type: ignore[misc]
            generations = await it.check_all()
            assert {span.version for each in generations for span in each.spans} == {0, 1, 2}
            it.servers[2].set_faults(fail_updates=0)
            await until(lambda: it.health() == ["serving"] * 3)
            assert it.servers[2].scheduler.version == "2"


async def test_a_slow_update_is_refused_and_tried_again_without_the_same_server(tmp_path: Path) -> None:
    """Nothing lets it back between the two tries, however long they take."""
    async with world(tmp_path, 2, update_seconds=0.3) as it:
        it.servers[0].set_faults(fail_updates=1)
        with made_runtime(it, tmp_path) as runtime:
            await runtime.publish(it.weights, 1)
        assert [call.body["weight_version"] for call in it.servers[0].calls if call.path == UPDATE][:1] == ["1"]
        assert [call.body["weight_version"] for call in it.servers[1].calls if call.path == UPDATE] == ["1", "0", "1"]


async def test_all_refuse(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as it:
        await it.begun(2, 60)
        for server in it.servers:
            server.set_faults(fail_updates=1, fail_after_change=True)
        await it.engine.pause()
        with pytest.raises(EngineError, match="no server is left after the update to version 1") as said:
            await it.engine.update_weights(it.weights, 1)
        assert not isinstance(said.value, UpdateRefused)
        await it.engine.resume()
        await it.check_all([0])  # once they have the old weights again


async def test_weights_that_can_not_be_taken_back(tmp_path: Path) -> None:
    """Who has the new ones and can't get the old ones is out, too: nobody serves weights that were not published."""
    async with world(tmp_path, 2, update_seconds=0.1) as it:
        await it.begun(2, 60)
        it.servers[0].set_faults(fail_updates=1)
        await it.engine.pause()
        update = asyncio.create_task(it.engine.update_weights(make_weights(tmp_path / "new"), 1))
        await until(lambda: UPDATE in it.servers[0].paths())
        hidden = it.weights.rename(tmp_path / "hidden")
        with pytest.raises(EngineError, match="could not be taken back"):
            await update
        assert it.health() == ["fenced", "fenced"]
        hidden.rename(it.weights)
        await it.engine.resume()
        await it.check_all([0])


async def test_a_broken_off_update_lets_nobody_serve(tmp_path: Path) -> None:
    async with world(tmp_path, 2, update_seconds=0.1) as it:
        await it.begun(2, 60)
        await it.engine.pause()
        update = asyncio.create_task(it.engine.update_weights(it.weights, 1))
        await until(lambda: UPDATE in it.servers[1].paths())
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert it.health() == ["fenced", "fenced"]
        await it.engine.resume()
        await it.check_all([0])


async def test_a_server_dies_in_the_middle_of_an_update(tmp_path: Path) -> None:
    async with world(tmp_path, 3, update_seconds=0.1) as it:
        await it.begun(6, 80)
        await it.engine.pause()
        update = asyncio.create_task(it.engine.update_weights(it.weights, 1))
        await until(lambda: UPDATE in it.servers[0].paths())
        await it.servers[0].die()
        await update
        await it.engine.resume()
        await it.check_all([0, 1])
        assert it.health() == ["lost", "serving", "serving"]


@pytest.mark.parametrize("fault", ["fail_calls", "hang_calls"])
@pytest.mark.parametrize("path", [PAUSE, CONTINUE])
async def test_a_server_that_does_not_follow(tmp_path: Path, fault: str, path: str) -> None:
    async with world(tmp_path, 2) as it:
        await it.begun(6, 80)
        it.servers[0].set_faults(**{fault: {path: 1}})
        await it.publish(1)
        it.begin("after")
        await it.check("after", [1])
        await it.check_all()  # a server that did not hear of the pause may have ended its turns
        await until(lambda: it.health() == ["serving", "serving"])
        assert it.servers[0].version == "1"


# -- servers that don't work -----------------------------------------------------------------------------------------


async def test_a_stalled_server_is_lost_and_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its HTTP side answers all the time, and neither turns nor a pause wait for it."""
    async with world(tmp_path, 2, options={"stall_seconds": 0.3}, health_seconds=2.0) as it:
        await it.begun(8, 100)
        it.servers[0].set_faults(stall=True)
        began = time.monotonic()
        await it.check_all([0])
        assert it.health() == ["lost", "serving"]
        assert "it has 4 turns to do, and for 0 s came no token" in caplog.text
        await asyncio.sleep(0.2)
        await it.publish(1)
        assert it.health() == ["lost", "serving"]
        assert time.monotonic() - began < 15
        it.servers[0].set_faults(stall=False)
        await until(lambda: it.health() == ["serving", "serving"])
        assert it.servers[0].version == "1"


async def test_neither_a_pause_nor_slow_tokens_are_a_stall(tmp_path: Path) -> None:
    async with world(tmp_path, options={"stall_seconds": 0.4}, token_seconds=0.15) as it:
        await it.begun(2, 8)
        await it.engine.pause()
        await asyncio.sleep(0.9)
        await it.engine.update_weights(it.weights, 1)
        await it.engine.resume()
        await it.check_all([0, 1])
        assert all(len(it.seen(name)) == 1 for name in it.tasks)


async def test_a_hung_server_holds_up_nobody(tmp_path: Path) -> None:
    """Looking after it never stands in the way of a pause or of the other servers."""
    async with world(tmp_path, 3) as it:
        await it.servers[0].die()
        await until(lambda: it.health()[0] == "lost")
        it.servers[0].set_faults(hang_calls={CONTINUE: 99})
        await it.servers[0].start()
        await asyncio.sleep(0.2)
        await it.begun(4, 60)
        began = time.monotonic()
        await it.publish(1)
        assert it.engine.stats().paused_seconds < fleet_module.CONTROL_SECONDS
        await it.servers[1].die()
        await it.check_all()
        assert time.monotonic() - began < 15
        assert it.health() == ["lost", "lost", "serving"]


# -- servers that change behind our back -----------------------------------------------------------------------------


async def test_a_restart_between_two_looks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with world(tmp_path, 2, token_seconds=0.005) as it:
        await it.publish(1)
        await it.begun(6, 60)
        await it.servers[0].die()
        await it.servers[0].start()
        await it.check_all([1])
        await until(lambda: it.health() == ["serving", "serving"])
        assert it.servers[0].version == "1"
        assert "is out: it reports version 0, but 1 is published: it was restarted, or another program" in caplog.text


@pytest.mark.parametrize("name", ["0", "default"])
@pytest.mark.parametrize("heard", [False, True])
async def test_tokens_of_a_restarted_server_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, heard: bool
) -> None:
    """Not even where its stream ends before anybody looks, well or cut."""
    monkeypatch.setattr(fleet_module, "PROBE_SECONDS", 0.6)
    async with world(tmp_path, 1, version="0") as it:
        await it.publish(1)
        it.servers[0].first_version = name
        await it.servers[0].die()
        await it.servers[0].start()
        if not heard:
            it.servers[0].set_faults(cut_streams=1, cut_after=5)
        it.begin("a", 20)
        await it.check("a", [1])
        assert [seen.max_new_tokens for seen in it.seen("a")] == [20, 20]


async def test_another_program_updates_a_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with world(tmp_path, 2, token_seconds=0.005) as it:
        await it.begun(6, 60)
        for version in ("7", "other"):
            it.servers[1].scheduler.pause("retract")
            it.servers[1].reset_version(version)
            it.servers[1].scheduler.flush()
            it.servers[1].scheduler.go_on()
            await until(lambda: it.health()[1] == "fenced")
            await until(lambda: it.health()[1] == "serving")
        await it.check_all([0])
        assert "another program updates its weights" in caplog.text


async def test_a_newer_version_in_a_final_chunk_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PROBE_SECONDS", 0.6)
    async with world(tmp_path, 1) as it:
        await it.begun(1, 30)
        it.servers[0].scheduler.set_version("7")
        await it.check("0", [0])
