"""Log-probabilities of the sampled tokens, and of nothing else.

Three things make this cheaper than scoring whole sequences, and none changes the result:

* The head runs on the positions that predict a sampled token, not on prompts, tool output and padding.
* Rows are padded on the right alone, so causal attention needs no mask and takes its fastest kernel.
* What all rows begin with (the system message with its tools) is computed once, as a cache that the rows share.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pace_agent.trainers.weight_sync import is_adapted

SCALED_HEADS = (
    "final_logit_softcapping",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_scaling",
)
"""Config entries of models that change the logits after their head, which is bypassed here."""

SHORTEST_PREFIX = 32
"""A shared beginning below this many tokens is not worth a second pass."""


def can_score(model: nn.Module) -> bool:
    """Whether `live_scores` computes what the model's own forward would: a plain backbone and a plain head."""
    causal = _causal(model)
    config = causal.config.get_text_config()
    head = causal.get_output_embeddings()
    return (
        type(head) is nn.Linear
        and causal.base_model is not causal
        and not any(getattr(config, name, None) for name in SCALED_HEADS)
    )


def live_scores(
    model: nn.Module, input_ids: Tensor, live: Tensor, temperature: float, *, share_prefix: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each live token at `temperature`, both (B, T) and 0 where `live` is False.

    `input_ids` (B, P + T) with padding on the right alone; `live` (B, T) marks the tokens to score, each of which has
    a token before it (P >= 1). The entropy has no gradient. `share_prefix=False` where activations are recomputed in
    the backward pass, which keeps no cache.
    """
    causal = _causal(model)
    n_scored = live.shape[1]
    limit = input_ids.shape[1] - n_scored - 1 if share_prefix and _keeps_every_key(causal) else 0
    hidden = _last_hidden(causal, input_ids, shared_prefix(input_ids, limit))
    before = hidden[:, -n_scored - 1 : -1][live]
    logits = causal.get_output_embeddings()(before)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    all_logps = torch.log_softmax(logits, dim=-1)
    logps = all_logps.gather(-1, input_ids[:, -n_scored:][live].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropies = -(all_logps.exp() * all_logps).sum(-1)
    return _spread(logps, live), _spread(entropies, live)


def shared_prefix(input_ids: Tensor, limit: int) -> int:
    """How many leading columns, at most `limit`, hold the same id in every row; 0 below SHORTEST_PREFIX."""
    if input_ids.shape[0] < 2 or limit < SHORTEST_PREFIX:
        return 0
    same = (input_ids[:, :limit] == input_ids[:1, :limit]).all(dim=0)
    length = limit if bool(same.all()) else int(same.to(torch.int8).argmin())
    return length if length >= SHORTEST_PREFIX else 0


def _last_hidden(causal: Any, input_ids: Tensor, prefix: int) -> Tensor:
    """Hidden states (B, L - prefix, H) after the first `prefix` positions, which all rows share."""
    backbone = causal.base_model
    if not prefix:
        whole: Tensor = backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return whole
    from transformers import DynamicCache

    kept = DynamicCache(config=causal.config)
    keeping = {_cache_keyword(backbone.__class__): kept, "use_cache": True}
    backbone(input_ids=input_ids[:1, :prefix], **keeping)
    for layer in kept.layers:
        # A view: the rows share the memory until the layer appends their own keys.
        layer.keys = layer.keys.expand(input_ids.shape[0], -1, -1, -1)
        layer.values = layer.values.expand(input_ids.shape[0], -1, -1, -1)
    rest: Tensor = backbone(input_ids=input_ids[:, prefix:], **keeping).last_hidden_state
    return rest


@cache
def _cache_keyword(backbone: Any) -> str:
    """transformers renamed the argument in 5.20."""
    return "cache" if "cache" in inspect.signature(backbone.forward).parameters else "past_key_values"


def _keeps_every_key(causal: Any) -> bool:
    """Full attention does; a sliding window or a recurrent state doesn't."""
    return set(getattr(causal.config.get_text_config(), "layer_types", None) or ["full_attention"]) == {
        "full_attention"
    }


def _spread(values: Tensor, live: Tensor) -> Tensor:
    """Values (n,) to their places in (B, T). `masked_scatter` keeps the graph even where nothing is live."""
    return values.new_zeros(live.shape).masked_scatter(live, values)


def _causal(model: Any) -> Any:
    return model.get_base_model() if is_adapted(model) else model
