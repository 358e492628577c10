"""What one forward pass computes: from the slots' tables to a `Plan`.

A row with one token that is not in the cache decodes, a row with more extends; a fresh prompt and a row whose cache a
weight update threw away are extends from 0. A prefix that another row holds, or is about to compute in the same pass,
is copied and not computed again: after an update, rows of one environment share most of their prompts.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pace_agent.engine.local.attention import Decode, Extend, Plan
from pace_agent.engine.local.rows import Places, RowCache

Ints = NDArray[np.int64]

MAX_NEW_TOKENS = 4096
"""Tokens of extending rows in one pass; the rest waits for the next one."""
MAX_MASK = 1 << 22
"""Entries of one padded group's mask."""
SPARSE = 1.4
"""Decoding rows are copied together when they lie in a stretch this many times their number."""
MIN_SHARED = 8
"""Shorter common prefixes are computed anew."""


class Table:
    """Per slot: the ids so far, how many there are, and how many of them are in the cache."""

    def __init__(self, slots: int, context: int) -> None:
        self.ids = np.zeros((slots, context), dtype=np.int64)
        self.length = np.zeros(slots, dtype=np.int64)
        self.cached = np.zeros(slots, dtype=np.int64)

    def common_prefix(self, slot: int, others: Ints, limit: int) -> Ints:
        """Tokens from the start, at most `limit`, in which each of `others` equals `slot`."""
        differs = self.ids[others, :limit] != self.ids[slot, :limit]
        return np.where(differs.any(1), differs.argmax(1), limit).astype(np.int64)


class Planner:
    """Builds plans. `share` allows copies between rows, which is exact only while no row's cache is stale."""

    def __init__(self, table: Table, cache: RowCache, device: torch.device, dtype: torch.dtype, *, share: bool) -> None:
        self.table = table
        self.cache = cache
        self.device = device
        self.dtype = dtype
        self.share = share
        self._decoded: Ints = np.empty(0, dtype=np.int64)
        self._prefix = 0

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _mask(self, visible: NDArray[np.bool_]) -> Tensor:
        """0 where visible, minus infinity elsewhere."""
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(self._tensor(~visible), -torch.inf)

    def forget(self) -> None:
        """Ids or caches of slots changed in another way than by decoding."""
        self._decoded = np.empty(0, dtype=np.int64)

    def plan(self, active: Ints) -> tuple[Plan, Ints, Tensor]:
        """A plan for `active` slots (ascending), the slots that get a token from it, and where their logits are.

        On return the table's `cached` already counts what the pass will store.
        """
        table = self.table
        pending = table.length[active] - table.cached[active]
        decoding = active[(pending == 1) & (table.cached[active] > 0)]
        extending = active if not len(decoding) else active[(pending > 1) | (table.cached[active] == 0)]
        self.cache.reserve(int(active[-1]) + 1, int(table.length[active].max()))

        positions = table.cached[decoding]
        decode = self._decode(decoding, positions) if len(decoding) else None
        if not len(extending):
            table.cached[decoding] += 1
            plan = self._packed(decoding, positions, table.ids[decoding, positions], None, decode, ())
            return plan, decoding, torch.arange(len(decoding), device=self.device)

        starts, ends, shared = self._pieces(extending)
        sizes = ends - starts
        rows = np.repeat(extending, sizes)
        offsets = np.cumsum(sizes) - sizes
        inner = np.arange(int(sizes.sum())) - np.repeat(offsets, sizes) + np.repeat(starts, sizes)
        groups = self._groups(extending, starts, ends, offsets + len(decoding))
        all_rows, all_positions = np.concatenate((decoding, rows)), np.concatenate((positions, inner))
        table.cached[decoding] += 1
        table.cached[extending] = ends
        complete = (ends == table.length[extending]) & (sizes > 0)
        last = np.concatenate((np.arange(len(decoding)), (offsets + sizes - 1 + len(decoding))[complete]))
        sampled = np.concatenate((decoding, extending[complete]))
        plan = self._packed(all_rows, all_positions, table.ids[all_rows, all_positions], shared, decode, groups)
        return plan, sampled, self._tensor(last)

    def _packed(
        self,
        rows: Ints,
        positions: Ints,
        ids: Ints,
        shared: tuple[Places, Places] | None,
        decode: Decode | None,
        extends: tuple[Extend, ...],
    ) -> Plan:
        places = self._tensor(positions)
        return Plan(
            cache=self.cache,
            tokens=self._tensor(ids)[None],
            positions=places[None],
            places=Places(self._tensor(rows), places),
            shared=shared,
            decode=decode,
            extends=extends,
        )

    def _decode(self, rows: Ints, positions: Ints) -> Decode:
        low, high, n = int(rows[0]), int(rows[-1]) + 1, len(rows)
        length = int(positions.max()) + 1
        prefix = self._decode_prefix(rows, int(positions.min()))
        place = gather = None
        in_read = positions
        if high - low > max(n + 4, n * SPARSE):
            gather = self._tensor(rows)
        elif high - low > n:
            place = self._tensor(rows - low)
            in_read = np.full(high - low, prefix, dtype=np.int64)
            in_read[rows - low] = positions
        mask = self._mask((np.arange(prefix, length) <= in_read[:, None])[:, None])
        return Decode(n, low, high, place, gather, prefix, low, length, mask)

    def _decode_prefix(self, rows: Ints, limit: int) -> int:
        """Tokens that all decoding rows have in common; 0 where reading them once would not pay."""
        if not self.share or len(rows) < 4:
            return 0
        if not np.array_equal(rows, self._decoded):
            prefix = int(self.table.common_prefix(int(rows[0]), rows[1:], limit).min())
            self._decoded, self._prefix = rows, prefix if prefix >= 2 * MIN_SHARED else 0
        return min(self._prefix, limit)

    def _pieces(self, rows: Ints) -> tuple[Ints, Ints, tuple[Places, Places] | None]:
        """Per row the half-open range of tokens to compute now, and the copies that make up for what is left out."""
        table = self.table
        held = table.cached.copy()
        ends = np.zeros(len(rows), dtype=np.int64)
        origin: dict[int, Ints] = {}
        copies: list[tuple[int, Ints]] = []
        budget = MAX_NEW_TOKENS
        for i, slot in enumerate(rows.tolist()):
            start = int(held[slot])
            if start == 0 and self.share and budget:
                start = self._share(slot, held, origin, copies)
            ends[i] = min(int(table.length[slot]), start + budget)
            budget -= int(ends[i]) - start
            table.cached[slot] = start
            held[slot] = ends[i]
        starts = table.cached[rows]
        if not copies:
            return starts, ends, None
        rows_to = np.repeat([slot for slot, _ in copies], [len(source) for _, source in copies])
        positions = self._tensor(np.concatenate([np.arange(len(source)) for _, source in copies]))
        to = Places(self._tensor(rows_to), positions)
        return starts, ends, (to, Places(self._tensor(np.concatenate([source for _, source in copies])), positions))

    def _share(self, slot: int, held: Ints, origin: dict[int, Ints], copies: list[tuple[int, Ints]]) -> int:
        """How many tokens `slot` takes over from the row that has most in common with it.

        `held` is what rows hold after this pass; `origin` says which row computes each position of a row that itself
        takes over, so that every copy reads a row that computes.
        """
        others = np.flatnonzero(held >= MIN_SHARED)
        limit = int(self.table.length[slot]) - 1
        if not len(others) or limit < MIN_SHARED:
            return 0
        common = np.minimum(self.table.common_prefix(slot, others, limit), held[others])
        best = int(common.argmax())
        size, other = int(common[best]), int(others[best])
        if size < MIN_SHARED:
            return 0
        source = np.full(size, other, dtype=np.int64)
        if other in origin:
            taken = origin[other][:size]
            source[: len(taken)] = taken
        origin[slot] = source
        copies.append((slot, source))
        return size

    def _groups(self, rows: Ints, starts: Ints, ends: Ints, offsets: Ints) -> tuple[Extend, ...]:
        """Padded groups of rows with similar sizes, none with more padding than tokens."""
        sizes = ends - starts
        order = [i for i in np.argsort(sizes, kind="stable").tolist() if sizes[i]]
        groups: list[list[int]] = []
        tokens = longest = 0
        for i in order:
            size = int(sizes[i])
            longest = max(longest, int(ends[i]))
            members = len(groups[-1]) + 1 if groups else 0
            if not members or members * size > 2 * (tokens + size) or members * size * longest > MAX_MASK:
                groups.append([])
                tokens, longest = 0, int(ends[i])
            groups[-1].append(i)
            tokens += size
        return tuple(self._extend(np.array(g), rows, starts, ends, offsets) for g in groups)

    def _extend(self, members: Ints, rows: Ints, starts: Ints, ends: Ints, offsets: Ints) -> Extend:
        sizes = (ends - starts)[members]
        steps, length = int(sizes.max()), int(ends[members].max())
        step = np.arange(steps)
        real = step < sizes[:, None]
        tokens = np.where(real, offsets[members][:, None] + step, offsets[members][:, None])
        positions = starts[members][:, None] + np.minimum(step, sizes[:, None] - 1)
        visible = np.arange(length) <= positions[:, :, None]
        flat = np.flatnonzero(real)
        return Extend(
            rows=self._tensor(rows[members]),
            tokens=self._tensor(tokens.reshape(-1)),
            mask=self._mask(visible[:, None]),
            real=self._tensor(flat),
            packed=self._tensor(tokens.reshape(-1)[flat]),
        )
