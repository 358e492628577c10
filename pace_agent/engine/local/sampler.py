"""Choosing one token per row, reproducibly.

A row's choice depends on its logits, its sampling parameters, its seed and how many tokens it has: never on which rows
are computed with it, beyond the rounding of the logits themselves.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mixed_seed(seed: int) -> int:
    """A 64-bit state in which neighbouring seeds have nothing in common (the finaliser of splitmix64)."""
    z = (seed * 0xD1342543DE82EF95 + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniforms(states: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row: number `counts` of the splitmix64 sequence that starts at `states`. Shape (n,)."""
    z = states + (counts.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    # 48 bits: times any total below 2, the product stays below the total in double precision.
    fraction: NDArray[np.float64] = (z >> np.uint64(16)).astype(np.float64) * 2.0**-48
    return fraction


def _restricted(logprobs: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """Minus infinity for what top-k (0: off) or top-p (1: off) exclude; the most probable token always stays."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    width = logprobs.shape[-1]
    k = torch.from_numpy(np.where(top_k > 0, top_k, width)).to(logprobs.device)[:, None]
    p = torch.from_numpy(top_p).to(logprobs.device)[:, None]
    probs = ordered.exp()
    before = probs.cumsum(-1, dtype=torch.float64) - probs
    drop = (torch.arange(width, device=logprobs.device) >= k) | ((before >= p) & (p < 1.0))
    drop[:, 0] = False
    return logprobs.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), -torch.inf)


def sample(
    logits: Tensor,
    temperature: NDArray[np.float32],
    uniform: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Tokens and their log-probabilities, both of shape (n,), from logits (n, vocabulary).

    Log-probabilities are those of the full distribution at `temperature` (at 1 where it is 0, which is greedy), in
    float32; NaN where the logits are not finite. The token is the inverse of the cumulative distribution at `uniform`.
    """
    greedy = temperature == 0.0
    scale = np.where(greedy, np.float32(1.0), temperature)
    logits = logits.float()
    if (scale != 1.0).any():
        logits = logits / torch.from_numpy(scale).to(logits.device)[:, None]
    logprobs = logits.log_softmax(-1)
    if greedy.all():
        tokens = logprobs.argmax(-1, keepdim=True)
    else:
        limited = (top_k > 0).any() or (top_p < 1.0).any()
        choice = _restricted(logprobs, top_k, top_p) if limited else logprobs
        cumulative = choice.exp().cumsum(-1, dtype=torch.float64)
        target = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(logits.device)[:, None], logprobs.argmax(-1, True), tokens)
    chosen = logprobs.gather(-1, tokens)[:, 0]
    return tokens[:, 0].cpu().numpy(), chosen.cpu().numpy()
