"""The local engine against `model.generate` with a static batch: useful tokens per second of CPU time, one thread.

Both get the same requests in the same order and the same number of rows: prompts of mixed length, answers whose
lengths are log-normal. A static batch runs to its longest answer and waits for it; the engine refills a slot as soon
as it is free. The two are interleaved, so that both see the same machine. The last line is one JSON object.

    python benchmarks/engine.py
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from pace_agent.engine.base import GenerationRequest, SamplingParams
from pace_agent.engine.local.slots import SlotDecoder


def make_model(seed: int = 0) -> Any:
    """The embedded job's architecture (0.66 M parameters), random weights."""
    config = Qwen3Config(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        vocab_size=512,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def make_requests(count: int, rng: random.Random, *, shared: int, name: str) -> list[GenerationRequest]:
    """Prompts of `shared` common tokens and 20 to 100 own ones; answers log-normal (median 32, cut at 256)."""
    common = [rng.randrange(512) for _ in range(shared)]
    requests = []
    for i in range(count):
        prompt = common + [rng.randrange(512) for _ in range(rng.randint(20, 100))]
        length = max(1, min(256, round(rng.lognormvariate(3.466, 0.8))))
        requests.append(GenerationRequest(f"{name}-{i}", prompt, SamplingParams(max_new_tokens=length, seed=i)))
    return requests


def run_engine(decoder: SlotDecoder, requests: Sequence[GenerationRequest]) -> float:
    """CPU seconds for all requests."""
    start = time.process_time()
    for request in requests:
        decoder.submit(request)
    while decoder.busy:
        decoder.step()
    return time.process_time() - start


@torch.inference_mode()
def run_static(model: Any, requests: Sequence[GenerationRequest], rows: int) -> float:
    """CPU seconds for all requests in static batches of `rows`, padded on the left."""
    start = time.process_time()
    for at in range(0, len(requests), rows):
        batch = requests[at : at + rows]
        longest = max(len(request.input_ids) for request in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, request in enumerate(batch):
            ids[i, longest - len(request.input_ids) :] = torch.tensor(request.input_ids)
            mask[i, longest - len(request.input_ids) :] = 1
        tokens = max(request.sampling.max_new_tokens for request in batch)
        model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=tokens)
    return time.process_time() - start


def useful(requests: Sequence[GenerationRequest]) -> int:
    return sum(request.sampling.max_new_tokens for request in requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    static, decoder = make_model(), SlotDecoder(make_model(), max_slots=128)

    print(f"{'batch':>6} {'engine tok/s':>13} {'generate tok/s':>15}   one length, no prefix in common")
    for rows in (1, 16, 128):
        rng = random.Random(rows)
        requests = [
            GenerationRequest(f"even-{rows}-{i}", [rng.randrange(512) for _ in range(64)], SamplingParams(64, seed=i))
            for i in range(rows)
        ]
        seconds = min(run_engine(decoder, requests) for _ in range(2))
        other = min(run_static(static, requests, rows) for _ in range(2))
        print(f"{rows:>6} {64 * rows / seconds:>13.0f} {64 * rows / other:>15.0f}")

    results: dict[str, float] = {}
    for key, shared in (("vs_generate", 0), ("vs_generate_shared_prefix", 80)):
        ratios, rates = [], []
        for round_ in range(args.rounds):
            rng = random.Random(round_)
            requests = make_requests(args.requests, rng, shared=shared, name=f"{key}-{round_}")
            slots = SlotDecoder(make_model(), max_slots=args.rows)
            ours, theirs = run_engine(slots, requests), run_static(static, requests, args.rows)
            ratios.append(theirs / ours)
            rates.append(useful(requests) / ours)
        results[key] = round(statistics.median(ratios), 3)
        print(f"mixed lengths, {shared} shared prompt tokens, {args.rows} rows: {statistics.median(rates):.0f} tok/s")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
