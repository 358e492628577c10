"""Continuous batching over a row cache, synchronous: `submit` requests, call `step`, take what finished.

What always holds:

* A slot owns one cache row. It is running (one turn), held (a session waits for its next turn) or free. A held session
  is evicted, longest waiting first, when a new request finds no free slot; its next turn then computes everything.
* Turns of held sessions start at the next step, before requests that wait for a slot; those start in order.
* `table.ids[slot, :length]` are the ids of the slot, `cached` of them are in the row. Between steps every running slot
  has at least one id that is not cached, because a sampled token is cached by the step that follows it.
* A token is stamped with `version` in the step that samples it, and weights change only in `swap`, between steps.
* With `stale_cache="recompute"` a cache row holds what the present weights give: a swap discards every row; running
  turns are computed again by the next step, all together, held ones by their next turn. With `"keep"` rows survive a
  swap: later tokens see keys and values of older weights, so that their log-probabilities match no version exactly.
  `stats().stale_tokens` counts them.
"""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pace_agent.engine.base import EngineInfo, EngineStats, Generation, GenerationRequest, SamplingParams
from pace_agent.engine.local.attention import NAME, Plan
from pace_agent.engine.local.planner import Ints, Planner, Table
from pace_agent.engine.local.rows import RowCache
from pace_agent.engine.local.sampler import mixed_seed, sample, uniforms
from pace_agent.engine.local.weights import replace_weights
from pace_agent.engine.request import check_request, spans_of
from pace_agent.errors import EngineError
from pace_agent.types import Finish

StaleCache = Literal["recompute", "keep"]
Outcome = tuple[str, Generation | EngineError]


@dataclass(slots=True)
class _Turn:
    """A request that has a slot. Its numbers are in the decoder's arrays, by slot."""

    rid: str
    session: str
    hold: bool
    segments: int = 1


class SlotDecoder:
    """One model and `max_slots` rows. Not thread-safe: the caller sees to it that one thing happens at a time.

    The model is taken over: `swap` changes its weights. It must be a transformers causal model whose attention goes
    through the attention interface; whether that works is checked here, against the model's own attention.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_slots: int = 128,
        context_length: int | None = None,
        stale_cache: StaleCache = "recompute",
        version: int = 0,
    ) -> None:
        if max_slots < 1:
            raise EngineError(f"max_slots must be at least 1, got {max_slots}")
        if stale_cache not in ("recompute", "keep"):
            raise EngineError(f"stale_cache must be 'recompute' or 'keep', got {stale_cache!r}")
        config = model.config.get_text_config()
        longest = int(getattr(config, "max_position_embeddings", None) or context_length or 2048)
        self.model = model.eval()
        self.max_slots = max_slots
        self.vocab_size = int(config.vocab_size)
        self.context_length = longest if context_length is None else context_length
        if not 2 <= self.context_length <= longest:
            raise EngineError(f"context_length must be between 2 and the model's {longest}, got {context_length}")
        self.stale_cache: StaleCache = stale_cache
        self.version = version
        self._device, self._dtype = model.device, model.dtype
        model.set_attn_implementation(NAME)
        # transformers passes a 4D mask on untouched and so builds none; what may attend to what is in the plan.
        self._no_mask = torch.zeros((1, 1, 1, 1), dtype=self._dtype, device=self._device)
        self._entropy = random.Random()
        self._reset()
        self._check_model()
        self._reset()
        self._sampled = self._prefilled = self._stale_tokens = self._interrupted = self._updates = 0

    def _reset(self) -> None:
        """Forget every request and every row."""
        slots, context = self.max_slots, self.context_length
        self.table = Table(slots, context)
        self.cache = RowCache(slots, context)
        share = self.stale_cache == "recompute"
        self._planner = Planner(self.table, self.cache, self._device, self._dtype, share=share)
        self._queue: deque[GenerationRequest] = deque()
        self._returning: list[tuple[int, GenerationRequest]] = []
        self._running: dict[int, _Turn] = {}
        self._slot_of: dict[str, int] = {}
        self._rids: set[str] = set()
        self._sessions: set[str] = set()
        self._held: dict[str, int] = {}
        self._free = list(range(slots))
        self._active: Ints | None = None
        self._stale = np.zeros(slots, dtype=np.bool_)
        self._logprobs = np.zeros((slots, context), dtype=np.float32)
        self._versions = np.zeros((slots, context), dtype=np.int64)
        self._start = np.zeros(slots, dtype=np.int64)
        self._limit = np.zeros(slots, dtype=np.int64)
        self._seed = np.zeros(slots, dtype=np.uint64)
        self._temperature = np.ones(slots, dtype=np.float32)
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._top_p = np.ones(slots, dtype=np.float64)
        self._stops = np.full((slots, 1), -1, dtype=np.int64)
        self._sampled = self._prefilled = self._stale_tokens = self._interrupted = self._updates = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(self.vocab_size, self.context_length, self.version)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._rids)

    def stats(self) -> EngineStats:
        """The decoder's part of the counters; times are the engine's."""
        return EngineStats(
            sampled_tokens=self._sampled,
            prefill_tokens=self._prefilled,
            interrupted=self._interrupted,
            updates=self._updates,
            running=len(self._rids),
            stale_tokens=self._stale_tokens,
        )

    # Requests

    def submit(self, request: GenerationRequest) -> None:
        """Take a turn; EngineError if it can't be computed. It runs from the next step that has a slot for it."""
        check_request(request, self.vocab_size, self.context_length)
        if request.rid in self._rids:
            raise EngineError(f"request {request.rid!r} is already running")
        if request.session and request.session in self._sessions:
            raise EngineError(f"session {request.session!r} already runs a turn")
        self._rids.add(request.rid)
        if request.session:
            self._sessions.add(request.session)
        slot = self._held.pop(request.session, None)
        if slot is None:
            self._queue.append(request)
        else:
            self._returning.append((slot, request))

    def abort(self, rid: str | None = None) -> list[Outcome]:
        """End one request, or all, with what it has; unknown ids are fine."""
        if rid is not None and rid not in self._rids:
            return []
        waiting = [request for request in self._queue if rid in (None, request.rid)]
        back = [(slot, request) for slot, request in self._returning if rid in (None, request.rid)]
        self._queue = deque(request for request in self._queue if rid not in (None, request.rid))
        self._returning = [pair for pair in self._returning if rid not in (None, pair[1].rid)]
        for slot, request in back:
            self._held[request.session] = slot
        done: list[Outcome] = []
        for request in [*waiting, *(request for _, request in back)]:
            self._rids.discard(request.rid)
            self._sessions.discard(request.session)
            done.append((request.rid, Generation((), (), (), "abort")))
        slots = sorted(self._running) if rid is None else [self._slot_of[rid]] if rid in self._slot_of else []
        return done + [self._finish(slot, "abort") for slot in slots]

    def fail_all(self, error: EngineError) -> list[Outcome]:
        """End every request with an error and forget every row: after a step that raised."""
        kept = (self._sampled, self._prefilled, self._stale_tokens, self._interrupted, self._updates)
        rids = sorted(self._rids)
        self._reset()
        self._sampled, self._prefilled, self._stale_tokens, self._interrupted, self._updates = kept
        return [(rid, EngineError(str(error))) for rid in rids]

    def release(self, session: str) -> None:
        """Free the slot of a session, at once or when its turn ends. Unknown names are fine."""
        slot = self._held.pop(session, None)
        if slot is not None:
            heappush(self._free, slot)
        elif session in self._sessions:
            for turn in self._running.values():
                if turn.session == session:
                    turn.hold = False

    def _admit(self) -> None:
        for slot, request in self._returning:
            self._continue(slot, request.input_ids)
            self._occupy(slot, request)
        self._returning.clear()
        while self._queue and (self._free or self._held):
            request = self._queue.popleft()
            slot = heappop(self._free) if self._free else self._held.pop(next(iter(self._held)))
            self.table.cached[slot] = 0
            self._stale[slot] = False
            self._continue(slot, request.input_ids)
            self._occupy(slot, request)

    def _continue(self, slot: int, ids: Sequence[int]) -> None:
        """Keep what the row holds of the new input, but compute at least its last token, whose logits are needed."""
        table, n = self.table, len(ids)
        new = np.asarray(ids, dtype=np.int64)
        known = min(int(table.cached[slot]), n - 1)
        differs = table.ids[slot, :known] != new[:known]
        table.cached[slot] = int(differs.argmax()) if differs.any() else known
        table.ids[slot, :n] = new
        table.length[slot] = n

    def _occupy(self, slot: int, request: GenerationRequest) -> None:
        sampling, n = request.sampling, len(request.input_ids)
        self._start[slot] = n
        self._limit[slot] = min(n + sampling.max_new_tokens, self.context_length)
        self._seed[slot] = mixed_seed(self._entropy.getrandbits(64) if sampling.seed is None else sampling.seed)
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        wide = len(sampling.stop_token_ids)
        if wide > self._stops.shape[1]:
            more = np.full((self.max_slots, wide - self._stops.shape[1]), -1, dtype=np.int64)
            self._stops = np.concatenate((self._stops, more), axis=1)
        self._stops[slot] = -1
        self._stops[slot, :wide] = sampling.stop_token_ids
        self._running[slot] = _Turn(request.rid, request.session, bool(request.session))
        self._slot_of[request.rid] = slot
        self._active = None
        self._planner.forget()

    # Steps

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """One token for every running request whose input is computed. Returns the requests that ended."""
        if self._returning or self._queue:
            self._admit()
        if not self._running:
            return []
        if self._active is None:
            self._active = np.array(sorted(self._running), dtype=np.int64)
        plan, slots, last = self._planner.plan(self._active)
        logits = self._forward(plan, last)
        self._prefilled += plan.tokens.shape[1] - (0 if plan.decode is None else plan.decode.n)
        return self._record(slots, logits) if len(slots) else []

    def _forward(self, plan: Plan, last: Tensor) -> Tensor:
        """(len(last), vocabulary)."""
        out = self.model(
            input_ids=plan.tokens,
            position_ids=plan.positions,
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=last,
            plan=plan,
        )
        return out.logits[0]  # type: ignore[no-any-return]

    def _record(self, slots: Ints, logits: Tensor) -> list[Outcome]:
        """Sample for `slots`, append, stamp, and end what has reached its end."""
        length = self.table.length[slots]
        uniform = uniforms(self._seed[slots], length - self._start[slots])
        temperature = self._temperature[slots]
        tokens, logprobs = sample(logits, temperature, uniform, self._top_k[slots], self._top_p[slots])
        if not np.isfinite(logprobs).all():
            return self._fail_broken(slots[~np.isfinite(logprobs)])
        self.table.ids[slots, length] = tokens
        self._logprobs[slots, length] = logprobs
        self._versions[slots, length] = self.version
        self.table.length[slots] = length + 1
        self._sampled += len(slots)
        if self.stale_cache == "keep":
            self._stale_tokens += int(self._stale[slots].sum())
        stopped = (self._stops[slots] == tokens[:, None]).any(1)
        ended = stopped | (length + 1 >= self._limit[slots])
        if not ended.any():
            return []
        return [self._finish(int(slots[i]), "stop" if stopped[i] else "length") for i in np.flatnonzero(ended)]

    def _finish(self, slot: int, finish: Finish) -> Outcome:
        turn = self._running.pop(slot)
        sampled = slice(int(self._start[slot]), int(self.table.length[slot]))
        generation = Generation(
            output_ids=tuple(self.table.ids[slot, sampled].tolist()),
            logprobs=tuple(self._logprobs[slot, sampled].tolist()),
            spans=spans_of(self._versions[slot, sampled].tolist()),
            finish=finish,
            segments=turn.segments,
        )
        self._vacate(slot, turn)
        return turn.rid, generation

    def _fail_broken(self, slots: Ints) -> list[Outcome]:
        """End the requests whose logits are not finite. Their rows may hold NaN, so every row is computed again."""
        failed: list[Outcome] = []
        for slot in slots.tolist():
            turn = self._running.pop(slot)
            turn.hold = False
            self._vacate(slot, turn)
            failed.append((turn.rid, EngineError(f"the logits of version {self.version} are not finite")))
        self.cache.clear()
        self._discard_rows()
        return failed

    def _vacate(self, slot: int, turn: _Turn) -> None:
        del self._slot_of[turn.rid]
        self._rids.discard(turn.rid)
        self._sessions.discard(turn.session)
        if turn.hold:
            self._held[turn.session] = slot
        else:
            heappush(self._free, slot)
        self._active = None

    # Weights

    def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights, or raise EngineError and leave everything as it was."""
        if version < self.version:
            raise EngineError(f"version {version} is below the engine's version {self.version}")
        replace_weights(self.model, weights)
        self.version = version
        self._updates += 1
        for slot, turn in self._running.items():
            if self.table.length[slot] > self._start[slot]:
                self._interrupted += turn.segments == 1
                turn.segments += 1
        if self.stale_cache == "recompute":
            self._discard_rows()
        else:
            self._stale |= self.table.cached > 0

    def _discard_rows(self) -> None:
        self.table.cached[:] = 0
        self._planner.forget()

    def _check_model(self) -> None:
        """Compare a few greedy tokens, decoded over rows, with one plain forward pass of the same model."""
        room = min(10, self.context_length - 1)
        prompt = [(7 * i + 3) % self.vocab_size for i in range(room)]
        tolerance = 1e-3 if self._dtype in (torch.float32, torch.float64) else 0.25
        sampling = SamplingParams(max_new_tokens=3, temperature=0.0)
        try:
            for n in (room, max(1, room - 1)):
                self.submit(GenerationRequest(f"check-{n}", prompt[:n], sampling))
            outcomes = [outcome for _ in range(4) for outcome in self.step()]
            for rid, generation in outcomes:
                if isinstance(generation, EngineError):
                    raise generation
                n = int(rid.removeprefix("check-"))
                expected = self._plain_logprobs(prompt[:n], generation.output_ids)
                if not np.allclose(expected, generation.logprobs, atol=tolerance):
                    raise EngineError(f"{type(self.model).__name__} gives other numbers over the local engine's cache")
        except (TypeError, AttributeError, RuntimeError) as error:
            raise EngineError(f"{type(self.model).__name__} can't run in the local engine: {error}") from error

    @torch.inference_mode()
    def _plain_logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        ids = torch.tensor([[*prompt, *output]], device=self._device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1)
        return [float(logprobs[i, token]) for i, token in enumerate(output)]
