"""The key/value cache: one row per slot, grown on demand.

What always holds:

* A layer's tensors are (rows, kv heads, positions, head dim), so that one head of one row is contiguous: decoding on a
  CPU is bound by reading them, and with positions before heads it took two to three times as long.
* Every number in them is finite unless the weights are not. Masked positions get weight 0, and 0 times NaN is NaN.
* Rows are independent; who owns a row and how much of it is valid is the decoder's business.
"""

import torch
from torch import Tensor

ROW_CHUNK = 16
LENGTH_CHUNK = 64


def _grown(size: int, need: int, chunk: int, most: int) -> int:
    """The next size at or above `need`: at least a quarter more than now, in whole chunks, at most `most`."""
    if need <= size:
        return size
    wanted = max(need, size + size // 4)
    return min(most, -(-wanted // chunk) * chunk)


class RowCache:
    """Keys and values of every layer. `rows` and `length` are what is allocated, not what is used."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        self.max_rows = max_rows
        self.max_length = max_length
        self.rows = 0
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` positions; what is stored stays."""
        if rows <= self.rows and length <= self.length:
            return
        self.rows = _grown(self.rows, rows, ROW_CHUNK, self.max_rows)
        self.length = _grown(self.length, length, LENGTH_CHUNK, self.max_length)
        for index, (keys, values) in self._layers.items():
            self._layers[index] = (self._regrown(keys), self._regrown(values))

    def _regrown(self, old: Tensor) -> Tensor:
        new = old.new_zeros((self.rows, old.shape[1], self.length, old.shape[3]))
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def layer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of one layer; made on first use to fit `keys` and `values`, both (1, kv heads, n, head dim)."""
        pair = self._layers.get(index)
        if pair is None:
            k = keys.new_zeros((self.rows, keys.shape[1], self.length, keys.shape[3]))
            v = values.new_zeros((self.rows, values.shape[1], self.length, values.shape[3]))
            pair = self._layers[index] = (k, v)
        return pair

    def clear(self) -> None:
        """Zero everything: after weights that were not finite."""
        for keys, values in self._layers.values():
            keys.zero_()
            values.zero_()


class Places:
    """Positions in rows, as flat indices into a layer seen as (rows * kv heads * positions, head dim)."""

    def __init__(self, rows: Tensor, positions: Tensor) -> None:
        self.rows = rows
        self.positions = positions
        self._flat: dict[int, Tensor] = {}

    def flat(self, cache: Tensor) -> Tensor:
        """(n * kv heads,) indices, token-major. Computed once per number of heads: it is the same in every layer."""
        heads, length = cache.shape[1], cache.shape[2]
        index = self._flat.get(heads)
        if index is None:
            head = torch.arange(heads, device=self.rows.device)
            index = ((self.rows[:, None] * heads + head) * length + self.positions[:, None]).reshape(-1)
            self._flat[heads] = index
        return index

    def write(self, cache: Tensor, new: Tensor) -> None:
        """Store `new` (1, kv heads, n, head dim), token i at place i."""
        width = cache.shape[3]
        cache.view(-1, width).index_copy_(0, self.flat(cache), new[0].transpose(0, 1).reshape(-1, width))

    def copy_from(self, cache: Tensor, source: "Places") -> None:
        flat = cache.view(-1, cache.shape[3])
        flat.index_copy_(0, self.flat(cache), flat.index_select(0, source.flat(cache)))
