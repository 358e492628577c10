"""The real routers, started in front of servers that only say who they are."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_routers import real_router

from pace_agent.engine.sglang.serving.router import KINDS, Router, attach_router, start_router
from pace_agent.errors import EngineError, UserError

GENERATE = {
    "rid": "turn-1",
    "input_ids": [1, 2],
    "stream": False,
    "return_logprob": True,
    "logprob_start_len": -1,
    "sampling_params": {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": False, "sampling_seed": 3},
}


class Backend:
    """A server that wants a key as SGLang does, and answers with its own URL and what it was sent."""

    def __init__(self, port: int = 0) -> None:
        backend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.body()
                allowed = self.path == "/health" or self.headers.get("Authorization") == "Bearer key"
                self.answer(200 if allowed else 401, backend.answer(self.path, body) if allowed else {})

            def body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = []
                while length := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(length))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def answer(self, status: int, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
        if path != "/generate":
            return {
                "model_path": "/tiny",
                "served_model_name": "tiny",
                "tp_size": 1,
                "dp_size": 1,
                "is_generation": True,
            }
        return {"url": self.url, "body": json.loads(body)}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def backends(count: int) -> Iterator[list[Backend]]:
    made = [Backend() for _ in range(count)]
    try:
        yield made
    finally:
        for backend in made:
            backend.close()


@pytest.fixture(scope="module", params=KINDS)
def router(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with real_router(request.param, tmp_path_factory.mktemp("router")) as made:
        yield made
        pid = made.pid
    assert not Path(f"/proc/{pid}").exists()


async def generate(router: Router, key: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        return await client.post(f"{router.url}/generate", json=GENERATE, headers={**router.headers(key), **headers})


async def reached(router: Router, keys: range) -> list[str]:
    answers = [await generate(router, f"rollout-{key}", Authorization="Bearer key") for key in keys]
    return [answer.json()["url"] for answer in answers]


@pytest.mark.timeout(600)
async def test_workers_come_and_go_and_rollouts_stay_where_they_were(router: Router) -> None:
    with backends(2) as (one, two):
        await router.add(one.url)
        await router.add(two.url)
        await router.add(two.url)  # no harm
        assert set(await router.workers()) == {one.url, two.url}

        first = await reached(router, range(24))
        assert set(first) == {one.url, two.url}
        assert await reached(router, range(24)) == first

        await router.remove(two.url)
        await router.remove(two.url)
        assert set(await router.workers()) == {one.url}
        assert set(await reached(router, range(24))) == {one.url}

        arrived = (await generate(router, "x", Authorization="Bearer key")).json()["body"]
        assert GENERATE.items() <= arrived.items()
        assert (await generate(router, "x")).status_code == 401  # the router lends nobody a key
        await router.remove(one.url)


@pytest.mark.timeout(600)
async def test_a_router_that_ends_comes_back_with_its_workers(router: Router) -> None:
    with backends(1) as (one,):
        await router.add(one.url)
        before = router.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + 300
        while True:
            assert time.monotonic() < deadline
            try:
                if router.pid != before and one.url in await router.workers():
                    break
            except EngineError:
                continue
        assert await reached(router, range(1)) == [one.url]
        await router.remove(one.url)


async def test_what_is_no_router(router: Router) -> None:
    with backends(1) as (backend,), pytest.raises(EngineError, match="wants a key"):
        await attach_router(backend.url).workers()
    with pytest.raises(EngineError, match="can't be reached"):
        await attach_router(backend.url).add("http://127.0.0.1:1")


def test_a_router_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pip install smg"):
        start_router("smg", tmp_path, python=sys.executable)
