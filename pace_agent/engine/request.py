"""What engines share about one request: checks before anything is computed, and spans from per-token versions."""

from collections.abc import Sequence

from pace_agent.engine.base import GenerationRequest
from pace_agent.errors import EngineError
from pace_agent.types import VersionSpan


def check_request(request: GenerationRequest, vocab_size: int, context_length: int) -> None:
    """Raise EngineError for a request that can't be computed, naming the number that is wrong."""
    name, ids, sampling = f"request {request.rid!r}", request.input_ids, request.sampling
    if len(ids) == 0:
        raise EngineError(f"{name} has no input ids")
    if len(ids) >= context_length:
        raise EngineError(f"{name} has {len(ids)} input ids; a context of {context_length} leaves no room to answer")
    distinct = set(ids)  # ids repeat: both extremes are found sooner than in the whole
    low, high = min(distinct), max(distinct)
    if low < 0 or high >= vocab_size:
        raise EngineError(f"{name}: id {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
    if sampling.max_new_tokens < 1:
        raise EngineError(f"{name}: max_new_tokens must be at least 1, got {sampling.max_new_tokens}")
    if not 0.0 <= sampling.temperature < float("inf"):
        raise EngineError(f"{name}: temperature must be 0 or above, got {sampling.temperature}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise EngineError(f"{name}: top_p must be above 0 and at most 1, got {sampling.top_p}")
    if sampling.top_k < 0:
        raise EngineError(f"{name}: top_k must be 0 (off) or above, got {sampling.top_k}")


def spans_of(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Half-open spans over one version per sampled token."""
    spans: list[VersionSpan] = []
    start = 0
    for end in range(1, len(versions) + 1):
        if end == len(versions) or versions[end] != versions[start]:
            spans.append(VersionSpan(versions[start], start, end))
            start = end
    return tuple(spans)
