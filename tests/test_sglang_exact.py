"""The case that the engine stands on, against the real server: turns that go on under new weights are exact."""

import asyncio
from pathlib import Path
from typing import Any

import torch
from real_sglang import real_sglang
from sglang_engines import sglang_engine
from tiny_models import make_model

from pace_agent.engine.base import Generation, GenerationRequest, SamplingParams
from pace_agent.types import check_spans

TURNS, TOKENS, SPREAD = 32, 100, 0.035


@torch.no_grad()
def errors(model: Any, request: GenerationRequest, generation: Generation) -> torch.Tensor:
    """Shape (tokens,): how far each log-probability is from what `model` gives."""
    ids = torch.tensor([[*request.input_ids, *generation.output_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(request.input_ids) - 1 : -1].float()
    logprobs = (logits / request.sampling.temperature).log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(generation.output_ids)[:, None])[:, 0]
    return (chosen - torch.tensor(generation.logprobs)).abs()


async def test_turns_that_go_on_under_new_weights_are_exact(tmp_path: Path) -> None:
    models = [make_model(seed, spread=SPREAD) for seed in (0, 1)]
    for version, model in enumerate(models):
        model.save_pretrained(tmp_path / str(version))
    with real_sglang(tmp_path / "0", tmp_path, "--incremental-streaming-output") as server:
        server.post("/slow_down", {"forward_sleep_time": 0.03})
        engine = sglang_engine([server.url], tmp_path / "0")
        await engine.start()
        requests = [
            GenerationRequest(f"turn-{i}", list(range(1, 13)), SamplingParams(TOKENS, temperature=0.7 + 0.3 * (i % 2)))
            for i in range(TURNS)
        ]
        turns = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(1.5)
        await engine.pause()
        await engine.update_weights(tmp_path / "1", 1)
        await engine.resume()
        done = await asyncio.gather(*turns)
        await engine.aclose()
    served = [model.to(torch.bfloat16).float() for model in models]  # the server's weights, without its rounding
    right, wrong = [], []
    for request, generation in zip(requests, done, strict=True):
        check_spans(generation.spans, TOKENS)
        assert [span.version for span in generation.spans] == [0, 1]
        both = [errors(model, request, generation) for model in served]
        for span in generation.spans:
            right.append(both[span.version][span.start : span.end])
            wrong.append(both[1 - span.version][span.start : span.end])
    assert torch.cat(right).max() < 0.01
    assert torch.cat(wrong).mean() > 0.1
