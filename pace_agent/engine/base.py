"""What every engine does: generate from ids, stop for a weight update, go on from the kept tokens, stamp every token.

Contract, tested for each engine that trains:

* `generate` returns when the turn is finished (`stop`, `length`) or aborted (`abort`). A weight update in between is
  invisible except in `spans` and `segments`: the engine goes on from the tokens it has with the remaining budget.
* Every log-probability is that of the stamped version at `temperature`, given the whole prefix.
* Ids are checked against the vocabulary before anything is computed: EngineError names the id.
* `update_weights` is allowed only while paused, and is all or nothing: on an error the old weights and version stay.
* `version` never falls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pace_agent.errors import EngineError
from pace_agent.types import Finish, VersionSpan

WeightSource = Path | Mapping[str, Any]
"""A folder (or file) of safetensors, or tensors by parameter name."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one turn. `temperature` 0 is greedy (log-probabilities are then those at temperature 1).

    `top_p` and `top_k` (0: off) restrict the choice; log-probabilities are always those of the full distribution.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One turn. `input_ids` is the whole sequence so far.

    `session` names the rollout: an engine may keep its cache between turns until `release(session)`.
    """

    rid: str
    input_ids: Sequence[int]
    sampling: SamplingParams
    session: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """`output_ids` hold the stop token when the model ended its turn (`finish == "stop"`)."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: Finish
    segments: int = 1


@dataclass(frozen=True, slots=True)
class EngineInfo:
    vocab_size: int
    context_length: int
    version: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start; the runtime turns differences into rates."""

    sampled_tokens: int = 0
    prefill_tokens: int = 0
    interrupted: int = 0
    """Turns that a weight update interrupted."""
    updates: int = 0
    update_seconds: float = 0.0
    paused_seconds: float = 0.0
    running: int = 0
    stale_tokens: int = 0
    """Tokens sampled over a cache that older weights filled: 0 unless an engine was told to keep it."""
    out_seconds: float = 0.0
    """How long nothing could be sampled because no server was there."""


class UpdateRefused(EngineError):
    """A part of the engine could not take new weights and is out; the rest has the old ones, and can be asked again."""


class Engine(Protocol):
    async def start(self) -> EngineInfo: ...

    async def generate(self, request: GenerationRequest) -> Generation: ...

    async def release(self, session: str) -> None:
        """Forget what is kept for a rollout. Unknown names are fine."""

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all, with finish `abort` and the tokens so far. Unknown ids are fine."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, source: WeightSource, version: int) -> None: ...

    def stats(self) -> EngineStats: ...

    async def aclose(self) -> None: ...
