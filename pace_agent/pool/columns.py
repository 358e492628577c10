"""What the pool scores, in arrays.

What always holds: row k of every column belongs to one waiting trajectory, rows are in the order of completion, and the
members of a group that was added whole stand side by side.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES: Mapping[str, Any] = {
    "id": np.int64,
    "unit": np.int64,
    "completed_version": np.int64,
    "generation": np.float64,
    "effective_version": np.float64,
    "n_sampled": np.int64,
    "min_version": np.int64,
    "multi_version": np.bool_,
    "last_attempt": np.bool_,
}
"""`generation`: prefix-aware G, whatever the ranking uses. `effective_version`: c - lam * G, so that S = V minus it."""


class Columns:
    """Rows that are appended at the end and taken out anywhere; the space grows by doubling.

    Taking out the first rows moves no other: the live rows then just begin later.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {name: np.empty(256, dtype) for name, dtype in DTYPES.items()}
        self._start = 0
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The live rows of a column: a view, valid until the next change."""
        return self._arrays[name][self._start : self._end]

    def append(self, row: Mapping[str, Any]) -> None:
        self._make_room(1)
        for name, array in self._arrays.items():
            array[self._end] = row[name]
        self._end += 1

    def extend(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Append many: a column of the same length under every name."""
        number = rows["id"].size
        self._make_room(number)
        for name, array in self._arrays.items():
            array[self._end : self._end + number] = rows[name]
        self._end += number

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Take out these rows, rising, each named once; the others keep their order."""
        if not rows.size:
            return
        if rows[-1] + 1 == rows.size:
            self._start += rows.size
            return
        kept = np.ones(len(self), dtype=np.bool_)
        kept[rows] = False
        keep = np.flatnonzero(kept)
        for array in self._arrays.values():
            array[: keep.size] = array[self._start : self._end].take(keep)
        self._start, self._end = 0, keep.size

    def _make_room(self, number: int) -> None:
        """Space for `number` rows at the end. Where it is short, the live rows go to new arrays, at most half full."""
        space = self._arrays["id"].size
        if self._end + number <= space:
            return
        size = len(self)
        while space < 2 * (size + number):
            space *= 2
        for name, array in self._arrays.items():
            moved = np.empty(space, array.dtype)
            moved[:size] = array[self._start : self._end]
            self._arrays[name] = moved
        self._start, self._end = 0, size

    def state_dict(self) -> dict[str, NDArray[Any]]:
        return {name: self[name].copy() for name in DTYPES}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._start, self._end = 0, int(state["id"].size)
        spare = max(self._end, 256)
        self._arrays = {
            name: np.concatenate([np.asarray(state[name], dtype), np.empty(spare, dtype)])
            for name, dtype in DTYPES.items()
        }
