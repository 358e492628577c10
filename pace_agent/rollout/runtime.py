"""The asynchronous loop: rollouts on one side, the trainer on the other, the pool between them.

    task -> rollouts of a group -> rewards, advantages -> pool -> batch -> trainer -> weights -> engine (version + 1)

`Runtime.run` starts rollouts while the policy admits them. `next_batch` waits until the pool can fill one. `step_ended`
publishes the new weights. All three run on one event loop, so everything between two awaits is atomic.

What always holds:

* Every rollout is in exactly one state of the ledger; the conservation law is checked at every draw.
* `version` is the last version published to the engine; it rises by one for every step that ended.
* A group's advantages are computed once, when its last member has ended, over all members that completed.
* An infrastructure failure is never a reward of 0: the member is tried again, or the group goes on without it while
  at least two members are left.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

from pace_agent.clock import Clock, WallClock
from pace_agent.engine.base import Engine, EngineInfo, UpdateRefused, WeightSource
from pace_agent.errors import RunError
from pace_agent.ledger import STALE, Ledger, State
from pace_agent.pool import Draw, Entry, PacePool, Spans
from pace_agent.rollout.concurrency import Concurrency
from pace_agent.rollout.episode import Episode, Player
from pace_agent.rollout.journal import Journal, read_lines, record, rolled_back
from pace_agent.rollout.window import StepWindow
from pace_agent.tasks import TaskQueue, TaskRef
from pace_agent.types import Batch, Sample, StopReason, Task, Trajectory

log = logging.getLogger(__name__)


class Closable(Protocol):
    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """`concurrency` bounds the rollouts in flight. With `most_concurrency` that is the start, and a controller moves
    it up to this. More than `max_failure_share` of the last `failure_window` rollouts failing stops the run."""

    group_size: int = 8
    concurrency: int = 96
    most_concurrency: int | None = None
    seed: int = 0
    requeue: bool = True
    max_failure_share: float = 0.5
    failure_window: int = 128


@dataclass(slots=True)
class OpenGroup:
    """A group with members still running. `missing` holds the attempts of members to be started."""

    id: int
    ref: TaskRef
    task: Task
    members: list[Trajectory] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    running: int = 0


@dataclass(slots=True)
class InPlay:
    """A pooled group: members still waiting, and whether one was drawn."""

    ref: TaskRef
    waiting: int
    drawn: bool = False


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**53) that is a function of the parts alone."""
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


class Runtime:
    """Owns the rollouts of one run. Use it from one event loop; `RuntimeThread` carries it to a trainer's thread."""

    def __init__(
        self,
        *,
        player: Player,
        engine: Engine,
        queue: TaskQueue,
        pool: PacePool[Sample],
        ledger: Ledger,
        journal: Journal,
        ledger_log: Journal,
        advantages: Callable[[Sequence[float]], Sequence[float]],
        options: RuntimeOptions,
        clock: Clock | None = None,
        resources: Sequence[Closable] = (),
        before_step: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`resources` are closed after the last rollout has ended, on the same loop.

        `before_step` is awaited between a draw and its optimiser step: an engine on the trainer's GPU makes room there.
        """
        self.player = player
        self.engine = engine
        self.queue = queue
        self.pool = pool
        self.ledger = ledger
        self.journal = journal
        self.ledger_log = ledger_log
        self.resources = resources
        self.before_step = before_step
        self.advantages = advantages
        self.options = options
        self.clock = clock or WallClock()
        self.version = 0
        self.step = 0
        self.window = StepWindow()
        self.concurrency = Concurrency(options.concurrency, least=options.group_size, most=options.most_concurrency)
        self._groups: dict[int, OpenGroup] = {}
        self._in_play: dict[int, InPlay] = {}
        self._next_group = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._drawn: tuple[Sample, ...] = ()
        self._failures: deque[bool] = deque(maxlen=options.failure_window)
        self._waiters: list[asyncio.Future[None]] = []
        self._error: BaseException | None = None
        self._runner: asyncio.Task[None] | None = None
        self._stopping = False
        self._held = False
        self._closed = False

    # ---- the loop ---------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        info = await self.engine.start()
        self.version = max(self.version, info.version)
        self.player = replace(self.player, limits=self.player.limits.within(info.context_length))
        return info

    def begin(self) -> None:
        """Run in the background; what goes wrong there is raised by `next_batch`."""
        self._runner = asyncio.create_task(self.run(), name="runtime")
        self._runner.add_done_callback(self._task_done)

    async def run(self) -> None:
        """Start rollouts while the policy admits them, until stopped."""
        for group in list(self._groups.values()):
            self._start_missing(group)
        while not self._stopping:
            while self._admits():
                self._open_group()
            await self._change()

    async def next_batch(self) -> Batch | None:
        """Wait until the pool can fill a batch and draw it; None when the run is stopping."""
        while True:
            if self._error is not None:
                raise self._error
            if self._stopping:
                return None
            draw = self.pool.draw(self.version)
            if draw is not None:
                self._reject(draw)
                self._changed()
                if draw.filled:
                    break
            else:
                await self._change()
        self.step += 1
        self._drawn = draw.payloads
        self.concurrency.drawn(self.clock.now(), len(self._drawn))
        self._log_ledger()
        if self.before_step is not None:
            await self.before_step()
        metrics = {
            **draw.metrics,
            **self.window.metrics(self.clock.now(), self.engine.stats(), self.ledger),
            "rollout/concurrency": float(self.concurrency.limit),
        }
        return Batch(step=self.step, version=self.version, samples=self._drawn, metrics=metrics)

    async def step_ended(self, weights: WeightSource) -> int:
        """The optimiser step of the drawn batch has ended: its rollouts are trained; publish `weights`."""
        await self.publish(weights, self.version + 1)
        drawn, self._drawn = self._drawn, ()
        self.ledger.move_many([sample.trajectory.id for sample in drawn], State.TRAINED)
        self.journal.write(
            record(sample.trajectory, fate="trained", step=self.step, advantage=sample.advantage) for sample in drawn
        )
        self.journal.flush()
        self.concurrency.trained(self.clock.now())
        self._changed()
        return self.version

    async def publish(self, weights: WeightSource, version: int) -> None:
        """Swap the engine's weights between two tokens; interrupted rollouts go on from the tokens they have."""
        await self.engine.pause()
        try:
            published = False
            while not published:
                try:
                    await self.engine.update_weights(weights, version)
                    published = True
                except UpdateRefused as refused:  # by servers that are out now; again, for the others
                    log.warning("%s", refused)
            self.version = version
        finally:
            await self.engine.resume()

    # ---- rollouts and groups ----------------------------------------------------------------------------------

    def _admits(self) -> bool:
        if self._held or self._stopping:
            return False
        running = self.ledger.count(State.RUNNING)
        size = self.options.group_size
        if running and running + size > self.concurrency.limit:
            return False
        return self.pool.admit(size)

    def _open_group(self) -> None:
        ref, task = self.queue.next()
        group = OpenGroup(self._next_group, ref, task, missing=[0] * self.options.group_size)
        self._next_group += 1
        self._groups[group.id] = group
        self._start_missing(group)

    def _start_missing(self, group: OpenGroup) -> None:
        missing, group.missing = group.missing, []
        for attempt in missing:
            self._start_member(group, attempt)

    def _start_member(self, group: OpenGroup, attempt: int) -> None:
        seed, number = self.options.seed, self.ledger.submit()
        group.running += 1
        episode = Episode(
            id=number,
            group_id=group.id,
            task=group.task,
            attempt=attempt,
            env_seed=group.task.seed or derive_seed(seed, "environment", group.ref.index),
            sampling_seed=derive_seed(seed, "sampling", number),
        )
        task = asyncio.create_task(self._member(group, episode), name=f"rollout-{number}")
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    async def _member(self, group: OpenGroup, episode: Episode) -> None:
        try:
            trajectory = await self.player.play(episode)
        except asyncio.CancelledError:
            self.ledger.move(episode.id, State.CANCELLED, "run_ended")
            raise
        self._ended(group, trajectory)
        self._changed()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
            self._changed()

    def _ended(self, group: OpenGroup, trajectory: Trajectory) -> None:
        group.running -= 1
        self.window.add(trajectory)
        if trajectory.stop is StopReason.CANCELLED:
            self._fate([trajectory], State.CANCELLED, "aborted")
        elif trajectory.stop.failed:
            self._fate([trajectory], State.FAILED, str(trajectory.stop))
            self._count_failure(trajectory)
            if trajectory.attempt + 1 < self.queue.max_attempts and self._error is None:
                self._start_member(group, trajectory.attempt + 1)
        else:
            self._failures.append(False)
            self.ledger.move(trajectory.id, State.GROUPING)
            group.members.append(trajectory)
        if group.running == 0:
            self._close_group(group)

    def _close_group(self, group: OpenGroup) -> None:
        """The last member has ended: compute advantages and pool, or reject what carries no signal."""
        del self._groups[group.id]
        members = group.members
        rewards = [member.reward or 0.0 for member in members]
        if len(members) < 2:
            self._fate(members, State.REJECTED, "group_too_small")
            if self.options.requeue:
                self.queue.requeue(group.ref)
            return
        self.window.add_group(signal=len(set(rewards)) > 1)
        if len(set(rewards)) == 1:
            self._fate(members, State.REJECTED, "no_signal")
            return
        retried = self.options.requeue and self.queue.max_attempts > 1
        last = retried and group.ref.attempt + 1 >= self.queue.max_attempts
        self._in_play[group.id] = InPlay(group.ref, len(members))
        self.concurrency.arrived(len(members))
        self.pool.add(
            [
                Entry(member.id, Sample(member, advantage), Spans.of(member.turns), member.completed_version, last)
                for member, advantage in zip(members, self.advantages(rewards), strict=True)
            ]
        )

    def _reject(self, draw: Draw[Sample]) -> None:
        """Journal what was rejected. A task of which nothing was or can be trained goes back to its source."""
        step = self.step + draw.filled
        self.journal.write(
            record(sample.trajectory, fate="rejected", reason=STALE, step=step) for sample in draw.rejected_payloads
        )
        for sample in draw.payloads:
            self._in_play[sample.trajectory.group_id].drawn = True
        for sample in (*draw.payloads, *draw.rejected_payloads):
            group = sample.trajectory.group_id
            left = self._in_play[group]
            left.waiting -= 1
            if left.waiting == 0:
                del self._in_play[group]
                if not left.drawn and self.options.requeue:
                    self.queue.requeue(left.ref)

    def _log_ledger(self) -> None:
        line = {"step": self.step, "version": self.version, "incarnation": self.ledger.incarnation}
        self.ledger_log.write([line | self.ledger.counts() | {"reasons": self.ledger.reasons()}])
        self.ledger_log.flush()

    def _fate(self, members: Sequence[Trajectory], state: State, reason: str) -> None:
        for member in members:
            self.ledger.move(member.id, state, reason)
        self.journal.write(record(member, fate=state.name.lower(), reason=reason, step=self.step) for member in members)

    def _count_failure(self, trajectory: Trajectory) -> None:
        self._failures.append(True)
        failed, seen = sum(self._failures), len(self._failures)
        # Failures come faster than completions, so a window that is not full yet shows too many of them.
        if seen == self._failures.maxlen and failed / seen > self.options.max_failure_share:
            self._error = RunError(
                f"{failed} of the last {seen} rollouts failed, more than rollout.max_failure_share = "
                f"{self.options.max_failure_share}. By reason: {self.ledger.reasons()['failed']}. "
                f"The last: {trajectory.error}"
            )

    # ---- waiting ----------------------------------------------------------------------------------------------

    async def _change(self) -> None:
        """Wait until something happened that another look is worth."""
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        await future

    def _changed(self) -> None:
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    def hold(self, held: bool) -> None:
        """While held, no new rollout starts; those in flight go on."""
        self._held = held
        self._changed()

    def stop(self) -> None:
        """Let `run` return and `next_batch` answer None."""
        self._stopping = True
        self._changed()

    async def aclose(self) -> None:
        """Cancel what runs (each closes its environment), write the fate of what is left, close the engine."""
        if self._closed:
            return
        self._closed = True
        self.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A task that is cancelled before its first step never runs a line of its own.
        self.ledger.move_many(self.ledger.ids(State.RUNNING), State.CANCELLED, "run_ended")
        try:
            self._write_rest()
        finally:
            for resource in (*self.resources, self.engine):
                await resource.aclose()

    def _write_rest(self) -> None:
        """The fate of what was never trained: it waits for its group, or in the pool, or its step did not end."""
        grouping = [member for group in self._groups.values() for member in group.members]
        pooled = [sample.trajectory for sample in self.pool.payloads()]
        dropped = [sample.trajectory for sample in self._drawn]
        self._fate(dropped, State.CANCELLED, "step_dropped")
        for fate, members in (("grouping", grouping), ("pooled", pooled)):
            self.journal.write(record(member, fate=fate, step=self.step) for member in members)
        self._log_ledger()
        self.journal.close()
        self.ledger_log.close()

    # ---- checkpoint -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A consistent snapshot, taken between two awaits. Rollouts in flight are saved as places to be tried again."""
        return {
            "version": self.version,
            "step": self.step,
            "next_group": self._next_group,
            "groups": [
                {
                    "id": group.id,
                    "ref": (group.ref.index, group.ref.attempt),
                    "members": list(group.members),
                    "missing": group.running + len(group.missing),
                }
                for group in self._groups.values()
            ],
            "in_play": [
                (group, left.ref.index, left.ref.attempt, left.waiting, left.drawn)
                for group, left in self._in_play.items()
            ],
            "queue": self.queue.state_dict(),
            "pool": self.pool.state_dict(),
            "ledger": self.ledger.state_dict(),
            "journal": self.journal.state_dict(),
            "ledger_log": self.ledger_log.state_dict(),
            "window": self.window.state_dict(),
            "concurrency": self.concurrency.state_dict(),
        }

    def start_over(self) -> None:
        """Roll back to the start: for a run that was killed before its first checkpoint."""
        self.ledger.incarnation = self._new_incarnation()
        for journal in (self.journal, self.ledger_log):
            journal.roll_back(0, incarnation=self.ledger.incarnation)

    def _new_incarnation(self) -> int:
        """One more than any that this run folder has seen, in the surviving line or out of it."""
        seen: list[int] = [line["incarnation"] for line in read_lines(self.ledger_log.path)]
        seen += rolled_back(self.journal.path)
        return max([self.ledger.incarnation, *(number + 1 for number in seen), 1])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Roll everything back together, under a new incarnation."""
        self.version, self.step = state["version"], state["step"]
        self._next_group = state["next_group"]
        self.queue.load_state_dict(state["queue"])
        self.ledger.load_state_dict(state["ledger"])
        self.ledger.incarnation = self._new_incarnation()
        self.ledger.rollback()
        self.pool.load_state_dict(state["pool"])
        self._in_play = {
            group: InPlay(TaskRef(index, attempt), waiting, drawn)
            for group, index, attempt, waiting, drawn in state["in_play"]
        }
        self.window.load_state_dict(state["window"])
        if "concurrency" in state:  # a run that began before there was a controller
            self.concurrency.load_state_dict(state["concurrency"])
        for name, journal in (("journal", self.journal), ("ledger_log", self.ledger_log)):
            journal.roll_back(state[name]["bytes"], incarnation=self.ledger.incarnation)
        self._groups = {}
        for saved in state["groups"]:
            ref = TaskRef(*saved["ref"])
            if not saved["members"]:
                self.queue.put_back(ref)
                continue
            task = self.queue.source.task("train", ref.index)
            self._groups[saved["id"]] = OpenGroup(
                saved["id"], ref, task, members=list(saved["members"]), missing=[0] * saved["missing"]
            )
