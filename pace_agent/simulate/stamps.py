"""Which policy version sampled which tokens: a pure function on columns.

A rollout samples its tokens at an even pace, except for one stall; a token belongs to the version that was published
when it was sampled.
"""

import numpy as np
from numpy.typing import NDArray

from pace_agent.pool import SpanTable
from pace_agent.simulate.workload import Rollouts


def stamp(
    rollouts: Rollouts, started: NDArray[np.float64], published: NDArray[np.float64], turns: bool = True
) -> SpanTable:
    """The runs of N rollouts that completed while the last of the versions was the published one.

    `started`: shape (N,). `published[v]`: when version v was published, rising from 0, shape (V + 1,); at that moment
    min(x, max(stall_at * decode, x - stall)) of a rollout's decode time have passed, with x = published[v] - started.
    All times are on the work scale. Tokens are rounded to whole ones.

    The stall is a tool call: what comes before it is turn 0, and what comes after it turn 1. Without `turns` all tokens
    are of turn 0, which takes less time.
    """
    latest = published.size - 1
    n_runs = latest + 2 - published.searchsorted(started, side="right")
    last = n_runs.cumsum() - 1
    rows = np.arange(started.size).repeat(n_runs)
    versions = np.arange(rows.size) - last.take(rows) + latest
    # A run ends when the next version is published; the last one ends with the rollout.
    since = published.take(versions + 1, mode="clip") - started.take(rows)
    held = (rollouts.stall_at * rollouts.decode).take(rows)
    passed = np.minimum(since, np.maximum(held, since - rollouts.stall.take(rows)))
    length = rollouts.length.take(rows)
    ends = np.minimum(np.rint(passed / rollouts.decode.take(rows) * length).astype(np.int64), length)
    ends[last] = rollouts.length
    begins = np.empty_like(ends)
    begins[1:] = ends[:-1]
    begins[last[:-1] + 1] = 0
    begins[:1] = 0
    counts, turn = ends - begins, np.zeros(rows.size, dtype=np.int64)
    if turns:
        # Each run once for either turn; most of these have no token.
        calls = np.where(rollouts.stall > 0, np.rint(rollouts.stall_at * rollouts.length), rollouts.length)
        split = np.clip(calls.astype(np.int64)[rows], begins, ends)
        counts = np.stack((split - begins, ends - split), axis=1).reshape(-1)
        turn, rows, versions = np.tile([0, 1], rows.size), np.repeat(rows, 2), np.repeat(versions, 2)
    kept = counts.nonzero()[0]
    sizes = np.bincount(rows.take(kept), minlength=started.size)
    return SpanTable(versions.take(kept), counts.take(kept), turn.take(kept), sizes.cumsum() - sizes)
