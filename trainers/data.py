"""From a drawn batch to the tensors of micro-batches.

What always holds:

* A batch is asked for when a step begins and never before: no look-ahead, so what is trained is as fresh as the pool
  can make it, and nobody waits for a batch that no step will use.
* One batch is one optimiser step. Its micro-batches carry the number of live tokens of the whole step, so cutting it
  another way changes neither loss nor gradient.
* Rows are padded on the right alone. Under causal attention no token then sees padding, so no mask is needed.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from pace_agent.clock import Clock
from pace_agent.errors import RunError, UserError
from pace_agent.types import Batch, Sample

MicroBatch = dict[str, Tensor]


class BatchSource(Protocol):
    """Where batches come from and where new weights go. All calls come from the trainer's thread."""

    def next_batch(self) -> Batch | None:
        """Block until a batch can be drawn; None ends the training."""
        ...

    def step_ended(self, weights: Mapping[str, Any]) -> int:
        """The drawn batch is trained: publish `weights` and return their version.

        The tensors are the model's own and change with the next step: copy what is kept.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """A consistent snapshot between two steps, as plain data that pickles."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def check_batch(batch_size: int, micro_batch: int, accumulation: int | None = None) -> int:
    """The number of micro-batches that make up `batch_size`; UserError when none does."""
    if batch_size < 2:
        raise UserError(f"batch size {batch_size}: a step needs at least 2 trajectories")
    if micro_batch < 1 or batch_size % micro_batch:
        closest = min(divisors(batch_size), key=lambda d: abs(d - micro_batch))
        raise UserError(
            f"per_device_train_batch_size = {micro_batch} does not divide the batch of {batch_size} trajectories; "
            f"the closest that does is {closest}"
        )
    needed = batch_size // micro_batch
    if accumulation is not None and accumulation != needed:
        raise UserError(
            f"per_device_train_batch_size ({micro_batch}) x gradient_accumulation_steps ({accumulation}) = "
            f"{micro_batch * accumulation}, but a batch holds {batch_size} trajectories; "
            f"set gradient_accumulation_steps = {needed}"
        )
    return needed


@dataclass(frozen=True, slots=True)
class Row:
    """One sample as arrays of length L, aligned with its ids. `turns` numbers the turn of each token from 0."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    turns: NDArray[np.int64]
    first_prompt: int
    """Tokens before the first sampled one."""
    advantage: float
    """Times the sample's weight, which scales its loss."""


def row_of(sample: Sample) -> Row:
    """ValueError for a trajectory without a prompt or without a sampled token: neither can be scored."""
    trajectory = sample.trajectory
    turns = trajectory.turns
    if not turns or not turns[0].prompt_ids or not trajectory.n_sampled:
        raise ValueError(f"trajectory {trajectory.id} has no prompt or no sampled token")
    lengths = np.array([n for turn in turns for n in (len(turn.prompt_ids), len(turn.output_ids))])
    mask = np.repeat(np.arange(lengths.size) % 2 == 1, lengths)
    logprobs = np.zeros(mask.size, dtype=np.float32)
    logprobs[mask] = [value for turn in turns for value in turn.logprobs]
    versions = np.full(mask.size, -1, dtype=np.int64)
    versions[mask] = trajectory.sampled_versions()
    return Row(
        ids=np.array(trajectory.ids(), dtype=np.int64),
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        turns=np.repeat(np.arange(lengths.size) // 2, lengths),
        first_prompt=int(lengths[0]),
        advantage=sample.advantage * sample.weight,
    )


def collate(rows: Sequence[Row], *, pad_id: int, n_tokens: int) -> MicroBatch:
    """The keys that TRL's `_compute_loss` reads, and a few of ours.

    TRL cuts a sequence into a prompt (B, P) and a completion (B, T). P is the shortest first prompt, so that the prompt
    needs no padding; the rest of a longer prompt begins the completion, with mask 0 as any other environment text.

    * prompt_ids, prompt_mask (B, P); completion_ids, completion_mask (B, T): int64, the mask is 0 on padding
    * tool_mask (B, T): 1.0 on sampled tokens; live (B, T): the same as bool
    * advantages (B,); old_per_token_logps, sampling_per_token_logps (B, T): of the policy that sampled
    * versions, turns (B, T): int64, version -1 where nothing was sampled
    * num_items_in_batch (): `n_tokens`, the live tokens of the whole step
    """
    lengths = np.array([row.ids.size for row in rows])
    cut = min(row.first_prompt for row in rows)
    filled = np.arange(lengths.max()) < lengths[:, None]

    def padded(columns: list[NDArray[Any]], fill: float) -> Tensor:
        out = np.full(filled.shape, fill, dtype=columns[0].dtype)
        out[filled] = np.concatenate(columns)
        return torch.from_numpy(out)

    ids = padded([row.ids for row in rows], pad_id)
    attention = torch.from_numpy(filled.astype(np.int64))
    live = padded([row.mask for row in rows], False)[:, cut:]
    logprobs = padded([row.logprobs for row in rows], 0.0)[:, cut:]
    return {
        "prompt_ids": ids[:, :cut],
        "prompt_mask": attention[:, :cut],
        "completion_ids": ids[:, cut:],
        "completion_mask": attention[:, cut:],
        "tool_mask": live.float(),
        "live": live,
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        "old_per_token_logps": logprobs,
        "sampling_per_token_logps": logprobs,
        "versions": padded([row.versions for row in rows], -1)[:, cut:],
        "turns": padded([row.turns for row in rows], 0)[:, cut:],
        "num_items_in_batch": torch.tensor(float(n_tokens)),
    }


def micro_batches(batch: Batch, *, count: int, pad_id: int) -> list[MicroBatch]:
    """Cut a batch into `count` micro-batches of nearly equal size and similar length, the longest first.

    Sorting by length leaves little padding. The longest come first so that a batch that does not fit in memory fails at
    once, and not after most of a step.
    """
    rows = sorted(map(row_of, batch.samples), key=lambda row: row.ids.size, reverse=True)
    n_tokens = sum(int(row.mask.sum()) for row in rows)
    ends = [len(rows) * k // count for k in range(count + 1)]
    return [collate(rows[a:b], pad_id=pad_id, n_tokens=n_tokens) for a, b in itertools.pairwise(ends)]


class StepBatches(IterableDataset[MicroBatch]):
    """Draws one batch per optimiser step and yields its `accumulation` micro-batches.

    `on_batch` hears of every batch, with the seconds that the trainer waited for it.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        micro_batch: int,
        accumulation: int,
        pad_id: int,
        clock: Clock,
        on_batch: Callable[[Batch, float], None],
    ) -> None:
        self.source = source
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.pad_id = pad_id
        self.clock = clock
        self.on_batch = on_batch

    def __iter__(self) -> Iterator[MicroBatch]:
        while True:
            started = self.clock.now()
            batch = self.source.next_batch()
            if batch is None:
                return
            self.on_batch(batch, self.clock.now() - started)
            # Whole groups may have lost a member, so a batch of groups can be a little smaller than its full size.
            if not self.accumulation <= len(batch.samples) <= self.micro_batch * self.accumulation:
                raise RunError(
                    f"batch {batch.step} holds {len(batch.samples)} trajectories; the trainer takes "
                    f"{self.accumulation} to {self.micro_batch} x {self.accumulation}"
                )
            yield from micro_batches(batch, count=self.accumulation, pad_id=self.pad_id)

    def loader(self) -> DataLoader[MicroBatch]:
        """A loader that asks for a micro-batch only when the trainer does.

        It must not go through `accelerator.prepare`, whose loader fetches one item ahead. The generator of its own
        keeps the loader from drawing a seed from torch's global state, which a resumed run would draw once more.
        """
        return DataLoader(self, batch_size=None, collate_fn=as_it_is, num_workers=0, generator=torch.Generator())


def as_it_is(micro_batch: Any) -> Any:
    return micro_batch
