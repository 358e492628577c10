"""An engine without a model: answers come from a function. For tests and for measuring everything around an engine.

It keeps the whole contract of `pace_agent.engine.base`: turns take time on a clock, nothing is sampled while paused, a
weight update splits the turns that are under way, an abort keeps the tokens so far. No torch.

A turn of n tokens takes `turn_seconds + n * token_seconds` of time that is not paused, and its tokens come evenly over
it. With both at 0 a turn is done at once, unless the engine is paused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from pace_agent.clock import Clock, WallClock
from pace_agent.engine.base import EngineInfo, EngineStats, Generation, GenerationRequest, WeightSource
from pace_agent.engine.request import check_request
from pace_agent.errors import EngineError
from pace_agent.types import Finish, VersionSpan

Reply = Callable[[GenerationRequest], Sequence[int] | Awaitable[Sequence[int]]]


@dataclass(slots=True)
class _Turn:
    """A turn under way: `ran` seconds of it had passed when the clock showed `since` (None: not begun, or paused)."""

    ids: tuple[int, ...]
    seconds: float
    version: int
    since: float | None = None
    ran: float = 0.0
    begun: bool = False
    spans: list[VersionSpan] = field(default_factory=list)
    segments: int = 1
    aborted: bool = False
    sleeper: asyncio.Future[None] | None = None

    def run(self, now: float) -> None:
        self.since, self.begun = now, True

    def halt(self, now: float) -> None:
        self.ran, self.since = self.ran_at(now), None

    def ran_at(self, now: float) -> float:
        return self.ran if self.since is None else self.ran + now - self.since

    def tokens_at(self, now: float) -> int:
        """How many tokens are sampled by then."""
        ran = self.ran_at(now)
        if not self.begun:
            return 0
        if ran >= self.seconds:
            return len(self.ids)
        return min(len(self.ids), int(len(self.ids) * ran / self.seconds + 1e-9))

    def stamp(self, end: int) -> None:
        """The tokens after the last stamp, up to `end`, came from the present version."""
        start = self.spans[-1].end if self.spans else 0
        if end > start:
            self.spans.append(VersionSpan(self.version, start, end))

    def interrupt(self, now: float, version: int) -> bool:
        """New weights: whether they fell into the turn, after its first and before its last token."""
        done = self.tokens_at(now)
        within = 0 < done < len(self.ids)
        if version != self.version:
            self.stamp(done)
            self.version = version
        self.segments += within
        return within and self.segments == 2


class ScriptedEngine:
    """An `Engine` that answers with `reply(request)`, cut at the first stop id and at `max_new_tokens`.

    `fail(request)` returns a message for turns that are to raise EngineError, `fail_update(version)` for updates.
    Every log-probability is `logprob`. `released` lists the sessions that were released, in order.
    """

    def __init__(
        self,
        reply: Reply,
        *,
        vocab_size: int = 1 << 17,
        context_length: int = 1 << 20,
        version: int = 0,
        token_seconds: float = 0.0,
        turn_seconds: float = 0.0,
        logprob: float = -1.0,
        clock: Clock | None = None,
        fail: Callable[[GenerationRequest], str | None] | None = None,
        fail_update: Callable[[int], str | None] | None = None,
    ) -> None:
        self.version = version
        self.released: list[str] = []
        self._reply = reply
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._token_seconds = token_seconds
        self._turn_seconds = turn_seconds
        self._logprob = logprob
        self._clock: Clock = clock or WallClock()
        self._fail = fail
        self._fail_update = fail_update
        self._open = asyncio.Event()
        self._open.set()
        self._turns: dict[str, _Turn] = {}
        self._paused_at = 0.0
        self._closed = False
        self._sampled = self._interrupted = self._updates = 0
        self._paused_seconds = 0.0

    async def start(self) -> EngineInfo:
        return EngineInfo(self._vocab_size, self._context_length, self.version)

    async def generate(self, request: GenerationRequest) -> Generation:
        self._check_open()
        check_request(request, self._vocab_size, self._context_length)
        if request.rid in self._turns:
            raise EngineError(f"request {request.rid!r} is already running")
        message = self._fail(request) if self._fail is not None else None
        if message is not None:
            raise EngineError(message)
        ids, finish = await self._answer(request)
        seconds = self._turn_seconds + self._token_seconds * len(ids)
        if seconds == 0.0 and self._open.is_set():  # done at once: nothing can fall into it
            self._sampled += len(ids)
            spans = (VersionSpan(self.version, 0, len(ids)),) if ids else ()
            return Generation(ids, (self._logprob,) * len(ids), spans, finish)
        turn = _Turn(ids, seconds, self.version)
        self._turns[request.rid] = turn
        try:
            await self._run(turn)
        finally:
            del self._turns[request.rid]
        if turn.aborted:
            self._check_open()
            ids, finish = turn.ids, "abort"
        turn.stamp(len(ids))
        self._sampled += len(ids)
        return Generation(ids, (self._logprob,) * len(ids), tuple(turn.spans), finish, turn.segments)

    async def _answer(self, request: GenerationRequest) -> tuple[tuple[int, ...], Finish]:
        reply = self._reply(request)
        ids = tuple(await reply if isinstance(reply, Awaitable) else reply)
        room = min(request.sampling.max_new_tokens, self._context_length - len(request.input_ids))
        end = min([ids.index(stop) + 1 for stop in request.sampling.stop_token_ids if stop in ids], default=len(ids))
        return (ids[:room], "length") if end > room else (ids[:end], "stop")

    async def _run(self, turn: _Turn) -> None:
        """Return when the turn's time is over or it was aborted; then `ids` are what it has."""
        if self._open.is_set():
            turn.run(self._clock.now())
        try:
            while not turn.aborted:
                left = turn.seconds - turn.ran_at(self._clock.now())
                if turn.begun and left <= 0.0:
                    return
                waiting = self._clock.sleep(left) if self._open.is_set() else self._open.wait()
                turn.sleeper = asyncio.ensure_future(_quietly(waiting))
                await asyncio.wait({turn.sleeper})
        finally:
            if turn.sleeper is not None:
                turn.sleeper.cancel()

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def abort(self, rid: str | None = None) -> None:
        now = self._clock.now()
        turns = list(self._turns.values()) if rid is None else [self._turns[rid]] if rid in self._turns else []
        for turn in turns:
            if turn.aborted:
                continue
            turn.ids = turn.ids[: turn.tokens_at(now)]
            turn.aborted = True
            if turn.sleeper is not None:
                turn.sleeper.cancel()

    async def pause(self) -> None:
        self._check_open()
        if not self._open.is_set():
            return
        self._open.clear()
        self._paused_at = self._clock.now()
        for turn in self._turns.values():
            turn.halt(self._paused_at)

    async def resume(self) -> None:
        self._check_open()
        if self._open.is_set():
            return
        now = self._clock.now()
        self._paused_seconds += now - self._paused_at
        for turn in self._turns.values():
            turn.run(now)
        self._open.set()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Take the version; the weights are not looked at."""
        self._check_open()
        if self._open.is_set():
            raise EngineError("weights can be updated only while the engine is paused")
        if version < self.version:
            raise EngineError(f"version {version} is below the engine's version {self.version}")
        message = self._fail_update(version) if self._fail_update is not None else None
        if message is not None:
            raise EngineError(message)
        self.version = version
        self._updates += 1
        now = self._clock.now()
        for turn in self._turns.values():
            self._interrupted += turn.interrupt(now, version)

    def stats(self) -> EngineStats:
        paused = 0.0 if self._open.is_set() else self._clock.now() - self._paused_at
        return EngineStats(
            sampled_tokens=self._sampled,
            interrupted=self._interrupted,
            updates=self._updates,
            paused_seconds=self._paused_seconds + paused,
            running=len(self._turns),
        )

    async def aclose(self) -> None:
        """End what runs with EngineError."""
        self._closed = True
        await self.abort()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")


async def _quietly(waiting: Awaitable[object]) -> None:
    await waiting
