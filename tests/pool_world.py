"""A small deterministic world around the pool: slots that generate, a trainer that takes time, tasks that come back.

Time is virtual. Every rollout samples its tokens at an even pace, except for one stall, and is stamped with the
versions that were published meanwhile, as an engine that swaps weights in flight would do.
"""

import heapq
import random
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pace_agent.ledger import NO_SIGNAL, Ledger, State
from pace_agent.pool import Entry, PacePool, PoolOptions, Spans


@dataclass(frozen=True)
class Rollout:
    """What one rollout will be like: tokens, seconds of sampling, and a stall after `stall_at` of its tokens."""

    length: int
    seconds: float
    stall: float = 0.0
    stall_at: float = 0.0
    fails: bool = False
    signal: bool = True


@dataclass
class Attempt:
    task: int
    attempt: int
    members: int
    done: list[Entry[tuple[int, int]]] = field(default_factory=list)
    ended: int = 0
    alive: int = 0
    signal: bool = True


class World:
    """`rollout(task, rng)` says what a rollout of a task is like; `tasks` is how many there are (they are cycled)."""

    def __init__(
        self,
        options: PoolOptions,
        rollout: Callable[[int, random.Random], Rollout],
        *,
        slots: int,
        step_seconds: float,
        seed: int = 0,
        tasks: int | None = None,
        requeue: bool = True,
        max_attempts: int = 4,
    ) -> None:
        self.options, self.rollout, self.slots, self.step_seconds = options, rollout, slots, step_seconds
        self.tasks, self.requeue, self.max_attempts = tasks, requeue, max_attempts
        self.rng = random.Random(seed)
        self.ledger = Ledger()
        self.pool: PacePool[tuple[int, int]] = PacePool(options, self.ledger)
        self.now, self.version, self.free = 0.0, 0, slots
        self.published = [0.0]
        self.retries: deque[tuple[int, int]] = deque()
        self.next_task = 0
        self.groups: dict[int, Attempt] = {}
        self.next_group = 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.batch: list[int] | None = None
        self.trained_tasks: defaultdict[int, list[int]] = defaultdict(list)
        self.lost_tasks: list[int] = []
        self.idle_seconds = 0.0
        self.idle_since = 0.0
        self.draws: list[dict[str, float]] = []
        self.trained_lengths: list[list[int]] = []
        self.lengths: dict[int, int] = {}
        self.most_pooled = 0

    def run(self, steps: int) -> "World":
        """Until `steps` versions are published. AssertionError where nothing can happen any more."""
        self.dispatch()
        while self.version < steps:
            assert self.events, f"deadlock at version {self.version}: {self.ledger.counts()}, {len(self.pool)} pooled"
            self.now, _, event = heapq.heappop(self.events)
            event()
            self.train()
            self.dispatch()
            self.pool.check()
            self.most_pooled = max(self.most_pooled, self.pool.units)
        self.ledger.audit()
        return self

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + seconds, self.count, event))

    def dispatch(self) -> None:
        size = self.options.group_size
        while self.free >= size and self.pool.admit(size):
            task, attempt = self.retries.popleft() if self.retries else self.new_task()
            group = self.next_group
            self.next_group += 1
            self.groups[group] = Attempt(task, attempt, size)
            for _ in range(size):
                self.start(group)

    def new_task(self) -> tuple[int, int]:
        task = self.next_task
        self.next_task += 1
        return (task if self.tasks is None else task % self.tasks), 0

    def start(self, group: int) -> None:
        self.free -= 1
        one, new, started = self.rollout(self.groups[group].task, self.rng), self.ledger.submit(), self.now
        self.lengths[new] = one.length
        self.at(one.seconds + one.stall, lambda: self.complete(new, group, one, started))

    def complete(self, new: int, group: int, one: Rollout, started: float) -> None:
        self.free += 1
        attempt = self.groups[group]
        attempt.ended += 1
        if one.fails:
            self.ledger.move(new, State.FAILED, "failed.environment")
        else:
            self.ledger.move(new, State.GROUPING)
            attempt.signal &= one.signal
            last = self.requeue and attempt.attempt + 1 >= self.max_attempts
            payload = (group, attempt.task)
            attempt.done.append(Entry(new, payload, self.stamps(one, started), self.version, last))
        if attempt.ended == attempt.members:
            self.close(group, attempt)

    def stamps(self, one: Rollout, started: float) -> Spans:
        """Tokens per version: token i is sampled at an even pace, the stall falls after `stall_at` of them."""
        first = bisect_right(self.published, started) - 1
        cuts, versions = [0], [first]
        for version in range(first + 1, self.version + 1):
            since = self.published[version] - started
            before = min(since, max(one.stall_at * one.seconds, since - one.stall))
            tokens = round(before / one.seconds * one.length)
            if tokens >= one.length:
                break
            if tokens > cuts[-1]:
                cuts.append(tokens)
                versions.append(version)
            else:
                versions[-1] = version
        counts = [b - a for a, b in zip(cuts, [*cuts[1:], one.length], strict=True)]
        return Spans(tuple(versions), tuple(counts), (0,) * len(counts))

    def close(self, group: int, attempt: Attempt) -> None:
        ids = [entry.id for entry in attempt.done]
        attempt.alive = len(ids)
        if len(ids) < min(2, attempt.members):
            self.ledger.move_many(ids, State.FAILED, "group")
            attempt.alive = 0
            self.give_back(group)
        elif not attempt.signal:
            self.ledger.move_many(ids, State.REJECTED, NO_SIGNAL)
            del self.groups[group]
        else:
            self.pool.add(attempt.done)

    def give_back(self, group: int) -> None:
        """A group of which nothing is left: its task goes back, or is lost."""
        attempt = self.groups.pop(group)
        if not self.requeue:
            return
        if attempt.attempt + 1 < self.max_attempts:
            self.retries.append((attempt.task, attempt.attempt + 1))
        else:
            self.lost_tasks.append(attempt.task)

    def train(self) -> None:
        if self.batch is not None or not self.pool.ready():
            return
        draw = self.pool.draw(self.version)
        assert draw is not None
        for group, _ in draw.rejected_payloads:
            self.groups[group].alive -= 1
            if self.groups[group].alive == 0:
                self.give_back(group)
        if draw.filled:
            self.idle_seconds += self.now - self.idle_since
            self.batch = draw.ids.tolist()
            for group, task in draw.payloads:
                self.trained_tasks[task].append(self.version)
                if group in self.groups and self.groups[group].alive:
                    self.groups[group].alive = -(10**6)  # trained on: never given back
            self.draws.append(dict(draw.metrics))
            self.trained_lengths.append([self.lengths[k] for k in self.batch])
            self.at(self.step_seconds, self.publish)

    def publish(self) -> None:
        assert self.batch is not None
        self.ledger.move_many(self.batch, State.TRAINED)
        self.batch = None
        self.version += 1
        self.published.append(self.now)
        self.idle_since = self.now
