"""Choosing the k lowest of many, alone or inside length bins, without sorting or even grouping them.

What always holds: the choice is exact and does not depend on the machine. Of equal values the earlier one is chosen.

Merely grouping 100,000 values by bin takes as long as ten selections, so `lowest_per_bin` looks at few of them closely.
A sample tells how high the values to be chosen reach in any bin, and what lies above is put aside. The rest fall into
cells, one for each bin and each of `LEVELS` intervals of their range: a histogram tells which cells are chosen whole
and which one of each bin holds its last chosen value, and only values of that one are compared with each other. Should
the sample have misled, all values are taken. A few hundred values are sorted: that takes less time than one histogram.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

N = TypeVar("N", np.float64, np.int64)

FEW = 1024
"""Up to so many values are sorted."""
LEVELS = 256
MANY = 8192
"""From so many values on a sample is worth its time."""
RUN, STRIDE = 64, 1024
"""The sample: so many values side by side (far apart they would cost a cache line each), out of every so many."""


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


def lowest_per_bin(
    values: NDArray[np.float64],
    lengths: NDArray[np.int64],
    edges: NDArray[np.int64],
    shares: NDArray[np.int64],
    spared: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Indices, rising, of the shares[b] lowest values of every bin b, none of them `spared`.

    `values`, `lengths`, `spared`: shape (N,). `edges`: shape (bins - 1,). `shares`: shape (bins,), none greater than
    what the bin holds that is not spared.
    """
    if values.size <= FEW:
        return _sorted_lowest(values, lengths, edges, shares, spared)
    rows = _shortlist(values, lengths, edges, shares)
    if spared.any():
        rows = rows[~spared[rows]]
    cells = _Cells.of(values.take(rows), lengths.take(rows), edges)
    if (cells.histogram.sum(axis=1) < shares).any():
        rows = np.flatnonzero(~spared)
        cells = _Cells.of(values[rows], lengths[rows], edges)
    return rows[cells.lowest(shares)]


def _sorted_lowest(
    values: NDArray[np.float64],
    lengths: NDArray[np.int64],
    edges: NDArray[np.int64],
    shares: NDArray[np.int64],
    spared: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """`lowest_per_bin` by one sort. Equal values keep their order in it."""
    rows = np.flatnonzero(~spared)
    bins = edges.searchsorted(lengths.take(rows), side="right")
    order = np.lexsort((values.take(rows), bins))
    sizes = np.bincount(bins, minlength=shares.size)
    ends = (sizes.cumsum() - sizes + shares).repeat(sizes)
    chosen: NDArray[np.int64] = rows.take(order[np.arange(rows.size) < ends])
    chosen.sort()
    return chosen


def _shortlist(
    values: NDArray[np.float64], lengths: NDArray[np.int64], edges: NDArray[np.int64], shares: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Rows among which the chosen ones most likely are; a quarter more than the sample says."""
    if values.size < MANY:
        return np.arange(values.size)
    end = values.size // STRIDE * STRIDE
    few, their_lengths = values[:end].reshape(-1, STRIDE)[:, :RUN], lengths[:end].reshape(-1, STRIDE)[:, :RUN]
    reach = _Cells.of(few.reshape(-1), their_lengths.reshape(-1), edges).reach(shares * (5 * RUN) // (4 * STRIDE) + 8)
    return np.flatnonzero(values <= reach)


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """Values, each in cell `bin * LEVELS + interval`; interval k begins at low + k * width.

    `histogram`: values per cell, shape (bins, LEVELS).
    """

    values: NDArray[np.float64]
    low: float
    width: float
    cells: NDArray[np.intp]
    histogram: NDArray[np.int64]

    @classmethod
    def of(cls, values: NDArray[np.float64], lengths: NDArray[np.int64], edges: NDArray[np.int64]) -> "_Cells":
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
        width = (high - low) / (LEVELS - 1) or 1.0
        position = values - low
        position *= 1 / width
        cells = position.astype(np.intp)
        bins = edges.size + 1
        cells += _by_length(np.arange(0, bins * LEVELS, LEVELS), edges).take(lengths, mode="clip")
        histogram = np.bincount(cells, minlength=bins * LEVELS).reshape(bins, LEVELS)
        return cls(values, low, width, cells, histogram)

    def reach(self, shares: NDArray[np.int64]) -> float:
        """A value that the shares[b] lowest of every bin b do not exceed; infinite where a bin holds fewer."""
        last = int((np.cumsum(self.histogram, axis=1) < shares[:, None]).sum(axis=1).max())
        return self.low + (last + 1) * self.width if last < LEVELS else np.inf

    def lowest(self, shares: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices, rising, of the shares[b] lowest values of every bin b, which must hold as many."""
        whole = np.cumsum(self.histogram, axis=1) <= shares[:, None]
        rest = shares - (self.histogram * whole).sum(axis=1)
        short = np.flatnonzero(rest)
        last_cells = short * LEVELS + whole[short].sum(axis=1)
        marked = whole.reshape(-1)
        marked[last_cells] = True
        return self._trim(np.flatnonzero(marked.take(self.cells)), last_cells, rest[short])

    def _trim(
        self, chosen: NDArray[np.int64], last_cells: NDArray[np.int64], rest: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Drop from `chosen` all but the rest[i] lowest values of the cell last_cells[i] (rising), for every i."""
        number = np.zeros(self.histogram.size, dtype=np.uint16)
        number[last_cells] = np.arange(1, last_cells.size + 1)
        cell = number.take(self.cells.take(chosen))
        undecided = np.flatnonzero(cell)
        order = np.lexsort((self.values.take(chosen.take(undecided)), cell.take(undecided)))
        # Sorted by cell, then by value: the first rest[i] of the sizes[i] that cell i holds stay.
        sizes = self.histogram.reshape(-1).take(last_cells)
        ends = np.repeat(np.cumsum(sizes) - sizes + rest, sizes)
        keep = np.ones(chosen.size, dtype=np.bool_)
        keep[undecided[order[np.arange(order.size) >= ends]]] = False
        return chosen[keep]


def _by_length(per_bin: NDArray[N], edges: NDArray[np.int64]) -> NDArray[N]:
    """`per_bin` as a table by length, up to the last edge; whatever is longer is in the last bin, too.

    Token counts are small ints: a table indexed by length is many times faster than a search for each.
    """
    widths = np.concatenate((edges, [edges[-1] + 1 if edges.size else 1]))
    widths[1:] -= edges
    return np.repeat(per_bin, widths)
