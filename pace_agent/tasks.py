"""Where tasks come from, in what order, and how often they are tried again.

What always holds:

* A source is deterministic: the same split and index give the same task. No task is in two splits.
* The queue hands out retries before new tasks, oldest first, and new tasks in an order that the seed fixes.
* Its state is a few numbers and the retries that wait, so that a checkpoint holds it whole.
"""

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pace_agent.types import Split, Task


@runtime_checkable
class TaskSource(Protocol):
    """Tasks by number. `size` is None where they never end."""

    def size(self, split: Split) -> int | None: ...

    def task(self, split: Split, index: int) -> Task: ...


@dataclass(frozen=True, slots=True)
class TaskRef:
    """A place in a source, and which try this is."""

    index: int
    attempt: int = 0


class TaskQueue:
    """The order of training tasks over `source`, split `train`.

    Finite sources are shuffled anew every epoch with `(seed, epoch)`.
    """

    def __init__(self, source: TaskSource, *, seed: int, max_attempts: int = 4) -> None:
        self.source = source
        self.seed = seed
        self.max_attempts = max_attempts
        self._size = source.size("train")
        if self._size == 0:
            raise ValueError("the task source has no task in its train split")
        self._cursor = 0
        self._retries: deque[TaskRef] = deque()
        self._order: list[int] = []
        self._epoch = -1

    def next(self) -> tuple[TaskRef, Task]:
        ref = self._retries.popleft() if self._retries else TaskRef(self._next_index())
        return ref, self.source.task("train", ref.index)

    def requeue(self, ref: TaskRef) -> bool:
        """Put a task back as its next attempt; False when its attempts are used up."""
        if ref.attempt + 1 >= self.max_attempts:
            return False
        self._retries.append(TaskRef(ref.index, ref.attempt + 1))
        return True

    def put_back(self, ref: TaskRef) -> None:
        """Give back a task that was never tried to its end (a rolled back or cancelled rollout): the same attempt."""
        self._retries.append(ref)

    def _next_index(self) -> int:
        position, self._cursor = self._cursor, self._cursor + 1
        if self._size is None:
            return position
        epoch, place = divmod(position, self._size)
        if epoch != self._epoch:
            self._order = list(range(self._size))
            random.Random(f"{self.seed}:{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[place]

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._cursor, "retries": [(ref.index, ref.attempt) for ref in self._retries]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cursor = int(state["cursor"])
        self._retries = deque(TaskRef(int(index), int(attempt)) for index, attempt in state["retries"])
        self._epoch = -1
