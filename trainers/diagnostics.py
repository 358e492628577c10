"""What a step looked like from the loss: cheap figures over its live tokens."""

import torch
from torch import Tensor


class Diagnostics:
    """Sums over the micro-batches of a step; `take` gives the means and starts anew.

    Figures: the mean ratio of the current policy to the one that sampled, the mean lag in versions at the draw, tokens
    without a behaviour log-probability, and the share of tokens whose importance weight met its cap.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    @torch.no_grad()
    def add(
        self, current: Tensor, behaviour: Tensor, live: Tensor, lag: Tensor, missing: Tensor, capped: Tensor
    ) -> None:
        ratios = torch.exp(current[live] - behaviour[live])
        count = torch.tensor(float(ratios.numel()), device=ratios.device)
        sums = torch.stack(
            [count, ratios.float().sum(), lag[live].sum().float(), missing.float(), capped.float() * count]
        )
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> dict[str, float]:
        if self._sums is None:
            return {}
        count, ratios, lag, missing, capped = self._sums.tolist()
        self._sums = None
        tokens = max(count, 1.0)
        return {
            "trainer/tokens": count,
            "trainer/ratio_mean": ratios / tokens,
            "trainer/token_lag": lag / tokens,
            "trainer/missing_logprobs": missing,
            "trainer/capped_share": capped / tokens,
        }
