"""A fake of SGLang 0.5.23's HTTP server, faithful to its protocol: for tests, and cheap enough for 1,000 streams.

In a test's event loop: `async with FakeServer(...) as server:` and then `server.url`.
As a process: `python tests/fake_sglang.py --port 0 ...`, which prints its URL when it is ready.

What it shares with the real server, traps included:

* `/generate` waits at a gate while paused: before its checks, and out of reach of `/abort_request`.
* A rid that is aborted takes every running rid along that begins with it.
* A stream that ended aborts, 2 s later, whichever request then runs under its rid.
* A turn aborted in the queue has neither `prompt_tokens` nor the tokens that were not sent yet.
* An update whose flush is refused has changed the weights, though `/model_info` names the old version.
* Within 6 tokens of the context's end a prompt passes the checks and then ends with an abort of status 400; the
  budget of a turn is cut to 2 less than fits.

It has no weights: see `fake_sglang_turns` for what its tokens and log-probabilities say. The paths `/fake/...` are its
own: POST /fake/faults sets `Faults` by name, GET /fake/state reads the counters.
"""

import argparse
import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

from aiohttp import web
from fake_sglang_checks import CONTROL, decide, invalid, refusal_of
from fake_sglang_control import Control
from fake_sglang_faults import Call, Faults, Seen
from fake_sglang_turns import Scheduler, Turn, chunk

NORMAL = ("/generate", "/model_info", "/get_model_info", "/server_info", "/v1/models", "/v1/loads")
OPEN = ("/health", "/health_generate", "/ready", "/ping")


class FakeServer:
    """The server. It keeps its counters, keys, port and faults when it dies and is restarted; the rest starts anew."""

    def __init__(
        self,
        *,
        port: int = 0,
        version: str = "0",
        vocab_size: int = 96,
        context_length: int = 160,
        eos_token_id: int | None = None,
        token_seconds: float = 0.0,
        stream_interval: int = 1,
        incremental: bool = False,
        max_running: int = 4096,
        api_key: str = "",
        admin_key: str = "",
        model_path: str = "/models/tiny",
        architecture: str = "Qwen3ForCausalLM",
        sglang_version: str = "0.5.23",
        dp_size: int = 1,
        stop_after: int | None = None,
        stop_rate: float = 0.0,
        update_seconds: float = 0.0,
        health_seconds: float = 20.0,
        check_paths: bool = False,
        keepalive_seconds: float = 30.0,
    ) -> None:
        self.port, self.first_version, self.vocab_size, self.context_length = port, version, vocab_size, context_length
        self.eos_token_id, self.token_seconds, self.stream_interval = eos_token_id, token_seconds, stream_interval
        self.incremental, self.max_running, self.api_key, self.admin_key = incremental, max_running, api_key, admin_key
        self.model_path, self.stop_after, self.stop_rate = model_path, stop_after, stop_rate
        self.architecture, self.sglang_version, self.dp_size = architecture, sglang_version, dp_size
        self.update_seconds, self.health_seconds, self.check_paths = update_seconds, health_seconds, check_paths
        # The real one closes idle connections after 5 s, but, unlike this one, not those that nothing came over yet.
        self.keepalive_seconds = keepalive_seconds
        self.disconnect_seconds = 4.0
        self.reuse_seconds = 2.0
        self.abort_poll_seconds = 1.0
        self.faults = Faults()
        self.requests: dict[str, list[Seen]] = {}
        self.calls: list[Call] = []
        self.authorizations: dict[str, set[str]] = {}
        self.statuses: Counter[int] = Counter()
        self.past_aborts: list[str] = []
        self.streams = self.peak_streams = self.peak_connections = self.deaths = 0
        self.alive = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: set[asyncio.TimerHandle] = set()

    # -- what a test looks at ------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def version(self) -> str:
        """The version that `/model_info` reports."""
        return self.control.version

    @property
    def paused(self) -> bool:
        return self.control.paused

    @property
    def running(self) -> int:
        """Turns that run or are queued."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    @property
    def gated(self) -> int:
        """Requests at the gate."""
        return sum(not turn.dispatched for turn in self.control.turns.values())

    @property
    def connections(self) -> int:
        return len(self._web.connections)

    @property
    def aborted(self) -> list[str]:
        """The rids of turns that ended by an abort, in order."""
        return self.past_aborts + self.scheduler.aborted

    def paths(self) -> list[str]:
        """The control calls in order."""
        return [call.path for call in self.calls]

    def reset_version(self, version: str | None = None) -> None:
        """As after a restart that nobody saw."""
        self.control.version = self.scheduler.version = self.first_version if version is None else version

    def state(self) -> dict[str, Any]:
        """The counters as JSON, for when the server is a process."""
        names = "version paused running gated streams peak_streams connections peak_connections deaths"
        return {
            **{name: getattr(self, name) for name in names.split()},
            "requests": sum(map(len, self.requests.values())),
            "finished": sum(bool(seen.finish) for many in self.requests.values() for seen in many),
            "rids": len(self.requests),
            "repeated_rids": [rid for rid, many in self.requests.items() if len(many) > 1][:100],
            "aborted": len(self.aborted),
            "sampled_tokens": self.scheduler.sampled_tokens,
            "calls": [[call.path, call.body] for call in self.calls],
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "cpu_seconds": time.process_time(),
        }

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen; after `die()` on the same port, with the version that it was made with."""
        self.scheduler = Scheduler(self, self.first_version)
        self.control = Control(self, self.scheduler)
        self._web = web.Server(
            self._handle, handler_cancellation=True, access_log=None, keepalive_timeout=self.keepalive_seconds
        )
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._web, "127.0.0.1", self.port, backlog=4096)
        self.port = self._listener.sockets[0].getsockname()[1]
        self.alive = True
        self._spawn(self.scheduler.run()).add_done_callback(self._ticked)

    restart = start

    def _ticked(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.kill()
            raise error

    def kill(self) -> None:
        """The process is gone: the port is closed, and every connection cut."""
        if not self.alive:
            return
        self.alive = False
        self.deaths += 1
        self._listener.close()
        for connection in list(self._web.connections):
            if connection.transport is not None:
                connection.transport.abort()
        for task in self._tasks:
            task.cancel()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.past_aborts += self.scheduler.aborted

    async def die(self) -> None:
        """`kill`, and wait until nothing of it runs any more."""
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._web.shutdown(1.0)

    async def __aenter__(self) -> "FakeServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _later(self, seconds: float, call: Callable[[], object]) -> None:
        def fire() -> None:
            self._timers.discard(timer)
            call()

        timer = asyncio.get_running_loop().call_later(seconds, fire)
        self._timers.add(timer)

    # -- one HTTP request ----------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            response = await self._answer(request)
        except ConnectionError:  # the client left before or while it was answered
            return _cut(request)
        self.statuses[response.status] += 1
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.peak_connections = max(self.peak_connections, len(self._web.connections))
        path = request.path
        if path.startswith("/fake/"):
            return await self._own(path, request)
        authorization = request.headers.get("Authorization", "")
        self.authorizations.setdefault(path, set()).add(authorization)
        denied = decide(path, authorization, self.api_key, self.admin_key)
        if denied:
            return web.json_response({"error": "Unauthorized" if denied == 401 else "Forbidden"}, status=denied)
        if path in self.faults.missing or path not in (*NORMAL, *OPEN, *CONTROL):
            return web.json_response({"detail": "Not Found"}, status=404)
        for faults in (self.faults.hang_calls, self.faults.fail_calls):
            if faults.get(path, 0) > 0:
                faults[path] -= 1
                if faults is self.faults.hang_calls:
                    await asyncio.Event().wait()
                return web.Response(status=500, text="Internal Server Error")
        if path in OPEN:
            return await self.control.health(path)
        if path in NORMAL[1:]:
            if request.method != "GET":
                return web.json_response({"detail": "Method Not Allowed"}, status=405)
            return web.json_response(self.control.read(path))
        if request.method not in CONTROL.get(path, ("POST", "PUT")):
            return web.json_response({"detail": "Method Not Allowed"}, status=405)
        raw = await request.read()
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            return invalid("json_invalid", "JSON decode error", None)
        if path == "/generate":
            return await self._generate(request, body)
        self.calls.append(Call(path, body, time.monotonic()))
        return await self.control.call(path, body, dict(request.query))

    async def _own(self, path: str, request: web.BaseRequest) -> web.StreamResponse:
        if path == "/fake/state":
            return web.json_response(self.state())
        changes = await request.json()
        known = {one.name for one in fields(Faults)} | {"die", "restart_after", "reset_version", "stop_after"}
        if unknown := set(changes) - known:
            return web.json_response({"error": f"unknown faults {sorted(unknown)}"}, status=400)
        self.set_faults(**changes)
        return web.json_response({"ok": True})

    def set_faults(self, **changes: Any) -> None:
        """Set `Faults` by name, and `stop_after`; `reset_version=True` or a version; `die=True`, for good or until
        `restart_after` seconds."""
        after, die = changes.pop("restart_after", None), changes.pop("die", False)
        if version := changes.pop("reset_version", None):
            self.reset_version(None if version is True else version)
        if "stop_after" in changes:
            self.stop_after = changes.pop("stop_after")
        for name, value in changes.items():
            if not hasattr(self.faults, name):
                raise AttributeError(f"no fault {name!r}")
            setattr(self.faults, name, value)
        if die:
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, self.kill)
            if after is not None:
                loop.call_later(0.05 + after, lambda: loop.create_task(self.start()))

    def take(self, fault: str) -> bool:
        """Is this one a victim? Then one fewer is left."""
        left = int(getattr(self.faults, fault))
        if left > 0:
            setattr(self.faults, fault, left - 1)
        return left > 0

    # -- /generate -----------------------------------------------------------------------------------------------

    async def _generate(self, request: web.BaseRequest, body: Any) -> web.StreamResponse:
        wrong = refusal_of(body)
        if wrong:
            return web.json_response({"error": wrong}, status=400)
        sampling = body.get("sampling_params") or {}
        rid = body.get("rid") or uuid.uuid4().hex
        ids = body.get("input_ids") or []
        stream = bool(body.get("stream"))
        seen = Seen(rid, ids, sampling.get("max_new_tokens", 128), stream, dict(request.headers), time.monotonic())
        self.requests.setdefault(rid, []).append(seen)
        if self.take("error_requests"):
            return web.Response(status=500, text="Internal Server Error")
        turn = Turn(rid, ids, body, self.stream_interval)
        self.streams += 1
        self.peak_streams = max(self.peak_streams, self.streams)
        try:
            if self.take("drop_answers"):
                with suppress(ValueError):
                    async with self.control.admitted(turn, body):
                        while turn.finish is None:
                            await self._progress(turn)
                        self._ended(seen, turn)
                return _cut(request)
            if stream:
                return await self._stream(request, seen, turn, body)
            return await self._whole(seen, turn, body)
        finally:
            self.streams -= 1

    async def _progress(self, turn: Turn) -> None:
        await turn.ready.wait()
        turn.ready.clear()

    def _ended(self, seen: Seen, turn: Turn) -> None:
        seen.finish = turn.finish["type"] if turn.finish else ""
        seen.tokens = len(turn.ids)

    def _chunk(self, turn: Turn) -> str:
        text = chunk(
            turn,
            self.control.version,
            incremental=self.incremental and turn.stream,
            versions=not self.faults.hide_versions,
        )
        if self.incremental and turn.stream:
            turn.ids_json = turn.logprobs_json = ""
            turn.delivered = turn.sent
        return text

    async def _stream(
        self, request: web.BaseRequest, seen: Seen, turn: Turn, body: dict[str, Any]
    ) -> web.StreamResponse:
        control = self.control
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        writer = await response.prepare(request)
        assert writer is not None
        writer.send_headers()
        cut = self.faults.cut_after if self.take("cut_streams") else None
        if cut is not None:
            turn.interval = 1
        try:
            async with control.admitted(turn, body):
                while True:
                    await self._progress(turn)
                    if cut is not None and (turn.sent >= cut or turn.finish is not None):
                        turn.cut_to(cut)
                        if turn.sent:
                            await writer.write(f"data: {self._chunk(turn)}\n\n".encode())
                        return _cut(request, response)
                    if turn.finish is not None:
                        self._ended(seen, turn)
                        break
                    await writer.write(f"data: {self._chunk(turn)}\n\n".encode())
            last = self._chunk(turn)
        except ValueError as error:
            said = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
            last = json.dumps({"error": said})
        finally:
            self._later(self.reuse_seconds, lambda: control.abort(turn.rid))
        await writer.write(f"data: {last}\n\ndata: [DONE]\n\n".encode())
        await response.write_eof()
        return response

    async def _whole(self, seen: Seen, turn: Turn, body: dict[str, Any]) -> web.StreamResponse:
        """The answer in one piece. A client that leaves is noticed late, and only when the turn runs."""
        control = self.control

        async def compute() -> None:
            async with control.admitted(turn, body):
                while turn.finish is None:
                    await self._progress(turn)
                self._ended(seen, turn)

        work = self._spawn(compute())
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(lambda task: task.cancelled() or task.exception())
            if self.alive:
                self._spawn(self._notice(turn, control))
            raise
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        assert turn.finish is not None
        status = turn.finish.get("status_code")
        if status == 400:
            return web.json_response({"error": {"message": turn.finish["message"]}}, status=400)
        if status is not None:
            said = {"object": "error", "message": turn.finish["message"], "type": str(status), "param": None}
            return web.json_response({**said, "code": status}, status=status)
        return web.Response(text=self._chunk(turn), content_type="application/json")

    async def _notice(self, turn: Turn, control: Control) -> None:
        """See, now and then, that nobody waits for a turn any more."""
        while turn.finish is None and not turn.abort_sent:
            await asyncio.sleep(self.disconnect_seconds)
            if turn.finish is None and turn.dispatched:
                control.abort(turn.rid)


def _cut(request: web.BaseRequest, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """Close the connection; what was written before still arrives."""
    if request.transport is not None:
        request.transport.close()
    return response or web.Response(status=500)


async def serve(arguments: argparse.Namespace) -> None:
    settings = {name: value for name, value in vars(arguments).items() if value is not None}
    async with FakeServer(**settings) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="A fake SGLang server on a loopback port.")
    for name in (
        "port",
        "vocab_size",
        "context_length",
        "eos_token_id",
        "stream_interval",
        "max_running",
        "stop_after",
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in ("token_seconds", "stop_rate", "update_seconds", "health_seconds"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    for name in ("version", "api_key", "admin_key", "model_path"):
        parser.add_argument(f"--{name.replace('_', '-')}")
    parser.add_argument("--incremental", action="store_true")
    parser.add_argument("--check-paths", action="store_true")
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
