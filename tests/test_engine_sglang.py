"""Turns of the SGLang engine through everything that can happen to a stream, against fake servers."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_sglang import FakeServer
from sglang_engines import sglang_engine
from sglang_world import Relay, fake_server, make_weights, quick, uncut, until, world

from pace_agent.engine.base import Generation, GenerationRequest, SamplingParams
from pace_agent.engine.sglang.client import Keys
from pace_agent.engine.sglang.stream import Stream
from pace_agent.errors import EngineError


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


# -- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("incremental", "interval"), list(itertools.product([False, True], [1, 8])))
async def test_streams_of_either_kind_across_an_update(tmp_path: Path, incremental: bool, interval: int) -> None:
    async with world(tmp_path, incremental=incremental, options={"stream_interval": interval}) as it:
        await it.begun(4, 60)
        await it.publish(1)
        await it.check_all([0, 1])
        assert it.engine.stats().interrupted == 4
        assert it.engine.stats().sampled_tokens == 240


@pytest.mark.parametrize("incremental", [False, True])
async def test_chunks_are_cut_at_any_byte(incremental: bool) -> None:
    async with (
        FakeServer(incremental=incremental) as server,
        httpx.AsyncClient(trust_env=False, verify=False) as client,
    ):
        body = {"rid": "a", "input_ids": [1, 2], "stream": True, "return_logprob": True}
        body["sampling_params"] = {"max_new_tokens": 5}
        data = (await client.post(f"{server.url}/generate", json=body)).content
    for size in range(1, len(data)):
        stream = Stream()
        for start in range(0, len(data), size):
            stream.feed(data[start : start + size])
        stream.settle()
        assert (stream.end, tuple(stream.ids)) == ("length", uncut([1, 2], 5))
        assert len(stream.logprobs) == 5


@pytest.mark.parametrize("incremental", [False, True])
async def test_answers_may_come_in_crumbs(tmp_path: Path, incremental: bool) -> None:
    async with (
        fake_server(incremental=incremental) as server,
        Relay(server.port, 17) as relay,
        world(tmp_path, 0, urls=[relay.url]) as it,
    ):
        it.begin("a", 12)
        await it.check("a", [0])


async def test_an_old_server_can_not_stamp(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.servers[0].faults.hide_versions = True
        with pytest.raises(EngineError, match=r"127.0.0.1:\d+ .* without weight_versions: its SGLang is too old"):
            await it.begin("a")


# -- cut streams -----------------------------------------------------------------------------------------------------


async def test_a_cut_before_any_pause_keeps_all(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.servers[0].set_faults(cut_streams=1, cut_after=5)
        it.begin("a", 20)
        await it.check("a", [0])
        assert [seen.max_new_tokens for seen in it.seen("a")] == [20, 15]
        assert it.engine.stats().sampled_tokens == 20


async def test_several_cuts_in_a_row(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.servers[0].set_faults(cut_streams=30, cut_after=2)
        it.begin("a", 70)
        await it.check("a", [0])
        assert len(it.seen("a")) == 31


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_cut_during_a_pause_keeps_what_came_before(tmp_path: Path, incremental: bool) -> None:
    async with (
        fake_server(incremental=incremental) as server,
        Relay(server.port) as relay,
        world(tmp_path, 0, urls=[relay.url]) as it,
    ):
        it.servers.append(server)
        await it.begun(3)
        await it.engine.pause()
        relay.cut()
        await asyncio.sleep(0.05)
        await it.engine.update_weights(it.weights, 1)
        await it.engine.resume()
        await it.check_all([0, 1])
        assert all(0 < len(it.seen(str(i))[1].input_ids) - 8 < 40 for i in range(3))


@pytest.mark.parametrize(("incremental", "updates"), list(itertools.product([False, True], [1, 3])))
async def test_a_cut_after_an_update_drops_the_uncertain_tail(tmp_path: Path, incremental: bool, updates: int) -> None:
    async with (
        fake_server(incremental=incremental) as server,
        Relay(server.port) as relay,
        world(tmp_path, 0, urls=[relay.url]) as it,
    ):
        it.servers.append(server)
        await it.begun(3, 100)
        for version in range(1, updates + 1):
            await it.publish(version)
            await asyncio.sleep(0.05)
        relay.cut()
        await it.check_all([0, updates])


async def test_a_dropped_answer_yields_one_generation(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.servers[0].set_faults(drop_answers=2)
        task = it.begin("a", 10)
        most = 0
        while not task.done():
            most = max(most, it.attempts_alive("a"))
            await asyncio.sleep(0.001)
        await it.check("a", [0])
        assert most == 1
        assert [seen.max_new_tokens for seen in it.seen("a")] == [10, 10, 10]
        assert it.engine.stats().sampled_tokens == 10


async def test_the_old_request_ends_before_the_next_begins(tmp_path: Path) -> None:
    async with (
        fake_server(token_seconds=0.005) as server,
        Relay(server.port) as relay,
        world(tmp_path, 0, urls=[relay.url]) as it,
    ):
        it.servers.append(server)
        for name in "abcd":
            it.begin(name, 40)
        await until(lambda: server.running == 4)
        most = 0
        for _ in range(3):
            relay.cut()
            for _ in range(20):
                most = max(most, *(it.attempts_alive(name) for name in "abcd"))
                await asyncio.sleep(0.001)
        await it.check_all([0])
        assert most == 1
        assert all(len(it.seen(name)) > 1 for name in "abcd")


async def test_futile_attempts_end(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.servers[0].set_faults(drop_answers=100)
        with pytest.raises(EngineError, match=r"8 attempts in a row brought no token; the last: http://.* was cut"):
            await it.begin("a")
        assert len(it.seen("a")) == 8
        it.servers[0].set_faults(drop_answers=7)
        it.begin("b")
        await it.check("b", [0])


# -- aborts ----------------------------------------------------------------------------------------------------------


async def test_one_name_that_begins_another(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        for name in ("a-1", "a-10", "a-11"):
            it.begin(name, 60)
        await until(lambda: it.servers[0].scheduler.sampled_tokens > 10)
        await it.engine.abort("a-1")
        cut = await it.check("a-1", [0])
        assert cut.finish == "abort"
        assert 0 < len(cut.output_ids) < 60
        for name in ("a-10", "a-11"):
            assert (await it.check(name, [0])).finish == "length"
        assert len(it.servers[0].aborted) == 1


async def test_aborts_while_paused_and_at_the_gate(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.begun(2)
        await it.engine.pause()
        it.begin("gate")
        await asyncio.sleep(0.01)
        await it.engine.abort()
        ended = await it.check_all()
        assert [generation.finish for generation in ended] == ["abort"] * 3
        assert [bool(generation.output_ids) for generation in ended] == [True, True, False]
        assert it.seen("gate") == []
        await it.engine.resume()
        it.begin("after", 5)
        await it.check("after")


async def test_an_abort_while_no_server_is_there(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.begun(1)
        await it.servers[0].die()
        await until(lambda: it.health() == ["lost"])
        it.begin("waits")
        await asyncio.sleep(0.01)
        await it.engine.abort()
        assert [generation.finish for generation in await it.check_all()] == ["abort"] * 2


async def test_an_abort_between_two_attempts_is_heeded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pace_agent.engine.sglang.engine.FUTILE_SECONDS", 60.0)
    async with world(tmp_path) as it:
        it.servers[0].set_faults(error_requests=9)
        it.begin("a")
        await until(lambda: it.servers[0].statuses[500] > 0)
        await asyncio.sleep(0.02)
        await it.engine.abort("a")
        assert (await it.check("a")).finish == "abort"


@pytest.mark.parametrize(("incremental", "paused"), list(itertools.product([False, True], [False, True])))
async def test_what_the_server_aborts_goes_on(tmp_path: Path, incremental: bool, paused: bool) -> None:
    """Running turns end with their tokens, those that a pause sent back to the queue with what was streamed."""
    async with world(tmp_path, incremental=incremental, options={"stream_interval": 4}) as it:
        await it.begun(3, 60)
        if paused:
            await it.engine.pause()
        it.servers[0].control.abort("", everything=True)
        await asyncio.sleep(0.05)
        if paused:
            await it.engine.update_weights(it.weights, 1)
            await it.engine.resume()
        await it.check_all([0, 1] if paused else [0])
        assert all(len(it.seen(name)) == 2 for name in it.tasks)


async def test_what_the_server_refuses(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.servers[0].set_faults(reject_requests=1, reject_status=400)
        with pytest.raises(EngineError, match=r"/generate: The request queue is full"):
            await it.begin("bad")
        it.servers[0].set_faults(reject_requests=3, reject_status=503)
        it.begin("full")
        await it.check("full", [0])
        assert len(it.seen("full")) == 4
        it.servers[0].set_faults(error_requests=3)
        it.begin("broken")
        await it.check("broken", [0])
        it.servers[0].set_faults(error_requests=100)
        with pytest.raises(EngineError, match=r"8 attempts .* HTTP 500: Internal Server Error"):
            await it.begin("dead")


async def test_a_cancelled_turn_is_ended_at_the_server(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.begun(2, 100)
        it.tasks["0"].cancel()
        await until(lambda: len(it.servers[0].scheduler.running) == 1)
        await until(lambda: it.servers[0].paths()[-1] == "/abort_request")
        await it.check("1", [0])
        del it.tasks["0"]


# -- messages --------------------------------------------------------------------------------------------------------


async def refused_start(tmp_path: Path, words: str, keys: Keys | None = None, options: Any = (), **server: Any) -> None:
    missing, model = server.pop("missing", []), make_weights(tmp_path / "model")
    (model / "config.json").write_text(json.dumps(server.pop("config", {})))
    async with FakeServer(**server) as fake:
        fake.faults.missing = missing
        engine = sglang_engine([fake.url], model, keys=keys, **dict(options))
        with pytest.raises(EngineError, match=words) as caught:
            await engine.start()
        assert fake.url in str(caught.value)
        await engine.aclose()


async def test_servers_that_can_not_serve(tmp_path: Path) -> None:
    locked = {"api_key": "api", "admin_key": "admin"}
    await refused_start(tmp_path, r"refused the API key \(HTTP 401\)", Keys("wrong", "admin"), **locked)
    await refused_start(tmp_path, r"refused the API key", **locked)
    await refused_start(tmp_path, r"abort_request: the server refused the admin key", Keys("api", "wrong"), **locked)
    await refused_start(tmp_path, r"refused the admin key", Keys("api"), **locked)
    await refused_start(tmp_path, r"no such call \(HTTP 404\). Is this an SGLang server", missing=["/model_info"])
    await refused_start(tmp_path, r"no such call", missing=["/server_info"])
    words = (
        r"serves /models/tiny, which is not the model of this run: its architectures is \['LlamaForCausalLM'\], ours"
    )
    await refused_start(
        tmp_path, words, config={"architectures": ["Qwen3ForCausalLM"]}, architecture="LlamaForCausalLM"
    )
    larger = make_weights(tmp_path / "larger")
    (larger / "config.json").write_text(json.dumps({"hidden_size": 64}))
    words = r"its hidden_size is 64, ours 32. Start the server with .*/model"
    await refused_start(tmp_path, words, config={"hidden_size": 32}, model_path=str(larger))
    words = r"a context of 160 tokens, but rollouts may need 400: start it with --context-length 400"
    await refused_start(tmp_path, words, options={"context_length": 400})
    await refused_start(tmp_path, r"runs with --dp-size 2, which takes no weight updates", dp_size=2)


async def test_keys_open_a_locked_server(tmp_path: Path) -> None:
    async with world(tmp_path, api_key="api", admin_key="admin", options={"keys": Keys("api", "admin")}) as it:
        await it.begun(2)
        await it.publish(1)
        await it.check_all()
        for path, keys in it.servers[0].authorizations.items():
            control = path not in ("/generate", "/model_info", "/server_info", "/v1/models")
            assert keys == {"Bearer admin" if control else "Bearer api"}


async def test_nobody_answers(tmp_path: Path) -> None:
    engine = sglang_engine(["http://127.0.0.1:9"], make_weights(tmp_path / "model"))
    with pytest.raises(EngineError, match=r"127.0.0.1:9/.* can't be reached: .* `pace-agent serve` starts one"):
        await engine.start()
    await engine.aclose()


async def test_bad_ids_never_reach_a_server(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        for ids, words in (([1, 96], "id 96 is outside"), ([-1], "id -1 is outside"), ([1] * 154, "no room")):
            with pytest.raises(EngineError, match=words):
                await it.engine.generate(GenerationRequest("bad", ids, SamplingParams(3)))
        assert it.servers[0].alive
        assert it.servers[0].requests == {}


async def test_a_turn_that_fills_the_context_and_is_cut(tmp_path: Path) -> None:
    """Resumed or not, it ends with the last token that fits, and nowhere near an error of the server."""
    async with world(tmp_path, token_seconds=0.0) as it:
        assert (await it.engine.start()).context_length == 154
        it.servers[0].set_faults(cut_streams=3, cut_after=45)
        generation = await it.engine.generate(GenerationRequest("a", list(range(10)), SamplingParams(1000)))
        assert (generation.finish, generation.output_ids) == ("length", uncut(range(10), 144))


async def test_an_error_in_a_stream_is_the_turns(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.servers[0].context_length = 20  # not what it said at the start
        with pytest.raises(EngineError, match=r"/generate: Requested token count exceeds the model's maximum context"):
            await it.begin("a", 100)
        it.begin("b", 5)
        await it.check("b", [0])


async def test_proxies_of_the_environment_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with world(tmp_path) as it:
        it.begin("a")
        await it.check("a", [0])


async def test_a_stop_token_ends_a_turn_also_when_its_end_was_not_heard(tmp_path: Path) -> None:
    async with world(tmp_path, stop_after=7) as it:
        for name, cut in (("whole", 0), ("cut", 1)):
            it.servers[0].set_faults(cut_streams=cut, cut_after=7)
            it.begin(name, 30, stop_token_ids=(5, 9))
            generation: Generation = await it.tasks[name]
            assert (generation.finish, len(generation.output_ids)) == ("stop", 7)
            assert generation.output_ids[-1] == 5
            assert len(it.seen(name)) == 1
