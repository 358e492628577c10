"""An engine over SGLang servers.

    generate -> gate -> server of the session -> attempt -> tokens kept -> (again, from the kept tokens) -> Generation

What always holds:

* A turn yields one generation. Its attempts are never alive at once, and each begins where the kept tokens end.
* While paused no attempt begins: turns wait here, where they can be aborted.
* While no server serves, turns wait. After `wait_seconds` of that the run ends.
"""

import asyncio
import resource
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pace_agent.engine.base import EngineInfo, EngineStats, Generation, GenerationRequest, WeightSource
from pace_agent.engine.request import check_request
from pace_agent.engine.sglang.client import Keys, ServerClient, Unreachable
from pace_agent.engine.sglang.fleet import Fleet
from pace_agent.engine.sglang.front import Front
from pace_agent.engine.sglang.probe import Facts
from pace_agent.engine.sglang.servers import Health, Server
from pace_agent.engine.sglang.serving.router import Router
from pace_agent.engine.sglang.stream import WrongVersion
from pace_agent.engine.sglang.turn import Attempt, Turn
from pace_agent.engine.sglang.weights.kept import WeightKeeper
from pace_agent.engine.sglang.weights.transports import Transport
from pace_agent.engine.times import Times
from pace_agent.errors import EngineError
from pace_agent.types import Finish

ABORT_SECONDS = 3.0
FUTILE_ATTEMPTS, FUTILE_SECONDS = 8, 0.1
"""Attempts in a row without a token after which a turn fails; the wait after the first, which doubles."""
OPEN_FILES = 1 << 16


@dataclass(frozen=True, slots=True)
class SGLangOptions:
    """`vocab_size` is the model's, `context_length` is what rollouts need (None: what there is).

    `version` names the weights that the servers have at the start. `stream_interval` is in tokens. A server with turns
    that produced no token for `stall_seconds` is lost; with none left for `wait_seconds` the run ends.
    """

    vocab_size: int
    context_length: int | None = None
    version: int = 0
    stream_interval: int = 8
    stall_seconds: float = 120.0
    wait_seconds: float = 300.0


class SGLangEngine:
    """An `Engine` over the servers at `urls`, which have the weights in the folder `model` when it starts.

    It belongs to one event loop.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        options: SGLangOptions,
        transport: Transport,
        keeper: WeightKeeper,
        model: Path,
        keys: Keys | None = None,
        router: Router | None = None,
    ) -> None:
        """Generation goes through `router` where there is one, all else to each server."""
        self._options = options
        self._fleet = Fleet(
            [Server(ServerClient(url, keys)) for url in urls],
            transport=transport,
            keeper=keeper,
            model=model,
            version=options.version,
            stall_seconds=options.stall_seconds,
            wait_seconds=options.wait_seconds,
            notify=self._notify,
            front=None if router is None else Front(router, keys),
        )
        self._context_length = 0
        self._times = Times()
        self._turns: dict[str, Turn] = {}
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False
        self._sampled = self._prefilled = self._interrupted = self._updates = 0

    # ---- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Check every server: EngineError for one that can't serve this run."""
        self._check_open()
        if not self._context_length:
            _allow_open_files()
            facts = await self._fleet.start()
            self._context_length = self._usable_context(facts)
        return EngineInfo(self._options.vocab_size, self._context_length, self._fleet.version)

    def _usable_context(self, facts: Sequence[Facts]) -> int:
        """What every server has room for, which is a few tokens less than its context."""
        wanted, usable = self._options.context_length, min(each.usable for each in facts)
        for server, each in zip(self._fleet.servers, facts, strict=True):
            if wanted is not None and each.context_length < wanted:
                raise EngineError(
                    f"{server.url} has a context of {each.context_length} tokens, but rollouts may need {wanted}: "
                    f"start it with --context-length {wanted}, or lower rollout.max_context"
                )
        return usable if wanted is None else min(wanted, usable)

    async def aclose(self) -> None:
        """Cut what runs, which ends with EngineError. Servers go on; whoever started them stops them."""
        if self._closed:
            return
        self._closed = True
        turns = list(self._turns.values())
        await self.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await asyncio.gather(*(turn.ended.wait() for turn in turns), *self._background)
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._fleet.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")
        self._fleet.check_hope()

    # ---- a turn ---------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        self._check_open()
        if not self._context_length:
            raise EngineError("the engine is not running: call start() first")
        check_request(request, self._options.vocab_size, self._context_length)
        if request.rid in self._turns:
            raise EngineError(f"request {request.rid!r} is already running")
        room = self._context_length - len(request.input_ids)
        if request.sampling.max_new_tokens > room:
            request = replace(request, sampling=replace(request.sampling, max_new_tokens=room))
        turn = self._turns[request.rid] = Turn(request)
        try:
            finish = await self._play(turn)
        finally:
            del self._turns[request.rid]
            turn.ended.set()
        generation = turn.generation(finish)
        self._interrupted += len(generation.spans) > 1
        return generation

    async def _play(self, turn: Turn) -> Finish:
        """Attempt until the turn has ended."""
        futile = 0
        while (server := await self._server_for(turn)) is not None:
            had = len(turn.ids)
            attempt = await self._attempt(server, turn)
            finish = await self._heed(attempt)
            self._sampled += len(turn.ids) - had
            if finish == "abort":
                break
            if finish is not None:
                return finish
            futile = 0 if len(turn.ids) > had or not server.serving else futile + 1
            if futile == FUTILE_ATTEMPTS:
                last = attempt.error() or f"{server.url} aborted it"
                raise EngineError(f"{futile} attempts in a row brought no token; the last: {last}")
            if futile:
                await self._change(FUTILE_SECONDS * 2 ** (futile - 1))
        self._check_open()
        return "abort"

    async def _server_for(self, turn: Turn) -> Server | None:
        """Wait for the gate and for a server that serves; None once the turn is aborted."""
        while not turn.aborted:
            self._fleet.check_hope()
            server = self._fleet.route(turn.request.session)
            if server is not None:
                return server
            await self._change()
        return None

    async def _attempt(self, server: Server, turn: Turn) -> Attempt:
        """Ask the server, and listen until it has said all, or was cut."""
        attempt = turn.attempt = Attempt(turn, server, self._fleet.version)
        if not server.attempts:
            server.heard_at = time.monotonic()
        server.attempts.add(attempt)
        attempt.task = asyncio.create_task(attempt.listen(self._options.stream_interval))
        try:
            await asyncio.wait({attempt.task})
        except asyncio.CancelledError:
            attempt.cut()
            if not self._closed:
                self._in_background(self._forget(attempt))
            raise
        finally:
            server.attempts.discard(attempt)
            turn.attempt = None
        return attempt

    async def _heed(self, attempt: Attempt) -> Finish | None:
        """Keep what an attempt brought; the finish of its turn, or None where it goes on. EngineError ends the turn."""
        server, stream = attempt.server, attempt.stream
        error = attempt.error()
        try:
            finish = attempt.turn.keep(attempt, self._fleet.version)
        except WrongVersion as wrong:
            await self._fleet.suspect(server, f"{wrong}: it was restarted, or another program updates its weights")
            return None
        prompt, cached = stream.prompt_tokens
        self._prefilled += prompt - cached
        if finish is not None or attempt.turn.aborted:
            return finish or "abort"
        if error is not None and not isinstance(error, Unreachable) and not getattr(error, "passing", False):
            raise error
        if isinstance(error, Unreachable):
            await self._fleet.suspect(server)
        if stream.end == "cut" and server.health is not Health.LOST:
            await self._forget(attempt)  # before there is another
        return None

    async def _forget(self, attempt: Attempt) -> None:
        """Tell the server that nobody listens any more; each one where a router chose it."""

        async def tell(server: Server) -> None:
            with suppress(EngineError):
                await server.client.post("/abort_request", {"rid": attempt.rid}, timeout=ABORT_SECONDS)

        await asyncio.gather(*(tell(server) for server in self._fleet.behind(attempt.server)))

    async def abort(self, rid: str | None = None) -> None:
        turns = list(self._turns.values()) if rid is None else [self._turns[rid]] if rid in self._turns else []
        for turn in turns:
            turn.aborted = True
        self._notify()
        await asyncio.gather(*(self._abort(turn.attempt) for turn in turns if turn.attempt is not None))

    async def _abort(self, attempt: Attempt) -> None:
        """Ask the server for the tokens so far; where it does not say, take what arrived."""
        await self._forget(attempt)
        if attempt.task is not None:
            await asyncio.wait({attempt.task}, timeout=ABORT_SECONDS)
        attempt.cut()

    async def release_memory(self) -> None:
        """Once no turn runs, let the servers give up their memory; the next weights give it back to them.

        Whoever calls this begins no turn until then.
        """
        self._check_open()
        await asyncio.gather(*(turn.ended.wait() for turn in list(self._turns.values())))
        await self.pause()
        await self._fleet.release_memory()

    async def release(self, session: str) -> None:
        self._fleet.release(session)

    # ---- weights --------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self._check_open()
        if self._fleet.paused:
            return
        self._times.pause()
        for turn in self._turns.values():
            if turn.attempt is not None:
                turn.attempt.paused()
        await self._fleet.pause()

    async def resume(self) -> None:
        self._check_open()
        if self._fleet.paused:
            await self._fleet.resume()
            self._times.resume()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """UpdateRefused where a part of the servers refused and is out; then the others have the old weights."""
        self._check_open()
        if not self._fleet.paused:
            raise EngineError("weights can be updated only while the engine is paused")
        if version < self._fleet.version:
            raise EngineError(f"version {version} is below the engine's version {self._fleet.version}")
        with self._times.updating():
            await self._fleet.update(source, version)
            self._updates += 1

    # ---- figures and waiting --------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return self._times.added_to(
            EngineStats(
                sampled_tokens=self._sampled,
                prefill_tokens=self._prefilled,
                interrupted=self._interrupted,
                updates=self._updates,
                running=len(self._turns),
                out_seconds=self._fleet.out_seconds,
            )
        )

    def _notify(self) -> None:
        """Wake every turn that waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, seconds: float | None = None) -> None:
        """Wait for `_notify`, or for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _allow_open_files() -> None:
    """One connection per turn: lift the limit as far as the user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
