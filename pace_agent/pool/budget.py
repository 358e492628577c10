"""How many to reject, and from which lengths: pure functions.

With N units waiting, batches of M units and a target occupancy N*:

    excess   E = max(0, N - N*)
    budget   B = max(0, min(floor(beta * E + carry), N - M, floor(cap * N)))

`carry` keeps the fraction that the floor cut off, so that a small beta is kept to over many draws; it is 0 when E is 0.
B never exceeds N - M, so a draw that could fill its batch still does.

The budget is split over length bins in proportion to what each holds. Ranking by staleness alone would starve long
rollouts, because a long rollout lives through more weight updates.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-9
"""Added before a floor, so that ten times 0.1 is 1."""


@dataclass(frozen=True, slots=True)
class Budget:
    """`excess` and `budget` in units; `carry` in [0, 1) goes into the next call."""

    excess: int
    budget: int
    carry: float


def rejection_budget(
    n_pooled: int, batch_size: int, target: int, beta: float = 1.0, cap: float = 1.0, carry: float = 0.0
) -> Budget:
    """The budget of one draw, by the formulas above. All counts are units; beta >= 0, cap in [0, 1]."""
    excess = max(0, n_pooled - target)
    if excess == 0:
        return Budget(0, 0, 0.0)
    wanted = beta * excess + carry
    whole = math.floor(wanted + ROUNDING)
    budget = max(0, min(whole, n_pooled - batch_size, math.floor(cap * n_pooled + ROUNDING)))
    return Budget(excess, budget, min(max(wanted - whole, 0.0), math.nextafter(1.0, 0.0)))


def length_edges(window: NDArray[np.int64], n_pooled: int, n_bins: int) -> NDArray[np.int64]:
    """Inner edges of the length bins, rising, shape (bins - 1,): a length belongs to the bin after every edge <= it.

    bins = max(1, min(n_bins, n_pooled // 4)); the edges are the k / bins quantiles of `window` (the sampled lengths of
    the last completions, in tokens), each an element of it. Equal edges are merged, and an edge that leaves nothing of
    the window below it is dropped.
    """
    bins = max(1, min(n_bins, n_pooled // 4))
    if bins == 1 or window.size == 0:
        return np.empty(0, dtype=np.int64)
    ordered = np.sort(window)
    edges: NDArray[np.int64] = ordered[np.arange(1, bins) * ordered.size // bins]
    return edges[edges > np.concatenate((ordered[:1], edges[:-1]))]


def bin_counts(length_counts: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many lie in each bin, shape (bins,). `length_counts[k]`: how many have length k."""
    below = np.concatenate(([0], np.cumsum(length_counts)))
    bounds = np.concatenate(([0], below.take(edges, mode="clip"), below[-1:]))
    return bounds[1:] - bounds[:-1]


def resample_carries(carries: NDArray[np.float64], bins: int) -> NDArray[np.float64]:
    """The carried fractions of k quantile bins as those of `bins` bins, with the same sum.

    A growing pool has more bins than a small one; each carry is spread evenly over the lengths that its bin covered.
    """
    if carries.size == bins:
        return carries
    if carries.size == 0:
        return np.zeros(bins)
    total = np.concatenate(([0.0], np.cumsum(carries)))
    return np.diff(np.interp(np.linspace(0, 1, bins + 1), np.linspace(0, 1, carries.size + 1), total))


def split_budget(
    budget: int,
    counts: NDArray[np.int64],
    carries: NDArray[np.float64],
    room: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Whole shares of `budget` per bin, and the fractions to carry into the next split.

    A bin's quota is budget * counts / sum(counts) + carry. Shares follow the quotas by largest remainder, are clamped
    to `room` (what may be rejected in each bin; default: all of `counts`), and what a full bin can't take goes to the
    others, so that the shares sum to min(budget, sum(room)). The new carry is quota minus share, kept inside [-1, 1]:
    a debt that could never be paid does not build up.

    All arrays have shape (bins,).
    """
    held = counts.tolist()
    limits = held if room is None else room.tolist()
    budget, total = min(budget, sum(limits)), sum(held)
    if budget <= 0:
        return np.zeros(counts.size, dtype=np.int64), carries
    quotas = [budget * count / total + carry for count, carry in zip(held, carries.tolist(), strict=True)]
    shares = [min(max(math.floor(q + ROUNDING), 0), limit) for q, limit in zip(quotas, limits, strict=True)]
    _fill(shares, held, limits, budget)
    while missing := budget - sum(shares):
        # One more for the bins that are owed most, or one less for those owed least.
        step = 1 if missing > 0 else -1
        able = [b for b, share in enumerate(shares) if (share < limits[b] if step > 0 else share > 0)]
        able.sort(key=lambda b: step * (shares[b] - quotas[b]))
        for b in able[: abs(missing)]:
            shares[b] += step
    left = [min(max(quota - share, -1.0), 1.0) for quota, share in zip(quotas, shares, strict=True)]
    return np.array(shares, dtype=np.int64), np.array(left)


def _fill(shares: list[int], counts: list[int], limits: list[int], budget: int) -> None:
    """Give what full bins could not take to the others in proportion, until less than a unit per open bin is left.

    Each round fills a bin or ends the loop, so that it runs at most once per bin.
    """
    while True:
        missing = budget - sum(shares)
        able = [b for b, share in enumerate(shares) if share < limits[b]]
        if missing < max(1, len(able)):
            return
        weight = sum(counts[b] for b in able)
        for b in able:
            shares[b] = min(shares[b] + missing * counts[b] // weight, limits[b])
