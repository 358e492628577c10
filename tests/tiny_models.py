"""Random models of a few thousand weights, and the log-probabilities that they give to what an engine sampled."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from pace_agent.engine.base import Generation, GenerationRequest

VOCAB = 96
CONTEXT = 160


def make_model(seed: int = 0, *, family: str = "qwen3", tied: bool = True, spread: float = 0.3) -> Any:
    """A model whose distributions are far from flat, so that a wrong cache shows; less so with a smaller `spread`."""
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "initializer_range": spread,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = Qwen3Config(head_dim=16, **shape) if family == "qwen3" else LlamaConfig(**shape)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def worst_error(models: Mapping[int, Any], request: GenerationRequest, generation: Generation) -> float:
    """The largest difference to the log-probabilities of each token under the weights of its stamp."""
    ids = torch.tensor([[*request.input_ids, *generation.output_ids]])
    start = len(request.input_ids)
    worst = 0.0
    for span in generation.spans:
        logits = models[span.version](input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
        logprobs = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
        for i in range(span.start, span.end):
            worst = max(worst, abs(float(logprobs[i, generation.output_ids[i]]) - generation.logprobs[i]))
    return worst
