"""The rollouts of one simulated run by their id, drawn in blocks as they are needed."""

from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pace_agent.simulate.workload import Rollouts, Workload

BLOCK = 8192


class RolloutStore:
    """`durations` gives the work seconds of rollout 0, 1, ... in turn; `take` the columns of those given out.

    `started` and `completed`, by id: when a rollout began (work scale) and when it completed (seconds).
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._rng = np.random.default_rng(seed)
        self._length = np.empty(0, dtype=np.int32)
        self._decode, self._stall, self._stall_at = np.empty(0), np.empty(0), np.empty(0)
        self._drawn = 0
        self.started, self.completed = np.empty(0), np.empty(0)
        self.durations: Iterator[float] = chain.from_iterable(self._blocks())

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._length.take(ids).astype(np.int64)

    def take(self, ids: NDArray[np.int64]) -> Rollouts:
        return Rollouts(
            self.lengths(ids),
            self._decode.take(ids),
            self._stall.take(ids),
            self._stall_at.take(ids),
        )

    def _blocks(self) -> Iterator[list[float]]:
        while True:
            block = self._workload.draw(self._rng, BLOCK)
            begin, self._drawn = self._drawn, self._drawn + BLOCK
            if self._drawn > self._length.size:
                self._grow()
            rows = slice(begin, self._drawn)
            self._length[rows], self._decode[rows] = block.length, block.decode
            self._stall[rows], self._stall_at[rows] = block.stall, block.stall_at
            yield (block.decode + block.stall).tolist()

    def _grow(self) -> None:
        """Half as much again: what is there is copied, and twice would hold too much that is empty."""
        size = self._drawn + self._drawn // 2
        for name in ("_length", "_decode", "_stall", "_stall_at", "started", "completed"):
            old = getattr(self, name)
            new = np.empty(size, old.dtype)
            new[: old.size] = old
            setattr(self, name, new)
