"""Corrections for stale data, in front of TRL's losses, and the clipped loss in closed form.

Pure functions over tensors of shape (B, T): B trajectories, T positions. `mask` is True where a token was sampled.
Notation: `current` are log-probabilities under the weights that are being trained, `behaviour` those under the weights
that sampled each token. log r = current - behaviour.

With one optimiser step per batch the proximal policy of decoupled PPO is the policy at the start of the step, which is
the current one with its gradient cut. So every correction here costs no second forward pass.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Correction = Literal["none", "truncated_is", "decoupled"]
Level = Literal["token", "turn", "sequence"]


def fill_missing(behaviour: Tensor, current: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Behaviour log-probabilities with which no ratio can be NaN, and how many live tokens had none (a scalar).

    A live token whose log-probability is not finite gets the current one, so that its ratio is 1: it is trained as if
    it were on-policy. Masked positions get the current one too, because 0 * NaN is NaN and would reach the loss.
    """
    missing = mask & ~torch.isfinite(behaviour)
    keep = mask & ~missing
    return torch.where(keep, behaviour, current.detach()), missing.sum()


def log_ratios(current: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """log r per token without gradient, 0 where the mask is 0. Both inputs must be finite there: see `fill_missing`."""
    return torch.where(mask, current.detach() - behaviour, 0.0)


def unit_means(values: Tensor, mask: Tensor, units: Tensor) -> Tensor:
    """Replace each live value by the mean over the live tokens of its unit; 0 where the mask is 0. Shape (B, T).

    `units` numbers the unit of each token within its row from 0 (the turn; all 0 for the whole sequence).
    """
    n_rows, n_units = values.shape[0], int(units.max().item()) + 1 if units.numel() else 1
    live = mask.to(values.dtype)
    zeros = values.new_zeros(n_rows, n_units)
    sums = zeros.scatter_add(1, units, values * live)
    counts = zeros.scatter_add(1, units, live)
    return (sums / counts.clamp(min=1.0)).gather(1, units) * live


def importance_weights(log_r: Tensor, mask: Tensor, level: Level, turns: Tensor | None = None) -> Tensor:
    """w = exp(log r) per token, or of the mean log r over its turn or sequence. 1 where the mask is 0. Shape (B, T).

    Above the token level this is the geometric mean of the ratios, so that one cap serves every length; the product
    would leave any cap after a few dozen tokens.
    """
    if level == "token":
        return torch.exp(log_r)
    if level == "turn" and turns is None:
        raise ValueError("importance weights per turn need the turn of each token")
    units = turns if level == "turn" and turns is not None else torch.zeros_like(mask, dtype=torch.long)
    return torch.exp(unit_means(log_r, mask, units))


@dataclass(frozen=True, slots=True)
class Corrected:
    """What a loss takes instead of the behaviour log-probabilities and the plain advantages.

    `capped` is the share of live tokens whose weight met the cap (a scalar).
    """

    old: Tensor
    advantages: Tensor
    capped: Tensor


def correct(
    correction: Correction,
    *,
    current: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    level: Level = "token",
    cap: float = 2.0,
    turns: Tensor | None = None,
) -> Corrected:
    """Prepare `old` and `advantages` for a loss on the ratio exp(current - old).

    * `none`: old = behaviour. The ratio itself is the importance weight, and the loss clips it around the behaviour.
    * `truncated_is`: old = proximal, advantages times min(w, cap). Nothing is dropped; the cap bounds the variance and
      pays with bias.
    * `decoupled`: old = proximal, advantages times w where w <= cap, and 0 beyond. A token that the policy has left
      that far behind teaches nothing.

    `advantages` has shape (B, 1) or (B, T).
    """
    if correction == "none":
        return Corrected(behaviour, advantages, mask.new_zeros((), dtype=torch.float32))
    weights = importance_weights(log_ratios(current, behaviour, mask), mask, level, turns)
    over = (weights > cap) & mask
    bounded = weights.clamp(max=cap) if correction == "truncated_is" else torch.where(over, 0.0, weights)
    capped = over.sum() / mask.sum().clamp(min=1)
    return Corrected(current.detach(), advantages * bounded, capped)


def clipped_loss(
    current: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    n_tokens: float,
) -> Tensor:
    """L = -(1 / n_tokens) * sum over live tokens of min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A).

    r = exp(current - old). `n_tokens` counts the live tokens of the whole step, so the micro-batches of a step add up
    to the same loss and gradient however it is cut. This is what TRL's `dapo` loss must equal; the tests hold it to
    that.
    """
    ratio = torch.exp(torch.where(mask, current - old, 0.0))
    clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    return -torch.where(mask, gain, 0.0).sum() / n_tokens
