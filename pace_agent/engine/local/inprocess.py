"""The local engine inside the running event loop: for tests and small runs.

A step computes in the loop's thread, so nothing else runs in the meantime; `ProcessEngine` has none of that. What
always holds: steps and weight updates happen in the loop's thread, one at a time, so that no token is sampled while
weights change, and none while paused.

With `costs`, a step or an update also takes their seconds on the clock: what it gives is there when these have passed,
and a pause waits for the end of the step.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pace_agent.clock import Clock
from pace_agent.costs import Costs
from pace_agent.engine.base import EngineInfo, EngineStats, Generation, GenerationRequest, WeightSource
from pace_agent.engine.local.slots import Outcome, SlotDecoder, StaleCache
from pace_agent.engine.local.weights import load_model, read_weights
from pace_agent.engine.times import Times
from pace_agent.errors import EngineError


class LocalEngine:
    """An `Engine` over a model folder, or over a model object, which it takes over."""

    def __init__(
        self,
        model: Any,
        *,
        max_slots: int = 128,
        context_length: int | None = None,
        dtype: str = "float32",
        stale_cache: StaleCache = "recompute",
        version: int = 0,
        clock: Clock | None = None,
        costs: Costs | None = None,
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._options: dict[str, Any] = {
            "max_slots": max_slots,
            "context_length": context_length,
            "stale_cache": stale_cache,
            "version": version,
        }
        self._decoder: SlotDecoder | None = None
        self._futures: dict[str, asyncio.Future[Generation]] = {}
        self._times = Times(clock)
        self._costs = costs
        self._stepping = asyncio.Lock()
        self._wake = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        if self._decoder is None:
            model = self._model
            if isinstance(model, str | Path):
                model = load_model(model, self._dtype)
            self._decoder = SlotDecoder(model, **self._options)
            self._driver = asyncio.create_task(self._drive(self._decoder))
        return self._decoder.info

    @property
    def _started(self) -> SlotDecoder:
        if self._decoder is None:
            raise EngineError("the engine is not running: call start() first, and nothing after aclose()")
        return self._decoder

    async def _drive(self, decoder: SlotDecoder) -> None:
        while True:
            await self._wake.wait()
            if self._times.paused or not decoder.busy:
                self._wake.clear()
                continue
            async with self._stepping:
                self._deliver(await self._step(decoder))
            await asyncio.sleep(0)

    async def _step(self, decoder: SlotDecoder) -> list[Outcome]:
        before = decoder.stats()
        try:
            outcomes = decoder.step()
        except Exception as error:  # whatever a model raises ends the turns, not the engine
            outcomes = decoder.fail_all(EngineError(f"the model raised {type(error).__name__}: {error}"))
        if self._costs is not None:
            after = decoder.stats()
            await self._times.clock.sleep(
                self._costs.engine_step(
                    after.sampled_tokens - before.sampled_tokens, after.prefill_tokens - before.prefill_tokens
                )
            )
        return outcomes

    def _deliver(self, outcomes: Iterable[Outcome]) -> None:
        for rid, outcome in outcomes:
            future = self._futures.get(rid)
            if future is None or future.done():
                continue
            if isinstance(outcome, EngineError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    async def generate(self, request: GenerationRequest) -> Generation:
        decoder = self._started
        decoder.submit(request)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._futures[request.rid] = future
        self._wake.set()
        try:
            return await future
        finally:
            del self._futures[request.rid]
            if future.cancelled():
                decoder.abort(request.rid)

    async def release(self, session: str) -> None:
        if self._decoder is not None:
            self._decoder.release(session)

    async def abort(self, rid: str | None = None) -> None:
        self._deliver(self._started.abort(rid))

    async def pause(self) -> None:
        self._times.pause()
        async with self._stepping:
            pass

    async def resume(self) -> None:
        self._times.resume()
        self._wake.set()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        decoder = self._started
        if not self._times.paused:
            raise EngineError("weights can be updated only while the engine is paused")
        with self._times.updating():
            if self._costs is not None:
                await self._times.clock.sleep(self._costs.update_seconds)
            decoder.swap(read_weights(source), version)

    def stats(self) -> EngineStats:
        return self._times.added_to(EngineStats() if self._decoder is None else self._decoder.stats())

    async def aclose(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
            with suppress(asyncio.CancelledError):
                await self._driver
            self._driver = None
        for future in self._futures.values():
            if not future.done():
                future.set_exception(EngineError("the engine was closed"))
        self._decoder = None
