"""SGLang engines over fake servers, and what must hold for every turn whatever went wrong under way."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from fake_sglang import FakeServer
from fake_sglang_faults import Seen
from fake_sglang_turns import is_stale, weights_of
from safetensors.numpy import save_file
from sglang_engines import sglang_engine
from tiny_models import VOCAB

from pace_agent.engine.base import Generation, GenerationRequest, SamplingParams
from pace_agent.engine.sglang import engine as engine_module
from pace_agent.engine.sglang import fleet as fleet_module
from pace_agent.engine.sglang import servers as servers_module
from pace_agent.engine.sglang.engine import SGLangEngine
from pace_agent.types import check_spans


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - counters of engine and servers are all there is to wait for
            await asyncio.sleep(0.002)


def quick(patch: pytest.MonkeyPatch) -> None:
    """Short waits between looks and attempts, and for servers that don't answer."""
    patch.setattr(fleet_module, "PROBE_SECONDS", 0.05)
    patch.setattr(fleet_module, "ANSWER_SECONDS", 0.5)
    patch.setattr(fleet_module, "CONTROL_SECONDS", 0.5)
    patch.setattr(servers_module, "FIRST_RETRY", 0.1)
    patch.setattr(engine_module, "FUTILE_SECONDS", 0.002)
    patch.setattr(engine_module, "ABORT_SECONDS", 0.5)


def make_weights(folder: Path) -> Path:
    """A model folder of one weight: the servers look at its name alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    save_file({"weight": np.zeros(4, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def uncut(prompt: Sequence[int], tokens: int, vocab_size: int = VOCAB) -> tuple[int, ...]:
    """What a fake server answers to a prompt when nothing goes wrong and nothing stops it."""
    state, ids = crc32(array("I", prompt).tobytes()), []
    for _ in range(tokens):
        ids.append((state * 0x9E3779B1 >> 9) % vocab_size)
        state = crc32(ids[-1].to_bytes(4, "little"), state)
    return tuple(ids)


@dataclass
class World:
    """Servers, an engine over them, and the turns that were begun by name."""

    servers: list[FakeServer]
    engine: SGLangEngine
    weights: Path
    requests: dict[str, GenerationRequest] = field(default_factory=dict)
    tasks: dict[str, "asyncio.Task[Generation]"] = field(default_factory=dict)

    def begin(self, name: str, tokens: int = 40, *, session: str = "", **sampling: Any) -> "asyncio.Task[Generation]":
        prompt = [1 + crc32(name.encode()) % 90, *range(1, 8)]
        self.requests[name] = GenerationRequest(name, prompt, SamplingParams(tokens, **sampling), session)
        self.tasks[name] = asyncio.create_task(self.engine.generate(self.requests[name]))
        return self.tasks[name]

    async def begun(self, count: int, tokens: int = 40) -> None:
        """Turns `0`, `1`, ... under way, each with tokens, in sessions of their own."""
        for i in range(count):
            self.begin(str(i), tokens, session=f"session-{i}")
        await until(lambda: sum(len(server.scheduler.running) for server in self.alive) >= count)
        await asyncio.sleep(0.03)

    def sampled(self) -> int:
        """Tokens so far, of all servers."""
        return sum(server.scheduler.sampled_tokens for server in self.alive)

    @property
    def alive(self) -> list[FakeServer]:
        return [server for server in self.servers if server.alive]

    def seen(self, name: str) -> list[Seen]:
        """Every request that servers got for a turn, in order."""
        all_of_it = [
            seen
            for server in self.servers
            for rid, many in server.requests.items()
            for seen in many
            if rid.partition("-")[2] == name
        ]
        return sorted(all_of_it, key=lambda seen: seen.at)

    def attempts_alive(self, name: str) -> int:
        """How many requests of a turn servers work on now."""
        return sum(rid.partition("-")[2] == name for server in self.alive for rid in server.control.turns)

    async def check(self, name: str, versions: Sequence[int] | None = None) -> Generation:
        """A turn ends as if it had never been cut, each token of the weights of its stamp."""
        async with asyncio.timeout(20):
            generation = await self.tasks[name]
        request = self.requests[name]
        count = len(generation.output_ids)
        assert generation.output_ids == uncut(request.input_ids, count)
        assert len(generation.logprobs) == count
        check_spans(generation.spans, count)
        for span in generation.spans:
            for logprob in generation.logprobs[span.start : span.end]:
                assert weights_of(logprob) == span.version
                assert not is_stale(logprob)
        assert generation.segments == max(1, len(generation.spans))
        if generation.finish != "abort":
            assert (generation.finish, count) == ("length", request.sampling.max_new_tokens)
        if versions is not None:
            assert [span.version for span in generation.spans] == list(versions)
        full = [*request.input_ids, *generation.output_ids]
        for seen in self.seen(name):
            kept = len(seen.input_ids) - len(request.input_ids)
            assert seen.input_ids == full[: len(seen.input_ids)]
            assert seen.max_new_tokens == request.sampling.max_new_tokens - kept
        return generation

    async def check_all(self, versions: Sequence[int] | None = None) -> list[Generation]:
        return [await self.check(name, versions) for name in self.tasks]

    async def publish(self, version: int) -> None:
        await self.engine.pause()
        try:
            await self.engine.update_weights(self.weights, version)
        finally:
            await self.engine.resume()

    def health(self) -> list[str]:
        return [str(server.health) for server in self.engine._fleet.servers]


def fake_server(**settings: Any) -> FakeServer:
    """A fake server that takes its time for tokens, and none to say that it is healthy."""
    return FakeServer(**{"token_seconds": 0.003, "health_seconds": 0.5, **settings})


@asynccontextmanager
async def world(
    tmp_path: Path,
    servers: int = 1,
    *,
    options: dict[str, Any] | None = None,
    urls: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[World]:
    """A started engine over so many fake servers with those `settings`, or over `urls`; all ends with the block."""
    weights = make_weights(tmp_path / "model")
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(fake_server(**settings)) for _ in range(servers)]
        engine = sglang_engine(urls or [fake.url for fake in fakes], weights, **(options or {}))
        stack.push_async_callback(engine.aclose)
        await engine.start()
        made = World(fakes, engine, weights)
        yield made
        await engine.aclose()
        await asyncio.gather(*made.tasks.values(), return_exceptions=True)


class Relay:
    """A port in front of a server: passes answers on in pieces of `piece` bytes, and can cut its clients off.

    The server keeps the connections of clients that were cut off, as behind a proxy that is slow to notice.
    """

    def __init__(self, port: int, piece: int = 1 << 16) -> None:
        self.port, self.piece = port, piece
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        upwards = asyncio.create_task(self._copy(reader, far_writer, 1 << 16))
        try:
            with suppress(asyncio.CancelledError, ConnectionError):  # nobody waits for a connection's task
                await self._copy(far_reader, writer, self.piece)
        finally:
            self._writers.discard(writer)
            upwards.cancel()
            far_writer.close()
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: int) -> None:
        while data := await reader.read(1 << 16):
            for start in range(0, len(data), piece):
                if writer.is_closing():
                    break
                writer.write(data[start : start + piece])
                await asyncio.sleep(0)
