"""One turn, over as many attempts as it takes.

What always holds: a token is kept once, with the version that sampled it. An attempt whose end was not heard is cut
back to the tokens whose version is certain: those that arrived before a pause began. What came later may be of either
side.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from pace_agent.engine.base import Generation, GenerationRequest
from pace_agent.engine.request import spans_of
from pace_agent.engine.sglang.client import Refused, Unreachable
from pace_agent.engine.sglang.servers import Server
from pace_agent.engine.sglang.stream import Mark, Stream, WrongVersion
from pace_agent.errors import EngineError
from pace_agent.types import Finish, VersionSpan

ROUTING_HEADER = "X-SMG-Routing-Key"
"""By it a router keeps the turns of one rollout on one server. Servers take no notice of it."""


class Attempt:
    """A request that is with a server. `version` is what the server had when it was sent."""

    def __init__(self, turn: "Turn", server: Server, version: int) -> None:
        # The scheduler aborts every request whose id starts with the given one, so what differs comes first.
        self.rid = f"{secrets.token_hex(6)}-{turn.request.rid}"
        self.turn = turn
        self.server = server
        self.version = version
        self.stream = Stream()
        self.task: asyncio.Task[None] | None = None
        self.heard_at = time.monotonic()
        self._certain: Mark | None = None

    async def listen(self, stream_interval: int) -> None:
        """Send the request and take in what comes, to the end of the stream."""
        body = self.turn.body(self, stream_interval)
        headers = {ROUTING_HEADER: self.turn.request.session or self.rid}
        async with self.server.client.stream(body, headers) as chunks:
            async for data in chunks:
                self.heard_at = self.server.heard_at = time.monotonic()
                self.stream.feed(data)
        self.stream.settle()

    def error(self) -> EngineError | None:
        """What went wrong, of an attempt that is over: no answer, a refusal, or an end before the end."""
        assert self.task is not None
        error = None if self.task.cancelled() else self.task.exception()
        if isinstance(error, EngineError):
            return error
        url, stream = self.server.url, self.stream
        if error is not None:
            return EngineError(f"{url} answered what can't be read: {type(error).__name__}: {error}")
        if stream.end == "error" and not 400 <= (stream.status or 500) < 500:
            return Unreachable(f"{url}/generate was cut: {stream.message}")  # so says a router of a server that died
        if stream.end == "error" or (stream.end == "abort" and stream.status is not None):
            return Refused(f"{url}/generate: {stream.message}", stream.status or 400)
        if stream.end == "cut":
            return Unreachable(f"{url}/generate ended without a final chunk")
        return None

    def paused(self) -> None:
        """A pause begins: what arrived so far is of `version`, what comes may not be."""
        if self._certain is None:
            self._certain = self.stream.mark()

    def cut(self) -> None:
        """Stop listening."""
        if self.task is not None:
            self.task.cancel()

    def certain_spans(self) -> tuple[VersionSpan, ...]:
        """Spans after an end that was not heard; tokens of uncertain versions are forgotten."""
        if self._certain is not None:
            self.stream.cut_back(self._certain)
        count, reported = len(self.stream.ids), self.stream.version
        if not count:
            return ()
        if reported not in (None, str(self.version)):
            raise WrongVersion(f"{self.server.url} sampled with version {reported} where it had version {self.version}")
        return (VersionSpan(self.version, 0, count),)


@dataclass(slots=True)
class Turn:
    """A request, and the tokens that it has so far."""

    request: GenerationRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    attempt: Attempt | None = None
    aborted: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def body(self, attempt: Attempt, stream_interval: int) -> dict[str, Any]:
        """What the server is asked: to go on from the kept tokens, with what is left of the budget."""
        sampling = self.request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens - len(self.ids),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stream_interval": stream_interval,
            "skip_special_tokens": False,
        }
        if sampling.stop_token_ids:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        else:
            params["ignore_eos"] = True
        if sampling.seed is not None:
            # Heard only with --enable-deterministic-inference; where a resumed turn began is part of it.
            params["sampling_seed"] = (sampling.seed * 1_000_003 + len(self.ids)) % (1 << 62)
        return {
            "rid": attempt.rid,
            "input_ids": [*self.request.input_ids, *self.ids],
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "sampling_params": params,
        }

    def keep(self, attempt: Attempt, published: int) -> Finish | None:
        """Take the tokens of an attempt that is over; the finish of the turn, or None when it has to go on.

        WrongVersion, and nothing is kept, where they are older than what the server had, or newer than `published`.
        """
        stream = attempt.stream
        stream.settle()
        heard = stream.end in ("stop", "length") or (stream.end == "abort" and stream.stamped == len(stream.ids))
        spans = stream.spans(attempt.server.url) if heard else attempt.certain_spans()
        known = attempt.version
        for span in spans:
            if not known <= span.version <= published:
                raise WrongVersion(f"{attempt.server.url} sampled with version {span.version} where it had {known}")
            known = span.version
        self.ids += stream.ids
        self.logprobs += stream.logprobs
        for span in spans:
            self.versions += [span.version] * (span.end - span.start)
        sampling = self.request.sampling
        if heard and stream.end != "abort":
            return "stop" if stream.end == "stop" else "length"
        if self.ids and stream.ids and self.ids[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.ids) >= sampling.max_new_tokens else None

    def generation(self, finish: Finish) -> Generation:
        spans = spans_of(self.versions)
        return Generation(tuple(self.ids), tuple(self.logprobs), spans, finish, max(len(spans), 1))
