"""The fake SGLang server answers with the shapes that the real one was recorded with, and has its traps."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_sglang import FakeServer
from fake_sglang_turns import is_stale, weights_of

RECORDED = Path(__file__).parent / "data" / "sglang"
OPTIONAL = {"memory_usage"}
"""Left shorter than the real one: nobody reads it."""


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def events(text: str) -> list[Any]:
    """The JSON of a stream's events; its last one must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1].strip() == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def shape(value: Any, name: str = "") -> Any:
    """Names and kinds of everything in `value`; of a list, the shape of its first item."""
    if name in OPTIONAL:
        return "..."
    if isinstance(value, dict):
        return {key: shape(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value[:1]]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[FakeServer, httpx.AsyncClient]]:
    async with (
        FakeServer(**settings) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30.0, verify=False) as client,
    ):
        server.abort_poll_seconds = 0.01
        yield server, client


def ask(rid: str = "turn-1", tokens: int = 6, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    body = {"rid": rid, "input_ids": ids or [1, 2, 3], "return_logprob": True, "stream": True}
    return {**body, "sampling_params": {"max_new_tokens": tokens, **more.pop("sampling", {})}, **more}


async def generate(client: httpx.AsyncClient, **asked: Any) -> list[Any]:
    return events((await client.post("/generate", json=ask(**asked))).text)


async def control(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json() if response.content else None


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the server's counters are all there is to wait for
            await asyncio.sleep(0.002)


def surprises(last: Any) -> list[float]:
    return [entry[0] for entry in last["meta_info"]["output_token_logprobs"]]


# -- against the recordings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/model_info", "model_info"),
        ("/server_info", "server_info"),
        ("/v1/models", "v1_models"),
        ("/v1/loads?include=core", "loads"),
    ],
)
async def test_what_get_answers(path: str, name: str) -> None:
    async with serving() as (_, client):
        answer = (await client.get(path)).json()
    for field in ("accelerator", "timestamp"):  # of the machine, and of the moment
        answer.pop(field, None)
    real = {key: value for key, value in recorded(name).items() if key not in ("accelerator", "timestamp")}
    assert shape(answer) == shape(real)


async def test_what_control_calls_answer() -> None:
    async with serving() as (_, client):
        assert await control(client, "/pause_generation", mode="retract") == recorded("pause")
        update = {"model_path": "/models/tiny", "weight_version": "1"}
        assert await control(client, "/update_weights_from_disk", **update) == recorded("update")
        assert await control(client, "/continue_generation") == recorded("continue")
        assert await control(client, "/update_weight_version", new_version="1") == recorded("update_version")


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("error_no_ids", "/generate", {"input_ids": [], "sampling_params": {}}),
        ("error_not_found", "/get_weight_version", {}),
        ("error_pause_mode", "/pause_generation", {"mode": "bad"}),
        ("error_pause_without_body", "/pause_generation", None),
        ("error_prompt_too_long", "/generate", {"input_ids": [1] * 200}),
        ("error_too_many_tokens", "/generate", {"input_ids": [1] * 100, "sampling_params": {"max_new_tokens": 100}}),
        ("error_unknown_parameter", "/generate", {"input_ids": [1], "sampling_params": {"foo": 1}}),
        ("error_update_missing_folder", "/update_weights_from_disk", {"model_path": "/models/missing"}),
        ("error_no_key", "/generate", {"input_ids": [1]}),
        ("error_wrong_key", "/generate", {"input_ids": [1]}),
        ("error_control_with_api_key", "/pause_generation", {"mode": "retract"}),
    ],
)
async def test_refusals(name: str, path: str, body: Any) -> None:
    keys = {"error_no_key": "", "error_wrong_key": "Bearer x", "error_control_with_api_key": "Bearer api"}
    locked = {"api_key": "api", "admin_key": "admin"} if name in keys else {}
    async with serving(check_paths=True, **locked) as (_, client):
        headers = {"Authorization": keys[name]} if keys.get(name) else {}
        response = await client.request(
            "GET" if path == "/get_weight_version" else "POST", path, json=body, headers=headers
        )
    real = recorded(name)
    assert response.status_code == real["status"]
    assert shape(response.json()) == shape(real["body"])
    if path == "/generate":
        assert response.json() == real["body"]


async def test_a_refusal_in_a_stream() -> None:
    async with serving() as (_, client):
        answers = await generate(client, ids=[1] * 200)
    assert answers == events((RECORDED / "generate_stream_error.txt").read_text())


async def test_an_answer_in_one_piece() -> None:
    async with serving() as (_, client):
        answer = (await client.post("/generate", json=ask(stream=False))).json()
    assert shape(answer) == shape(recorded("generate_final"))


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_stream(incremental: bool) -> None:
    async with serving(token_seconds=0.005, incremental=incremental) as (_, client):
        answers = await generate(client)
    name = "generate_stream_incremental.txt" if incremental else "generate_stream.txt"
    real = events((RECORDED / name).read_text())
    assert [shape(answer) for answer in answers] == [shape(answer) for answer in real]
    assert [len(answer["output_ids"]) for answer in answers] == [len(answer["output_ids"]) for answer in real]


async def test_a_stream_over_two_versions() -> None:
    async with serving(token_seconds=0.005) as (server, client):
        task = asyncio.create_task(generate(client, tokens=16))
        await until(lambda: server.scheduler.sampled_tokens >= 8)
        await control(client, "/pause_generation", mode="retract")
        assert shape((await client.get("/v1/loads")).json()["loads"]) == shape(recorded("loads_paused")["loads"])
        await control(client, "/update_weights_from_disk", model_path="/models/tiny", weight_version="1")
        assert not task.done()
        await control(client, "/continue_generation")
        last = (await task)[-1]
    real = events((RECORDED / "generate_stream_two_versions.txt").read_text())[-1]
    assert shape(last) == shape(real)
    meta = last["meta_info"]
    assert meta["num_retractions"] == 1
    cut = meta["weight_versions"][0]["end"]
    assert meta["weight_versions"] == [
        {"version": "0", "start": 0, "end": cut},
        {"version": "1", "start": cut, "end": 16},
    ]
    assert [weights_of(one) for one in surprises(last)] == [0] * cut + [1] * (16 - cut)
    assert not any(map(is_stale, surprises(last)))


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_aborts(stream: bool, incremental: bool) -> None:
    def read(response: httpx.Response) -> Any:
        return events(response.text)[-1] if stream else response.json()

    async with serving(token_seconds=0.005, incremental=incremental, max_running=1) as (server, client):
        tasks = [asyncio.create_task(client.post("/generate", json=ask("running", 100, stream=stream)))]
        await until(lambda: server.scheduler.sampled_tokens)
        tasks.append(asyncio.create_task(client.post("/generate", json=ask("queued", 100, stream=stream))))
        await until(lambda: server.running == 2)
        await control(client, "/abort_request", rid="unknown")
        for rid in ("queued", "running"):
            await control(client, "/abort_request", rid=rid)
        running, queued = [read(await task) for task in tasks]
        assert server.aborted == ["queued", "running"]
    name = "abort_running_stream_incremental.txt" if incremental else "abort_running_stream.txt"
    real = events((RECORDED / name).read_text())[-1] if stream else recorded("abort_running")
    assert shape(running) == shape(real)
    assert shape(queued) == shape(recorded("abort_queued"))
    assert running["meta_info"]["completion_tokens"] > 0


# -- the traps -------------------------------------------------------------------------------------------------------


async def test_tokens_depend_on_the_sequence_alone() -> None:
    async with serving() as (server, client):
        whole = (await generate(client, tokens=30))[-1]["output_ids"]
        rest = (await generate(client, rid="other", tokens=20, ids=[1, 2, 3, *whole[:10]]))[-1]["output_ids"]
        assert whole[10:] == rest
        server.stop_after = 4
        last = (await generate(client, tokens=30, sampling={"stop_token_ids": [7]}))[-1]
        assert (last["output_ids"], last["meta_info"]["finish_reason"]) == (
            [*whole[:3], 7],
            {"type": "stop", "matched": 7},
        )
        last = (await generate(client, tokens=9, sampling={"stop_token_ids": [7], "ignore_eos": True}))[-1]
        assert last["output_ids"] == whole[:9]


async def test_chunks_come_first_at_once_and_then_by_the_interval() -> None:
    async with serving(token_seconds=0.005) as (_, client):
        answers = await generate(client, tokens=10, sampling={"stream_interval": 4})
    assert [len(answer["output_ids"]) for answer in answers] == [1, 5, 9, 10]


async def test_the_gate_holds_requests_and_no_abort_reaches_them() -> None:
    async with serving() as (server, client):
        await control(client, "/pause_generation", mode="retract")
        task = asyncio.create_task(generate(client, rid="held"))
        gone = asyncio.create_task(generate(client, rid="gone"))
        await until(lambda: server.gated == 2)
        gone.cancel()
        await until(lambda: server.gated == 1)
        await control(client, "/abort_request", rid="held")
        assert (await client.post("/flush_cache")).text.startswith("Cache flushed.")
        assert not task.done()
        await control(client, "/continue_generation")
        assert (await task)[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
        assert server.aborted == []


async def test_a_pause_that_aborts_gives_partials() -> None:
    async with serving(token_seconds=0.005) as (server, client):
        task = asyncio.create_task(generate(client, tokens=100))
        await until(lambda: server.scheduler.sampled_tokens > 3)
        await control(client, "/pause_generation")
        last = (await task)[-1]
        assert last["meta_info"]["finish_reason"]["message"] == "Aborted"
        assert 3 < len(last["output_ids"]) == last["meta_info"]["completion_tokens"] < 100
        assert (server.paused, server.running) == (True, 0)


async def test_an_abort_while_retracted_loses_what_was_not_sent() -> None:
    async with serving(token_seconds=0.005) as (server, client):
        bodies = [
            ask("fine", 100),
            ask("coarse", 100, sampling={"stream_interval": 90}),
            ask("whole", 100, stream=False),
        ]
        tasks = [asyncio.create_task(client.post("/generate", json=body)) for body in bodies]
        await until(lambda: server.scheduler.sampled_tokens > 30)
        await control(client, "/pause_generation", mode="retract")
        counts = [len(turn.ids) for turn in server.scheduler.waiting]
        await control(client, "/abort_request", abort_all=True)
        fine, coarse = [events((await task).text)[-1] for task in tasks[:2]]
        whole = (await tasks[2]).json()
    assert len(fine["output_ids"]) == counts[0] > 5
    assert (len(coarse["output_ids"]), len(whole["output_ids"])) == (1, 0)
    assert shape(whole) == shape(recorded("abort_queued"))


async def test_an_abort_takes_ids_along_that_begin_alike() -> None:
    async with serving(token_seconds=0.005) as (server, client):
        tasks = [asyncio.create_task(generate(client, rid=rid, tokens=60)) for rid in ("a-1", "a-10", "b")]
        await until(lambda: server.running == 3)
        await control(client, "/abort_request", rid="a-1")
        ends = [(await task)[-1]["meta_info"]["finish_reason"]["type"] for task in tasks]
    assert ends == ["abort", "abort", "length"]


async def test_one_rid_runs_once_and_is_aborted_late_when_used_again() -> None:
    async with serving(token_seconds=0.005) as (server, client):
        server.reuse_seconds = 0.1
        task = asyncio.create_task(generate(client, tokens=20))
        await until(lambda: server.running)
        assert (await generate(client))[0]["error"]["message"] == "Duplicate request ID detected: turn-1"
        await task
        assert (await generate(client, tokens=150))[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(server.requests["turn-1"]) == 3


async def test_a_client_that_leaves_aborts_its_request() -> None:
    async with serving(token_seconds=0.005) as (server, client):
        server.disconnect_seconds = 0.05
        for stream in (True, False):
            task = asyncio.create_task(client.post("/generate", json=ask(f"left-{stream}", 150, stream=stream)))
            await until(lambda: server.running)
            task.cancel()
            await until(lambda: not server.running)
        assert server.aborted == ["left-True", "left-False"]


async def test_near_the_end_of_the_context() -> None:
    async with serving() as (_, client):
        last = (await generate(client, ids=[1] * 100, tokens=60))[-1]
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 58}
        last = (await generate(client, ids=[1] * 154, tokens=4))[-1]["meta_info"]["finish_reason"]
        assert (last["type"], last["status_code"]) == ("abort", 400)


async def test_sessions_that_are_not_there() -> None:
    async with serving() as (_, client):
        name = await control(client, "/open_session", capacity_of_str_len=10)
        again = await client.post("/open_session", json={"capacity_of_str_len": 10, "session_id": name})
        assert again.status_code == 400
        assert "still open" in again.json()["error"]["message"]
        body = ask(stream=False, session_params={"id": "none"})
        refusal = await client.post("/generate", json=body)
        assert refusal.status_code == 400
        assert refusal.json() == {"error": {"message": "Invalid request: session id none does not exist"}}
        last = (await generate(client, session_params={"id": "none"}))[-1]
        assert last["meta_info"]["finish_reason"]["status_code"] == 400


async def test_updates_by_tensors_and_by_group() -> None:
    async with serving() as (server, client):
        tensors = {"serialized_named_tensors": ["eA=="], "weight_version": "1", "flush_cache": True}
        spread = {"names": [], "dtypes": [], "shapes": [], "weight_version": "2"}
        assert (await client.post("/update_weights_from_tensor", json=tensors)).status_code == 400
        await control(client, "/pause_generation", mode="retract")
        await control(client, "/begin_weight_update")
        assert (await client.post("/begin_weight_update", json={})).status_code == 400
        await control(client, "/update_weights_from_tensor", **tensors)
        assert server.version == "1"
        refusal = await client.post("/update_weights_from_distributed", json=spread)
        assert "init_weights_update_group" in refusal.json()["message"]
        group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
        await control(client, "/init_weights_update_group", **group)
        await control(client, "/update_weights_from_distributed", **spread)
        await control(client, "/end_weight_update")
        await control(client, "/destroy_weights_update_group")
        assert server.version == "2"
        assert server.paths()[:3] == ["/update_weights_from_tensor", "/pause_generation", "/begin_weight_update"]


async def test_the_cache_of_old_weights_shows() -> None:
    async with serving(token_seconds=0.005) as (server, client):
        task = asyncio.create_task(generate(client, tokens=40))
        await until(lambda: server.scheduler.sampled_tokens > 3)
        await control(client, "/pause_generation", mode="in_place")
        update = {"model_path": "/models/tiny", "weight_version": "1"}
        refusal = await client.post("/update_weights_from_disk", json=update)
        assert refusal.status_code == 400
        assert "were updated, but the cache was not flushed" in refusal.json()["message"]
        assert (server.version, server.scheduler.version) == ("0", "1")
        await control(client, "/continue_generation")
        last = (await task)[-1]
        cut = last["meta_info"]["weight_versions"][0]["end"]
        assert weights_of(surprises(last)[cut]) == 0  # the span begins one token early
        assert all(map(is_stale, surprises(last)[cut:]))
        assert any(map(is_stale, surprises((await generate(client))[-1])))
        await client.post("/flush_cache")
        assert not any(map(is_stale, surprises((await generate(client))[-1])))


async def test_an_update_without_a_pause_waits_for_what_runs() -> None:
    async with serving(token_seconds=0.005) as (server, client):
        task = asyncio.create_task(generate(client, tokens=30))
        await until(lambda: server.running)
        await control(client, "/update_weights_from_disk", model_path="x", weight_version="1")
        assert (await task)[-1]["meta_info"]["weight_version"] == "0"


async def test_naming_a_version_aborts_unless_told_otherwise() -> None:
    async with serving(token_seconds=0.005) as (server, client):
        task = asyncio.create_task(generate(client, tokens=140))
        await until(lambda: server.running)
        await control(client, "/update_weight_version", new_version="5", abort_all_requests=False)
        await asyncio.sleep(0.02)
        assert server.running
        await control(client, "/update_weight_version", new_version="6")
        assert (await task)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.version == "6"
        assert not any(map(is_stale, surprises((await generate(client, rid="named"))[-1])))


async def test_health_fails_while_paused() -> None:
    async with serving(health_seconds=0.2, api_key="api") as (_, client):
        assert (await client.get("/health")).status_code == 200
        client.headers["Authorization"] = "Bearer api"
        await control(client, "/pause_generation", mode="retract")
        assert (await client.get("/health")).status_code == 503


async def test_memory_and_pace() -> None:
    async with serving() as (server, client):
        await control(client, "/slow_down", forward_sleep_time=0.001)
        await control(client, "/release_memory_occupation")
        await control(client, "/resume_memory_occupation")
        assert server.alive
        with pytest.raises(httpx.TransportError):
            await client.post("/resume_memory_occupation", json={})
        assert not server.alive


# -- faults ----------------------------------------------------------------------------------------------------------


async def test_an_id_outside_the_vocabulary_ends_the_server_and_it_can_be_restarted() -> None:
    async with serving(token_seconds=0.005) as (server, client):
        task = asyncio.create_task(generate(client, tokens=100))
        await until(lambda: server.running)
        server.reset_version("7")
        with pytest.raises(httpx.TransportError):
            await generate(client, rid="bad", ids=[96])
        with pytest.raises(httpx.TransportError):
            await task
        with pytest.raises(httpx.ConnectError):
            await client.get("/model_info")
        await server.restart()
        assert (await client.get("/model_info")).json()["weight_version"] == "0"
        assert (await generate(client))[-1]["meta_info"]["completion_tokens"] == 6
        assert set(server.requests) == {"turn-1", "bad"}


async def test_failed_updates() -> None:
    async with serving() as (server, client):
        update = {"model_path": "x", "weight_version": "1"}
        server.faults.fail_updates = 1
        refusal = await client.post("/update_weights_from_disk", json=update)
        assert (refusal.status_code, refusal.json()["success"], server.scheduler.version) == (400, False, "0")
        server.set_faults(fail_updates=1, fail_after_change=True)
        await client.post("/update_weights_from_disk", json=update)
        assert (server.version, server.scheduler.version) == ("0", "1")
        await control(client, "/update_weights_from_disk", **update)
        assert server.version == "1"


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_cut_stream_has_its_tokens_and_no_end(incremental: bool) -> None:
    async with serving(incremental=incremental) as (server, client):
        server.set_faults(cut_streams=1, cut_after=3)
        pieces: list[str] = []

        async def read() -> None:
            async with client.stream("POST", "/generate", json=ask(tokens=20)) as response:
                async for piece in response.aiter_text():
                    pieces.append(piece)  # noqa: PERF401 - what came before the error counts

        with pytest.raises(httpx.RemoteProtocolError):
            await read()
        text = "".join(pieces)
        chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
        assert all(one["meta_info"]["finish_reason"] is None for one in chunks)
        got = [token for one in chunks for token in one["output_ids"]] if incremental else chunks[-1]["output_ids"]
        whole = await generate(client, rid="again", tokens=20)
        ids = [token for one in whole for token in one["output_ids"]] if incremental else whole[-1]["output_ids"]
        assert (got, len(ids)) == (ids[:3], 20)


async def test_dropped_answers_are_computed() -> None:
    async with serving() as (server, client):
        server.faults.drop_answers = 1
        with pytest.raises(httpx.RemoteProtocolError):
            await generate(client)
        assert [(seen.finish, seen.tokens) for seen in server.requests["turn-1"]] == [("length", 6)]


async def test_the_other_faults() -> None:
    async with serving(token_seconds=0.002) as (server, client):
        server.set_faults(error_requests=1, hide_versions=True, missing=["/v1/loads"], fail_calls={"/flush_cache": 1})
        assert (await client.post("/generate", json=ask())).status_code == 500
        assert "weight_versions" not in (await generate(client))[-1]["meta_info"]
        assert (await client.get("/v1/loads")).status_code == 404
        assert [(await client.post("/flush_cache")).status_code for _ in range(2)] == [500, 200]
        server.set_faults(reject_requests=2, stall=True)
        last = (await generate(client))[-1]
        assert last["meta_info"]["finish_reason"]["status_code"] == 503
        refusal = await client.post("/generate", json=ask(stream=False))
        assert (refusal.status_code, refusal.json()["code"]) == (503, 503)
        task = asyncio.create_task(generate(client))
        await asyncio.sleep(0.05)
        assert not task.done()
        server.faults.stall = False
        await task
        with pytest.raises(AttributeError, match="no fault"):
            server.set_faults(unknown=1)


async def test_it_counts_streams_connections_and_keys() -> None:
    async with serving(token_seconds=0.005, api_key="api", admin_key="admin") as (server, client):
        client.headers["Authorization"] = "Bearer api"
        await asyncio.gather(*(generate(client, rid=f"turn-{i}") for i in range(8)))
        client.headers["Authorization"] = "Bearer admin"
        await control(client, "/continue_generation")
        assert (server.peak_streams, server.peak_connections, server.streams) == (8, 8, 0)
        assert server.authorizations == {"/generate": {"Bearer api"}, "/continue_generation": {"Bearer admin"}}
        seen = server.requests["turn-3"][0]
        assert (seen.input_ids, seen.max_new_tokens, seen.stream) == ([1, 2, 3], 6, True)


async def test_as_a_process() -> None:
    program = Path(__file__).with_name("fake_sglang.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), "--stop-after", "2", "--eos-token-id", "5", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
            assert (await generate(client))[-1]["output_ids"][1:] == [5]
            assert (await client.post("/fake/faults", json={"nope": 1})).status_code == 400
            await client.post("/fake/faults", json={"error_requests": 1, "reset_version": "3"})
            assert (await client.post("/generate", json=ask())).status_code == 500
            state = (await client.get("/fake/state")).json()
            assert (state["version"], state["requests"], state["finished"]) == ("3", 2, 1)
            await client.post("/fake/faults", json={"die": True, "restart_after": 0.1})
            state = {"deaths": 0, "version": "3"}
            async with asyncio.timeout(10):
                while not state["deaths"]:
                    await asyncio.sleep(0.01)
                    with suppress(httpx.TransportError):
                        state = (await client.get("/fake/state")).json()
            assert (state["deaths"], state["version"]) == (1, "0")
    finally:
        process.terminate()
        await process.communicate()
