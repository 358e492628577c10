"""The fake SGLang server's front end: its gate, its lock, its keys, its control calls and what they answer.

What always holds: a request is in `turns` from its arrival until it ends; weights change under the write lock, or while
paused; `version` is what the front end was told, the scheduler's own may be ahead of it after a half-failed update.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web
from fake_sglang_checks import REQUIRED, invalid, said
from fake_sglang_turns import Scheduler, Turn, refused


class Settings(Protocol):
    """What the front end needs of the server around it."""

    model_path: str
    first_version: str
    architecture: str
    sglang_version: str
    dp_size: int
    context_length: int
    incremental: bool
    stream_interval: int
    update_seconds: float
    health_seconds: float
    abort_poll_seconds: float
    check_paths: bool
    faults: Any

    def kill(self) -> None: ...

    def take(self, fault: str) -> bool: ...


class Control:
    """The front end of one life of the server."""

    def __init__(self, server: Settings, scheduler: Scheduler) -> None:
        self.server, self.scheduler = server, scheduler
        self.version = scheduler.version
        self.path = server.model_path
        self.paused = False
        self.turns: dict[str, Turn] = {}
        self.sessions: set[str] = set()
        self.groups: set[str] = set()
        self.released: set[str] = set()
        self.updating = False
        self._readers = self._writers = 0
        self._changed = asyncio.Event()
        self._pausing = asyncio.Lock()
        scheduler.finished = self._finished

    # -- the gate, and the lock between turns and updates ----------------------------------------------------------

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _change(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def _finished(self, turn: Turn) -> None:
        if self.turns.get(turn.rid) is turn:
            del self.turns[turn.rid]

    @asynccontextmanager
    async def admitted(self, turn: Turn, body: dict[str, Any]) -> AsyncIterator[None]:
        """Run a turn: past the gate and the checks, into the queue; who leaves early aborts it. ValueError: a 400."""
        if not turn.input_ids:
            raise ValueError("input_ids cannot be empty.")
        if turn.rid in self.turns:
            raise ValueError(f"Duplicate request ID detected: {turn.rid}")
        self.turns[turn.rid] = turn
        try:
            await self._until(lambda: not self.paused)
            await self._until(lambda: not self._writers)
            self._readers += 1
            try:
                self._check(turn)
                self._dispatch(turn, body)
                yield
            finally:
                self._readers -= 1
                self._change()
        finally:
            if not turn.dispatched:
                self._finished(turn)
            elif turn.finish is None:
                self.abort(turn.rid)

    def _check(self, turn: Turn) -> None:
        limit, asked = self.server.context_length, turn.max_new_tokens
        if turn.prompt_tokens >= limit:
            raise ValueError(
                f"The input ({turn.prompt_tokens} tokens) is longer than the model's context length ({limit} tokens)."
            )
        if asked is not None and asked + turn.prompt_tokens > limit:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {asked + turn.prompt_tokens} tokens: {turn.prompt_tokens} tokens from the input messages "
                f"and {asked} tokens for the completion. Please reduce the number of tokens in the input messages or "
                "the completion to fit within the limit."
            )
        if asked is not None and asked < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {asked}.")

    def _dispatch(self, turn: Turn, body: dict[str, Any]) -> None:
        server, scheduler = self.server, self.scheduler
        session = (body.get("session_params") or {}).get("id")
        if server.take("reject_requests"):
            message = "The request queue is full."
            turn.dispatched = turn.from_queue = True
            turn.finish = {"type": "abort", "status_code": server.faults.reject_status, "message": message}
            turn.spans = turn.spans_over(scheduler.version, 0)
            scheduler.aborted.append(turn.rid)
            self._finished(turn)
            turn.ready.set()
        elif session is not None and session not in self.sessions:
            scheduler.add(turn, refused(f"Invalid request: session id {session} does not exist"))
        else:
            scheduler.add(turn)

    def abort(self, rid: str, *, everything: bool = False) -> None:
        """/abort_request, and what a client that left sets off. Once per request: a second one is ignored."""
        if everything:
            self.scheduler.abort("")
            return
        turn = self.turns.get(rid)
        if turn is not None and not turn.abort_sent:
            turn.abort_sent = True
            self.scheduler.abort(rid)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """At once while paused; else when what runs has ended, and nothing new begins."""
        async with self._pausing:
            if self.paused:
                yield
                return
        self._writers += 1
        try:
            await self._until(lambda: not self._readers)
            yield
        finally:
            self._writers -= 1
            self._change()

    # -- what it answers -------------------------------------------------------------------------------------------

    async def call(self, path: str, body: Any, query: dict[str, str]) -> web.StreamResponse:
        """One control call."""
        if path == "/flush_cache":
            return await self._flush(float(query.get("timeout", 0)))
        if not isinstance(body, dict):
            return invalid("missing", "Field required", body)
        for name, kind in REQUIRED.get(path, {}).items():
            if name not in body:
                return invalid("missing", "Field required", body, name)
            if not isinstance(body[name], kind):
                return invalid(f"{kind.__name__}_type", f"Input should be a valid {kind.__name__}", body[name], name)
        if not isinstance(body.get("weight_version"), str | None):
            return invalid("string_type", "Input should be a valid string", body["weight_version"], "weight_version")
        answer = getattr(self, "_" + path[1:])
        response: web.StreamResponse = await answer(body)
        return response

    async def _flush(self, timeout: float) -> web.Response:
        scheduler, end = self.scheduler, time.monotonic() + timeout
        while timeout and (scheduler.running or scheduler.waiting) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if not scheduler.flush():
            return web.Response(status=400, text="Flush cache failed.\n")
        return web.Response(
            text="Cache flushed.\nPlease check backend logs for more details. "
            "(When there are running or waiting requests, the operation will not be performed.)\n"
        )

    async def _pause_generation(self, body: dict[str, Any]) -> web.Response:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return invalid("literal_error", "Input should be 'abort', 'retract' or 'in_place'", mode, "mode")
        async with self._pausing:
            self.paused = True
            if mode == "abort":
                while True:
                    self.abort("", everything=True)
                    if not self._readers:
                        break
                    await asyncio.sleep(self.server.abort_poll_seconds)
            else:
                self.scheduler.pause(mode)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, body: dict[str, Any]) -> web.Response:
        async with self._pausing:
            self.paused = False
            self.scheduler.go_on()
            self._change()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort_request(self, body: dict[str, Any]) -> web.Response:
        self.abort(body.get("rid") or "", everything=bool(body.get("abort_all")))
        return web.Response()

    async def _change_weights(self, body: dict[str, Any], done: str, problem: str = "") -> tuple[bool, str]:
        """An update by any way: success, and what to say."""
        scheduler, server = self.scheduler, self.server
        if body.get("abort_all_requests"):
            self.abort("", everything=True)
        async with self._alone():
            await asyncio.sleep(server.update_seconds)
            fails = server.take("fail_updates")
            if problem:
                return False, problem
            if not fails or server.faults.fail_after_change:
                scheduler.set_version(body.get("weight_version"))
            if fails:
                return False, "Failed to update weights: the fake was told so."
            if body.get("flush_cache", True) and not scheduler.flush():
                return False, (
                    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
                    "Retract or finish them, then call /flush_cache."
                )
            if body.get("weight_version") is not None:
                self.version = body["weight_version"]
                done += f" Weight version updated to {self.version}."
            return True, done

    async def _update_weights_from_disk(self, body: dict[str, Any]) -> web.Response:
        path = body["model_path"]
        missing = self.server.check_paths and not Path(path).is_dir()  # noqa: ASYNC240
        problem = f"Failed to get weights iterator: '{path}' is no folder.." if missing else ""
        success, message = await self._change_weights(body, "Succeeded to update model weights.", problem)
        if success:
            self.path = path
        answer = {"success": success, "message": message, "num_paused_requests": 0}
        return web.json_response(answer, status=200 if success else 400)

    def _outside(self, path: str) -> str:
        if self.updating:
            return ""
        return f"{path} must run between begin_weight_update() and end_weight_update()"

    async def _update_weights_from_tensor(self, body: dict[str, Any]) -> web.Response:
        return said(*await self._change_weights(body, "Success", self._outside("update_weights_from_tensor")))

    async def _update_weights_from_distributed(self, body: dict[str, Any]) -> web.Response:
        group = body.get("group_name", "weight_update_group")
        problem = self._outside("update_weights_from_distributed")
        if not problem and group not in self.groups:
            problem = (
                f"Failed to receive weights: Group {group} not in {sorted(self.groups)}. "
                "Please call `init_weights_update_group` first."
            )
        return said(*await self._change_weights(body, "Succeeded to update parameter online.", problem))

    async def _begin_weight_update(self, body: dict[str, Any]) -> web.Response:
        async with self._alone():
            if self.updating:
                return said(False, "a weight-update session is already open; call end_weight_update() first")
            self.updating = True
            return said(True, "Success")

    async def _end_weight_update(self, body: dict[str, Any]) -> web.Response:
        async with self._alone():
            if not self.updating:
                return said(False, "no weight-update session is open; call begin_weight_update() first")
            self.updating = False
            return said(True, "Success")

    async def _init_weights_update_group(self, body: dict[str, Any]) -> web.Response:
        self.groups.add(body.get("group_name", "weight_update_group"))
        return said(True, "Succeeded to initialize custom process group.")

    async def _destroy_weights_update_group(self, body: dict[str, Any]) -> web.Response:
        name = body.get("group_name", "weight_update_group")
        if name not in self.groups:
            return said(False, "The group to be destroyed does not exist.")
        self.groups.remove(name)
        return said(True, "Succeeded to destroy custom process group.")

    async def _update_weight_version(self, body: dict[str, Any]) -> web.Response:
        if body.get("abort_all_requests", True):
            self.abort("", everything=True)
        self.version = body["new_version"]
        self.scheduler.set_version(self.version, weights=False)
        message = f"Weight version updated to {self.version}"
        return web.json_response({"success": True, "message": message, "new_version": self.version})

    async def _release_memory_occupation(self, body: dict[str, Any]) -> web.Response:
        if not self.scheduler.flush():
            self.server.kill()  # an assertion in the real scheduler, which ends the server
        self.released |= set(body.get("tags") or ("kv_cache", "weights", "cuda_graph"))
        return web.json_response(None)

    async def _resume_memory_occupation(self, body: dict[str, Any]) -> web.Response:
        tags = set(body.get("tags") or ("kv_cache", "weights", "cuda_graph"))
        if not tags <= self.released:
            self.server.kill()  # a KeyError in the real scheduler
        self.released -= tags
        return web.json_response(None)

    async def _slow_down(self, body: dict[str, Any]) -> web.Response:
        self.scheduler.sleep_seconds = body.get("forward_sleep_time") or 0.0
        return web.json_response(None)

    async def _open_session(self, body: dict[str, Any]) -> web.Response:
        name = body.get("session_id") or uuid.uuid4().hex
        if name in self.sessions:
            problem = "Failed to open the session. Check if a session with the same id is still open."
            return web.json_response({"error": {"message": problem}}, status=400)
        self.sessions.add(name)
        return web.json_response(name)

    async def _close_session(self, body: dict[str, Any]) -> web.Response:
        self.sessions.discard(body["session_id"])
        return web.Response()

    async def health(self, path: str) -> web.Response:
        """/health waits for a sign of life of the scheduler; the rest only says that the process is there."""
        if not path.startswith("/health"):
            return web.Response()
        begun, total = time.monotonic(), self.server.health_seconds
        while time.monotonic() < begun + total:
            await asyncio.sleep(total / 20)
            working = not (self.paused or self.scheduler.paused or self.server.faults.stall)
            if working or self.scheduler.last_output > begun:
                return web.Response()
        return web.Response(status=503)

    def read(self, path: str) -> dict[str, Any]:
        """What GET answers."""
        if path == "/v1/models":
            card = {"id": self.path, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
            card |= {"root": self.path, "parent": None, "max_model_len": self.server.context_length}
            return {"object": "list", "data": [card]}
        if path == "/v1/loads":
            return self._loads()
        if path == "/server_info":
            return self._server_info()
        return {
            "model_path": self.path,
            "served_model_name": self.path,
            "tokenizer_path": self.server.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "qwen3",
            "architectures": [self.server.architecture],
        }

    def _server_info(self) -> dict[str, Any]:
        """The arguments of the start, which no update changes, and what the scheduler knows."""
        server = self.server
        return {
            "model_path": server.model_path,
            "tokenizer_path": server.model_path,
            "served_model_name": server.model_path,
            "status": "ready",
            "version": server.sglang_version,
            "weight_version": server.first_version,
            "device": "cpu",
            "dtype": "bfloat16",
            "quantization": None,
            "context_length": None,
            "max_total_num_tokens": 8192,
            "max_req_input_len": server.context_length - 6,
            "max_total_tokens": 8192,
            "max_running_requests": None,
            "skip_tokenizer_init": True,
            "incremental_streaming_output": server.incremental,
            "stream_interval": server.stream_interval,
            "tp_size": 1,
            "dp_size": server.dp_size,
            "random_seed": 1,
            "load_format": "auto",
            "internal_states": [
                {
                    "weight_version": self.scheduler.version,
                    "last_gen_throughput": 0.0,
                    "memory_usage": {},
                    "effective_max_running_requests_per_dp": self.scheduler.settings.max_running,
                }
            ],
        }

    def _loads(self) -> dict[str, Any]:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        used = sum(turn.prompt_tokens + len(turn.ids) for turn in running)
        load = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": len(running),
            "num_waiting_reqs": len(waiting),
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "num_active_tokens": used,
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": 8192,
            "max_running_requests": self.scheduler.settings.max_running,
            "token_usage": 0.0,
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
            "total_prefill_uncached_tokens": 0,
            "total_prefill_busy_us": 0,
            "decode_moments": [0.0] * 6,
        }
        now = datetime.now(UTC).isoformat()
        return {"timestamp": now, "version": "0.5.23", "accelerator": None, "num_accelerators": 1, "loads": [load]}
