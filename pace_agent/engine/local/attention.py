"""Attention over the row cache, called by transformers through its attention interface.

One forward pass takes the tokens of all rows packed into one sequence, so the linear layers see no padding and a step
that decodes 100 rows and extends 5 costs one pass. What is per row happens here: new keys and values are written to
their rows, decoded tokens attend to the cache in place, longer pieces attend in padded groups. No model class is
named: any causal model that passes its keyword arguments on to the attention interface works, and the decoder checks
that when it is made.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pace_agent.engine.local.rows import Places, RowCache
from pace_agent.errors import EngineError

NAME = "pace_rows"


@dataclass(slots=True)
class Decode:
    """The first `n` packed tokens: one new token in each of `n` rows.

    The cache is read where it lies, rows `low` to `high`; rows between them that don't decode now are computed and
    dropped (`place` says where the n tokens belong). When too many would be dropped, `gather` lists the rows to copy.
    The first `prefix` positions hold the same tokens in all rows and are read once, from row `prefix_row`.
    """

    n: int
    low: int
    high: int
    place: Tensor | None
    gather: Tensor | None
    prefix: int
    prefix_row: int
    length: int
    mask: Tensor
    """(rows, 1, length - prefix), added to the scores."""
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def mask_for(self, heads: int) -> Tensor:
        """(rows * kv heads, 1, length - prefix)."""
        mask = self._masks.get(heads)
        if mask is None:
            mask = self._masks[heads] = self.mask.repeat_interleave(heads, 0)
        return mask


@dataclass(slots=True)
class Extend:
    """b rows with up to t new tokens each, padded."""

    rows: Tensor
    """(b,)"""
    tokens: Tensor
    """(b * t,) packed index of every token; padding points at any token."""
    mask: Tensor
    """(b, 1, t, length), added to the scores."""
    real: Tensor
    """Where in b * t the tokens that are not padding are."""
    packed: Tensor
    """Their packed index, in the same order."""


@dataclass(slots=True)
class Plan:
    """One forward pass. n tokens are packed; positions and places are those of every token."""

    cache: RowCache
    tokens: Tensor
    positions: Tensor
    places: Places
    shared: tuple[Places, Places] | None
    """Places to fill from others after the write: prefixes that two rows have in common are computed once."""
    decode: Decode | None
    extends: tuple[Extend, ...]


def _heads_grouped(query: Tensor, kv_heads: int) -> Tensor:
    """(n, heads, d) -> (n, kv heads, heads per kv head, d)."""
    return query.view(query.shape[0], kv_heads, -1, query.shape[-1])


def _attend_decode(query: Tensor, keys: Tensor, values: Tensor, scaling: float, part: Decode) -> Tensor:
    """(n, heads, d) for one token per row. Scores over the shared prefix are one product for all rows."""
    heads, width, prefix = keys.shape[1], values.shape[3], part.prefix
    own_keys, own_values = keys[:, :, prefix : part.length], values[:, :, prefix : part.length]
    if part.gather is not None:
        own_keys, own_values = own_keys.index_select(0, part.gather), own_values.index_select(0, part.gather)
    else:
        own_keys, own_values = own_keys[part.low : part.high], own_values[part.low : part.high]
    if part.place is not None:
        spread = query.new_zeros((part.high - part.low, *query.shape[1:]))
        query = spread.index_copy_(0, part.place, query)
    rows = query.shape[0]
    grouped = _heads_grouped(query, heads)
    group = grouped.shape[2]
    own_keys, own_values = own_keys.flatten(0, 1), own_values.flatten(0, 1)
    flat = grouped.reshape(rows * heads, group, -1)
    scores = torch.baddbmm(part.mask_for(heads), flat, own_keys.transpose(1, 2), alpha=scaling)
    if prefix:
        by_head = grouped.transpose(0, 1).reshape(heads, rows * group, -1)
        common = torch.matmul(by_head, keys[part.prefix_row, :, :prefix].transpose(1, 2)) * scaling
        common = common.view(heads, rows, group, prefix).transpose(0, 1).reshape(rows * heads, group, prefix)
        scores = torch.cat((common, scores), dim=2)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
    out = torch.bmm(weights[:, :, prefix:], own_values).view(rows, heads, group, width)
    if prefix:
        by_head = weights[:, :, :prefix].view(rows, heads, group, prefix).transpose(0, 1)
        common = torch.matmul(by_head.reshape(heads, rows * group, prefix), values[part.prefix_row, :, :prefix])
        out = out + common.view(heads, rows, group, width).transpose(0, 1)
    out = out.reshape(rows, heads * group, width)
    return out if part.place is None else out.index_select(0, part.place)


def _attend_extend(query: Tensor, keys: Tensor, values: Tensor, scaling: float, part: Extend) -> Tensor:
    """(real tokens, heads, d). Heads that share keys become longer queries, so that keys need not be repeated."""
    heads, rows = keys.shape[1], part.rows.shape[0]
    _, _, steps, length = part.mask.shape
    padded = _heads_grouped(query.index_select(0, part.tokens), heads)
    group = padded.shape[2]
    padded = padded.view(rows, steps, heads, group, -1).permute(0, 2, 3, 1, 4).reshape(rows, heads, group * steps, -1)
    mask = part.mask if group == 1 else part.mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(
        padded,
        keys[:, :, :length].index_select(0, part.rows),
        values[:, :, :length].index_select(0, part.rows),
        attn_mask=mask,
        scale=scaling,
    )
    out = out.view(rows, heads, group, steps, -1).permute(0, 3, 1, 2, 4).reshape(rows * steps, heads * group, -1)
    return out.index_select(0, part.real)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    plan: Plan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Query (1, heads, n, d), key and value (1, kv heads, n, d) -> (1, n, heads, d).

    Without a plan this is transformers' own SDPA, so a model that an engine uses can still be called as usual.
    """
    if plan is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    if sliding_window is not None and plan.cache.max_length > sliding_window:
        raise EngineError(
            f"the model attends over a window of {sliding_window} tokens, which the local engine can't do beyond "
            f"that length: set the context length to at most {sliding_window} (now {plan.cache.max_length})"
        )
    keys, values = plan.cache.layer(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    plan.places.write(keys, key)
    plan.places.write(values, value)
    if plan.shared is not None:
        plan.shared[0].copy_from(keys, plan.shared[1])
        plan.shared[0].copy_from(values, plan.shared[1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    packed = query[0].transpose(0, 1)
    if plan.decode is not None and not plan.extends:
        return _attend_decode(packed, keys, values, scale, plan.decode)[None], None
    out = query.new_empty((packed.shape[0], packed.shape[1], value.shape[-1]))
    if plan.decode is not None:
        out[: plan.decode.n] = _attend_decode(packed[: plan.decode.n], keys, values, scale, plan.decode)
    for part in plan.extends:
        out.index_copy_(0, part.packed, _attend_extend(packed, keys, values, scale, part))
    return out[None], None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
