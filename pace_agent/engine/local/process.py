"""The local engine in a process of its own, so that rollouts and training each have a core.

What always holds:

* The child reads commands only between steps, so when `pause` returns no step runs, and none does until `resume`.
* Every `generate` ends: with its result, or with EngineError when the request is bad, the engine was closed, or the
  child died; the error then holds the exit code and the end of what the child wrote to its error stream.
* The child lives no longer than this process, and Ctrl-C in the terminal does not reach it: this process decides.

Weights travel as a safetensors file in shared memory, which is deleted when the child has read it. The child is started
by running Python anew, so a script needs no `if __name__ == "__main__"`. All methods belong to one event loop.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from pace_agent.engine.base import EngineInfo, EngineStats, Generation, GenerationRequest, WeightSource
from pace_agent.engine.local import wire
from pace_agent.engine.times import Times
from pace_agent.errors import EngineError

BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from pace_agent.engine.local.worker import main
main()
"""
SHARED_MEMORY = Path("/dev/shm")
CLOSE_SECONDS = 10.0
TAIL_BYTES = 2000


class ProcessEngine:
    """An `Engine` whose decoder runs in a child process with `threads` torch threads."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        threads: int = 1,
        max_slots: int = 128,
        context_length: int | None = None,
        dtype: str = "float32",
        stale_cache: str = "recompute",
        version: int = 0,
    ) -> None:
        self._threads = threads
        self._options = {
            "path": str(model_path),
            "threads": threads,
            "max_slots": max_slots,
            "context_length": context_length,
            "dtype": dtype,
            "stale_cache": stale_cache,
            "version": version,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._futures: dict[str, asyncio.Future[Generation]] = {}
        self._orphans: Counter[str] = Counter()
        """Requests that nobody waits for any more: how many outcomes of a name to drop."""
        self._tickets: dict[int, asyncio.Future[str | None]] = {}
        self._next_ticket = 0
        self._outgoing: list[tuple[Any, ...]] = []
        self._ended: str | None = None
        self._times = Times()
        self._counters = EngineStats()

    # Life of the child

    async def start(self) -> EngineInfo:
        """Start the child and wait until its model is loaded; EngineError says why it could not be."""
        if self._ended is not None:
            raise EngineError(self._ended)
        if self._ready is None:
            ours, theirs = socket.socketpair()
            try:
                self._launch(theirs)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            self._ready = asyncio.get_running_loop().create_future()
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            self._listener = asyncio.create_task(self._listen(reader))
        try:
            return await asyncio.shield(self._ready)
        except EngineError:
            await self.aclose()
            raise

    def _launch(self, theirs: socket.socket) -> None:
        path = self._options["path"]
        if isinstance(path, str) and os.path.isabs(path) and not os.path.isdir(path):
            self._end(f"there is no model folder {path}")
            raise EngineError(self._ended)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        here = [entry or os.getcwd() for entry in sys.path]
        options = {**self._options, "parent": os.getpid()}
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "MKL_NUM_THREADS": str(self._threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(theirs.fileno()), json.dumps(options), json.dumps(here)],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=(theirs.fileno(),),
            env=environment,
            process_group=0,  # the terminal sends Ctrl-C to its foreground group alone
        )

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        messages = wire.Decoder()
        try:
            while data := await reader.read(1 << 20):
                for message in messages.feed(data):
                    self._receive(*message)
        except OSError:
            pass
        assert self._process is not None
        try:
            code = await asyncio.to_thread(self._process.wait, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
        self._end(f"the engine process ended with exit code {code}{self._error_tail()}")

    def _error_tail(self) -> str:
        if self._errors is None:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - TAIL_BYTES))
        tail = self._errors.read().decode(errors="replace").strip()
        return f"; it wrote last:\n{tail}" if tail else "; it wrote nothing"

    def _end(self, reason: str) -> None:
        """Everything that waits fails with `reason`, as does everything later. The first reason stays."""
        if self._ended is None:
            self._ended = reason
        waiting: list[asyncio.Future[Any]] = [*self._futures.values(), *self._tickets.values()]
        if self._ready is not None:
            waiting.append(self._ready)
        for future in waiting:
            if not future.done():
                future.set_exception(EngineError(self._ended))
        if self._ready is not None and not self._ready.cancelled():
            self._ready.exception()  # nobody need be waiting for it

    async def aclose(self) -> None:
        """Stop the child; EngineError for whatever still waits. Closing twice is fine."""
        if self._process is None:
            self._ended = self._ended or "the engine was closed"
            return
        self._end("the engine was closed")
        if self._writer is not None:
            self._outgoing.append(("close",))
            self._flush()
            self._writer.close()
        if self._listener is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._listener), CLOSE_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._listener
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    # Messages

    def _send(self, *command: Any) -> None:
        """Queue a command; what is queued in one pass of the loop travels as one message."""
        if self._ended is not None:
            raise EngineError(self._ended)
        if self._writer is None:
            raise EngineError("the engine is not running: call start() first")
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(command)

    def _flush(self) -> None:
        if self._outgoing and self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.encode(self._outgoing))
        self._outgoing = []

    async def _ask(self, name: str, *arguments: Any) -> None:
        """Send a command and wait for its answer; EngineError if it failed."""
        self._next_ticket += 1
        ticket = self._next_ticket
        self._send(name, ticket, *arguments)
        answer = self._tickets[ticket] = asyncio.get_running_loop().create_future()
        try:
            failure = await answer
        finally:
            del self._tickets[ticket]
        if failure is not None:
            raise EngineError(failure)

    def _receive(self, kind: str, *content: Any) -> None:
        if kind == "finished":
            outcomes, self._counters = content
            self._deliver(outcomes)
        elif kind == "done":
            ticket, failure, self._counters = content
            answer = self._tickets.get(ticket)
            if answer is not None and not answer.done():
                answer.set_result(failure)
        elif self._ready is not None and not self._ready.done():
            if kind == "ready":
                self._ready.set_result(content[0])
            else:
                self._end(content[0])

    def _deliver(self, outcomes: Iterable[tuple[str, Generation | EngineError]]) -> None:
        for rid, outcome in outcomes:
            if self._orphans.get(rid):
                self._orphans[rid] -= 1
                self._orphans += Counter()  # drops zeros
                continue
            future = self._futures.get(rid)
            if future is None or future.done():
                continue
            if isinstance(outcome, EngineError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    # Engine

    async def generate(self, request: GenerationRequest) -> Generation:
        if request.rid in self._futures:
            raise EngineError(f"request {request.rid!r} is already running")
        self._send("submit", request)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._futures[request.rid] = future
        try:
            return await future
        finally:
            del self._futures[request.rid]
            if future.cancelled() and self._ended is None:
                self._orphans[request.rid] += 1
                self._send("abort", request.rid)

    async def release(self, session: str) -> None:
        if self._ended is None and self._writer is not None:
            self._send("release", session)

    async def abort(self, rid: str | None = None) -> None:
        self._send("abort", rid)

    async def pause(self) -> None:
        await self._ask("pause")
        self._times.pause()

    async def resume(self) -> None:
        self._send("resume")
        self._times.resume()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        if not self._times.paused:
            raise EngineError("weights can be updated only while the engine is paused")
        with self._times.updating():
            if isinstance(source, Mapping):
                file = await asyncio.to_thread(share_weights, source)
                try:
                    await self._ask("update", str(file), version)
                finally:
                    file.unlink(missing_ok=True)
            else:
                await self._ask("update", _absolute(source), version)

    def stats(self) -> EngineStats:
        return self._times.added_to(replace(self._counters, running=len(self._futures)))


def _absolute(path: Path) -> str:
    return os.path.abspath(path)


def share_weights(weights: Mapping[str, Any]) -> Path:
    """Write tensors to a new file in shared memory, or in the temporary folder where they don't fit there.

    The caller deletes the file. EngineError where it can't be written.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in weights.items():
        plain = tensor.detach().cpu().contiguous()
        # The format refuses two names for one memory, which tied weights are.
        tensors[name] = plain.clone() if plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    fits = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > size * 1.1 + (1 << 20)
    handle, name = tempfile.mkstemp(
        prefix="pace-weights-", suffix=".safetensors", dir=str(SHARED_MEMORY) if fits else None
    )
    os.close(handle)
    path = Path(name)
    try:
        save_file(tensors, path)
    except Exception as error:
        path.unlink(missing_ok=True)
        raise EngineError(f"weights could not be written to {path}: {error}") from error
    return path
