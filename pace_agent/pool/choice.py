"""Choosing the k lowest of many, alone or inside length bins, without sorting them.

What always holds: the choice is exact and does not depend on the machine. Of equal values the earlier one is chosen.

`Bins` is a radix selection. Every value falls into one of `LEVELS` equal intervals of the values' range. One histogram
over (bin, interval) cells tells for each bin which intervals are chosen whole and which one holds the last chosen
value; only the values in that cell are compared with each other. Merely grouping 100,000 values by bin takes longer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVELS = 512


def lowest(values: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Indices of the k lowest, rising. Of equal values the earlier one. Takes all where k exceeds their number."""
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    if k >= values.size:
        return np.arange(values.size)
    threshold = np.partition(values, k - 1)[k - 1]
    chosen = np.flatnonzero(values <= threshold)
    if chosen.size > k:
        equal = np.flatnonzero(values[chosen] == threshold)
        chosen = np.delete(chosen, equal[k - chosen.size :])
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Values, each in its cell `bin * LEVELS + interval`; intervals rise with the value.

    `histogram`: shape (bins, LEVELS), values per cell that may be chosen. `counts`: shape (bins,), all values per bin.
    """

    values: NDArray[np.float64]
    cells: NDArray[np.intp]
    histogram: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        values: NDArray[np.float64],
        lengths: NDArray[np.int64],
        edges: NDArray[np.int64],
        spared: NDArray[np.bool_],
    ) -> "Bins":
        """Put `values` into the bins of their `lengths`. What is `spared` counts in its bin but can't be chosen.

        `values`, `lengths`, `spared`: shape (N,), N > 0. `edges`: shape (bins - 1,), from `budget.length_edges`.
        """
        bins = edges.size + 1
        low = values.min()
        spread = float(values.max() - low)
        position = values - low
        position *= (LEVELS - 1) / spread if spread > 0 else 0.0
        first_cells = _first_cells(lengths, edges)
        position += first_cells
        cells = position.astype(np.intp)
        spared_counts = np.zeros(bins, dtype=np.int64)
        if spared.any():
            spared_counts += np.bincount(first_cells[spared].astype(np.intp) // LEVELS, minlength=bins)
            cells[spared] = bins * LEVELS  # a cell of no bin
        histogram = np.bincount(cells, minlength=bins * LEVELS)[: bins * LEVELS].reshape(bins, LEVELS)
        return cls(values, cells, histogram, histogram.sum(axis=1) + spared_counts)

    @property
    def room(self) -> NDArray[np.int64]:
        """How many may be chosen in each bin, shape (bins,)."""
        room: NDArray[np.int64] = self.histogram.sum(axis=1)
        return room

    def lowest(self, shares: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices, rising, of the shares[b] lowest values of every bin b. Needs 0 <= shares <= room."""
        bins = shares.size
        whole = np.cumsum(self.histogram, axis=1) <= shares[:, None]
        rest = shares - (self.histogram * whole).sum(axis=1)
        short = np.flatnonzero(rest)
        last_cells = short * LEVELS + whole[short].sum(axis=1)
        marked = np.zeros((bins + 1) * LEVELS, dtype=np.bool_)
        marked[: bins * LEVELS] = whole.reshape(-1)
        marked[last_cells] = True
        chosen = np.flatnonzero(marked.take(self.cells))
        return self._trim(chosen, last_cells, rest[short])

    def _trim(
        self, chosen: NDArray[np.int64], last_cells: NDArray[np.int64], rest: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Drop from `chosen` all but the rest[i] lowest values of the cell last_cells[i] (rising), for every i."""
        allowed = np.full(self.histogram.size + LEVELS, -1, dtype=np.int64)
        allowed[last_cells] = rest
        limits = allowed.take(self.cells.take(chosen))
        undecided = np.flatnonzero(limits >= 0)
        cells = self.cells.take(chosen.take(undecided))
        order = np.lexsort((self.values.take(chosen.take(undecided)), cells))
        cells, limits = cells.take(order), limits.take(undecided).take(order)
        rank = np.arange(order.size) - np.searchsorted(cells, cells)
        return np.delete(chosen, undecided[order[rank >= limits]])


def _first_cells(lengths: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """The first cell of every length's bin, shape (N,)."""
    if edges.size == 0:
        return np.zeros(lengths.size)
    top = int(edges[-1])
    if top > 8 * lengths.size:
        return np.searchsorted(edges, lengths, side="right").astype(np.float64) * LEVELS
    # Token counts are small ints: a table indexed by length is many times faster than a search for each.
    table = np.zeros(top + 1, dtype=np.float64)
    table[edges] = LEVELS
    return np.cumsum(table, dtype=np.float64).take(lengths, mode="clip")
