"""The half of the fake SGLang server that computes: turns, one token per running turn and tick, versions, spans.

It mirrors the scheduler of SGLang 0.5.23 as a client can see it, and no more. What always holds:

* The tokens of a turn depend on the sequence before them alone: a turn that goes on elsewhere from its kept tokens
  continues as if it had never been cut.
* A log-probability says which weights sampled the token: `weights_of(logprob)`, and `is_stale(logprob)` when they
  worked over a cache that older weights had filled.
* A turn is in `waiting` or in `running` until it finishes; a finished one is in neither.
"""

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from zlib import crc32

STALE = 0.05
FORCED_INTERVAL = 50
"""A turn that isn't streamed leaves the scheduler in pieces of so many tokens."""


def weights_of(logprob: float) -> int:
    """The version (as a number) of the weights that sampled a token."""
    return int(-logprob * 10 + 1e-6) - 1


def is_stale(logprob: float) -> bool:
    """Was the token sampled over a cache of older weights?"""
    return -logprob * 10 + 1e-6 - (weights_of(logprob) + 1) >= STALE * 10


def as_number(version: str) -> int:
    return int("".join(filter(str.isdigit, version)) or 0)


class Turn:
    """One request: what was asked, what was sampled, and how much of it the front end has (`sent`)."""

    def __init__(self, rid: str, input_ids: Sequence[int], body: dict[str, Any], default_interval: int) -> None:
        sampling = body.get("sampling_params") or {}
        self.rid = rid
        self.rid_json = json.dumps(rid)
        self.input_ids = input_ids
        self.prompt_tokens = len(input_ids)
        self.max_new_tokens: int | None = sampling.get("max_new_tokens", 128)
        self.stops = frozenset(sampling.get("stop_token_ids") or ())
        self.ignores_stops = bool(sampling.get("ignore_eos"))
        self.stream = bool(body.get("stream"))
        self.interval: int = sampling.get("stream_interval") or default_interval
        self.wants_logprobs = bool(body.get("return_logprob"))
        self.ids: list[int] = []
        self.logprobs: list[str] = []
        self.ids_json = ""
        self.logprobs_json = ""
        self.sent = 0
        self.delivered = 0
        self.state = 0
        self.limit = 0
        self.retractions = 0
        self.changes: list[tuple[str, int]] = []
        self.to_finish: dict[str, Any] | None = None
        self.finish: dict[str, Any] | None = None
        self.spans: list[dict[str, Any]] = []
        self.from_queue = False
        self.stale = False
        self.dispatched = False
        self.abort_sent = False
        self.begun = time.time()
        self.answered = False
        self.ready = asyncio.Event()

    def publish(self) -> None:
        """Hand what was sampled since the last time to the front end."""
        if self.sent < len(self.ids):
            comma = "," if self.ids_json else ""
            self.ids_json += comma + ",".join(map(str, self.ids[self.sent :]))
            if self.wants_logprobs:
                comma = "," if self.logprobs_json else ""
                self.logprobs_json += comma + ",".join(self.logprobs[self.sent :])
            self.sent = len(self.ids)
        if self.stream or self.finish is not None:
            self.ready.set()

    def cut_to(self, tokens: int) -> None:
        """Show only the first `tokens` output tokens, as if the turn were still running."""
        self.finish, self.sent = None, min(tokens, self.sent)
        self.ids_json = ",".join(map(str, self.ids[self.delivered : self.sent]))
        self.logprobs_json = ",".join(self.logprobs[self.delivered : self.sent])

    def spans_over(self, version: str, tokens: int) -> list[dict[str, Any]]:
        """Half-open spans of versions over the first `tokens` output tokens."""
        spans: list[dict[str, Any]] = []
        for name, change in [*self.changes, (version, tokens)]:
            end = min(change, tokens)
            if spans and end <= spans[-1]["end"]:
                continue
            if spans and name == spans[-1]["version"]:
                spans[-1]["end"] = end
                continue
            spans.append({"version": name, "start": spans[-1]["end"] if spans else 0, "end": end})
        return spans


class Settings(Protocol):
    """What a scheduler needs of the server around it; read anew at every tick."""

    vocab_size: int
    context_length: int
    eos_token_id: int | None
    max_running: int
    token_seconds: float
    stop_after: int | None
    stop_rate: float
    faults: Any

    def kill(self) -> None: ...


class Scheduler:
    """Runs turns, one token each per tick."""

    def __init__(self, settings: Settings, version: str) -> None:
        self.settings = settings
        self.version = version
        self.eos = frozenset(() if settings.eos_token_id is None else (settings.eos_token_id,))
        self.sleep_seconds = 0.0
        self.waiting: list[Turn] = []
        self.running: list[Turn] = []
        self.aborted: list[str] = []
        self.paused = False
        self.stale_cache = False
        self.sampled_tokens = 0
        self.last_output = 0.0
        self.finished: Callable[[Turn], None] = lambda turn: None
        self._late_weights: int | None = None
        self._work = asyncio.Event()

    async def run(self) -> None:
        """Tick for ever."""
        while True:
            if self.paused or not (self.waiting or self.running):
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self.settings.token_seconds + self.sleep_seconds)
            if self.settings.faults.stall:
                await asyncio.sleep(0.01)
            elif not self.paused:
                self.step()

    def add(self, turn: Turn, refusal: dict[str, Any] | None = None) -> None:
        """Queue a turn; one with a `refusal` samples a single token and ends with it."""
        turn.dispatched = True
        turn.to_finish = refusal
        longest = self.settings.context_length - 1
        if refusal is None and turn.prompt_tokens >= longest - 5:
            turn.to_finish = refused(
                f"Input length ({turn.prompt_tokens} tokens) exceeds the maximum allowed length "
                f"({longest - 5} tokens). Use a shorter input or enable --allow-auto-truncate."
            )
        asked = 1 << 30 if turn.max_new_tokens is None else turn.max_new_tokens
        turn.limit = max(0, min(asked, longest - turn.prompt_tokens - 1))
        if turn.to_finish is not None:
            turn.prompt_tokens, turn.wants_logprobs = 1, False
        elif max(turn.input_ids) >= self.settings.vocab_size or min(turn.input_ids) < 0:
            self.settings.kill()
            return
        turn.state = crc32(array("I", turn.input_ids).tobytes())
        self.waiting.append(turn)
        self._work.set()

    def step(self) -> None:
        """One forward pass of everything that runs."""
        room = self.settings.max_running - len(self.running)
        if self.waiting and room > 0:
            for turn in self.waiting[:room]:
                turn.stale = self.stale_cache
                self.running.append(turn)
            del self.waiting[:room]
        weights = as_number(self.version) if self._late_weights is None else self._late_weights
        self._late_weights = None
        fresh = (weights + 1) / 10
        going = []
        for turn in self.running:
            position = len(turn.ids)
            if turn.limit or turn.to_finish is not None:
                self._sample(turn, fresh + turn.stale * STALE + position % 100 / 1e4)
                position += 1
            if self._finished(turn):
                turn.spans = turn.spans_over(self.version, position)
                self.finished(turn)
                turn.publish()
                continue
            going.append(turn)
            if turn.stream:
                if turn.interval == 1 or position - turn.sent >= turn.interval or turn.sent == 0:
                    turn.publish()
            elif position % FORCED_INTERVAL == 0:
                turn.publish()
        self.running = going
        self.last_output = time.monotonic()

    def _sample(self, turn: Turn, surprise: float) -> None:
        state = turn.state
        token = (state * 0x9E3779B1 >> 9) % self.settings.vocab_size
        if not turn.ignores_stops and (turn.stops or self.eos):
            stops = turn.stops | self.eos
            chance = (state * 0x85EBCA6B >> 11) & 0xFFFF
            if chance < self.settings.stop_rate * 0x10000 or len(turn.ids) + 1 == self.settings.stop_after:
                token = min(self.eos or turn.stops)
            else:
                while token in stops:
                    token = (token + 1) % self.settings.vocab_size
        turn.ids.append(token)
        turn.logprobs.append(f"[-{surprise:.4f},{token},null]")
        turn.state = crc32(token.to_bytes(4, "little"), state)
        self.sampled_tokens += 1

    def _finished(self, turn: Turn) -> bool:
        if turn.to_finish is not None:
            turn.finish = turn.to_finish
            self.aborted.append(turn.rid)
        elif len(turn.ids) >= turn.limit:
            turn.finish = {"type": "length", "length": turn.limit}
        elif not turn.ignores_stops and (turn.ids[-1] in turn.stops or turn.ids[-1] in self.eos):
            turn.finish = {"type": "stop", "matched": turn.ids[-1]}
        return turn.finish is not None

    def abort(self, prefix: str, reason: dict[str, Any] | None = None) -> None:
        """End every turn whose id begins with `prefix`. A running one samples one token more, a queued one ends here
        and loses what the front end did not have."""
        for turn in [turn for turn in self.waiting if turn.rid.startswith(prefix)]:
            self.waiting.remove(turn)
            turn.from_queue = True
            spans = turn.spans_over(self.version, len(turn.ids))
            turn.spans = [
                {**span, "end": min(span["end"], turn.sent)}
                for span in spans
                if span["start"] < turn.sent or span["start"] == 0
            ]
            turn.finish = reason or {"type": "abort", "message": "Abort in waiting queue"}
            self.aborted.append(turn.rid)
            self.finished(turn)
            turn.ready.set()
        for turn in self.running:
            if turn.rid.startswith(prefix):
                turn.to_finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

    def pause(self, mode: str) -> None:
        self.paused = True
        if mode == "retract":
            for turn in self.running:
                turn.retractions += 1
            self.waiting.extend(self.running)
            self.running = []
        elif self.running:
            self._late_weights = as_number(self.version)  # one pass is under way: its tokens come after the pause

    def go_on(self) -> None:
        self.paused = False
        self._work.set()

    def set_version(self, version: str | None, *, weights: bool = True) -> None:
        """Other weights (or only another name for them): stamp what was sampled under the old name."""
        if version is None or version == self.version:
            return
        for turn in [*self.running, *self.waiting]:
            if turn.ids:
                turn.changes.append((self.version, len(turn.ids)))
        self.version = version
        if weights:
            self.stale_cache = True
            for turn in self.running:
                turn.stale = True

    def flush(self) -> bool:
        """Empty the cache, unless a turn needs it."""
        if self.running or (self.waiting and not self.paused):
            return False
        self.stale_cache = False
        return True


def refused(message: str, status: int = 400) -> dict[str, Any]:
    """How a turn ends that the scheduler won't run."""
    return {"type": "abort", "message": message, "status_code": status, "err_type": "BadRequestError"}


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def chunk(turn: Turn, version: str, *, incremental: bool, versions: bool) -> str:
    """One answer, as JSON. `version` is what the front end reports while a turn runs."""
    finish = turn.finish
    meta = [f'"id":{turn.rid_json},"finish_reason":{compact(finish)}']
    ids, logprobs = turn.ids_json, turn.logprobs_json
    if finish is not None and turn.spans:
        version = turn.spans[-1]["version"]
    stamps = f',"weight_versions":{compact(turn.spans)}' if finish is not None and versions else ""
    late = f',"e2e_latency":{time.time() - turn.begun:.6f}' if finish is not None else ""
    if not turn.answered:
        turn.answered = True
        late += f',"response_sent_to_client_ts":{time.time():.6f}'
    if turn.from_queue and incremental:  # this chunk alone repeats the last id, and every log-probability
        ids = str(turn.ids[turn.sent - 1]) if turn.sent else ""
        logprobs = ",".join(turn.logprobs[: turn.sent])
    probabilities = ""
    if turn.wants_logprobs:
        probabilities = (
            f',"input_token_logprobs":[],"output_token_logprobs":[{logprobs}]'
            f',"output_token_logprobs_length":{turn.sent}'
        )
    if turn.from_queue:  # what the front end makes up by itself for a turn that never came back
        meta.append(f'"weight_version":{json.dumps(version)}{late}{stamps}{probabilities}')
        meta.append(f'"completion_tokens":{turn.sent}')
        return f'{{"text":"","output_ids":[{ids}],"meta_info":{{{",".join(meta)}}}}}'
    cached = turn.prompt_tokens - 1
    details = f'{{"device":{cached},"host":0}}' if cached else "null"
    meta.append(f'"prompt_tokens":{turn.prompt_tokens},"weight_version":{json.dumps(version)}')
    meta.append(f'"num_retractions":{turn.retractions}{probabilities}')
    meta.append(f'"reasoning_tokens":0,"completion_tokens":{turn.sent},"cached_tokens":{cached}{stamps}')
    meta.append(f'"cached_tokens_details":{details},"dp_rank":null{late}')
    return f'{{"output_ids":[{ids}],"meta_info":{{{",".join(meta)}}}}}'
