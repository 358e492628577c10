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
    """Rows that are appended at the end and taken out anywhere; the space grows by doubling."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {name: np.empty(256, dtype) for name, dtype in DTYPES.items()}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The live rows of a column: a view, valid until the next change."""
        return self._arrays[name][: self._size]

    def append(self, row: Mapping[str, Any]) -> None:
        if self._size == self._arrays["id"].size:
            self._arrays = {name: np.concatenate([a, np.empty_like(a)]) for name, a in self._arrays.items()}
        for name, array in self._arrays.items():
            array[self._size] = row[name]
        self._size += 1

    def remove(self, gone: NDArray[np.bool_]) -> None:
        """Take out the rows where `gone`, shape (len(self),), is set; the others keep their order."""
        keep = np.flatnonzero(~gone)
        for array in self._arrays.values():
            array[: keep.size] = array[: self._size].take(keep)
        self._size = keep.size

    def state_dict(self) -> dict[str, NDArray[Any]]:
        return {name: self[name].copy() for name in DTYPES}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._size = int(state["id"].size)
        spare = max(self._size, 256)
        self._arrays = {
            name: np.concatenate([np.asarray(state[name], dtype), np.empty(spare, dtype)])
            for name, dtype in DTYPES.items()
        }
