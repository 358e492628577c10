"""A discrete-event simulation around the pool that training uses: slots that sample, a trainer that takes time.

What always holds:

* Rollouts enter the same `PacePool` as in a real run, with the same policies, budget, staleness and ledger. Only the
  tokens are missing: lengths, speeds and stalls are drawn.
* One event follows another. A completed rollout frees its slot, which goes on with the next rollout if the policy
  admits it, or waits. The trainer draws when it is free and the policy is ready, and works for `step_seconds`; then its
  version is published, and what completed up to that moment belongs to the version before.
* Completions between two moves of the trainer are collected, and enter the pool in one call before either.
* The k-th rollout that starts is the same under every policy, and a seed fixes the whole run.

A million rollouts take seconds because whatever is done for each one is done in columns, except for the order of the
completions: that is a heap.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pace_agent.errors import RunError, UserError
from pace_agent.ledger import Ledger, State
from pace_agent.pool import Arrivals, Draw, PacePool, PoolOptions
from pace_agent.pool.policies import AdmissionState
from pace_agent.simulate.results import Figures, Recorder
from pace_agent.simulate.rollouts import RolloutStore
from pace_agent.simulate.stamps import stamp
from pace_agent.simulate.workload import Workload

AHEAD = 128
"""So many completions the admission is asked about at once."""


class Simulator:
    """One run. `run` may be called once; `pool` and `ledger` can be looked at afterwards."""

    def __init__(
        self,
        workload: Workload,
        options: PoolOptions,
        *,
        steps: int = 400,
        warmup: int = 100,
        seed: int = 0,
        step_seconds: float | None = None,
    ) -> None:
        """`step_seconds`: what the trainer takes for a batch, where the workload's ratio is not to say it."""
        if options.unit_size != 1 or options.group_size != 1:
            raise UserError("the simulator knows no groups: pool.unit must be trajectory and pool.group_size 1")
        if not 0 <= warmup < steps:
            raise UserError(f"steps must be more than warmup, which is at least 0, got {steps} and {warmup}")
        if step_seconds is not None and not 0 < step_seconds < math.inf:
            raise UserError(f"step_seconds must be above 0, got {step_seconds}: every step takes time")
        self.workload, self.steps, self.warmup = workload, steps, warmup
        self.step_seconds = workload.step_seconds(options.batch_size) if step_seconds is None else step_seconds
        self.ledger = Ledger()
        self.pool: PacePool[int] = PacePool(options, self.ledger)
        self._turns = options.staleness == "turns"
        self._rollouts = RolloutStore(workload, seed)
        self._recorder = Recorder()
        self._version = 0
        self._published = np.zeros(steps + 1)
        self._seconds, self._work, self._speed = 0.0, 0.0, 1.0
        self._running: list[tuple[float, int]] = []
        self._idle = workload.slots
        self._drawn = 0
        self._starts: list[float] = []
        self._ended: list[int] = []
        self._ended_at: list[float] = []
        self._next = 0

    def run(self) -> Figures:
        """Until `steps` versions are published. Raises RunError where the ledger does not balance."""
        while self._version < self.steps:
            if self._version == self.warmup:
                self._recorder.open(self._seconds)
            ids = self._next_batch()
            self._generate(self._seconds + self.step_seconds)
            self._enter_pool()
            self.ledger.move_many(ids, State.TRAINED)
            self._drawn = 0
            self._version += 1
            self._published[self._version] = self._work
        self._recorder.close(self._seconds)
        self.ledger.audit()
        self.pool.check()
        return self._recorder.figures(
            slots=self.workload.slots, step_seconds=self.step_seconds, ledger=self.ledger.counts()
        )

    def _next_batch(self) -> NDArray[np.int64]:
        """Draw as soon as a batch is there; the ids."""
        while True:
            draw = self.pool.draw(self._version)
            if draw is not None:
                self._record(draw)
                self._drawn = draw.ids.size
            self._fill_idle()
            if draw is not None and draw.filled:
                return draw.ids
            self._generate(None)
            self._enter_pool()

    def _generate(self, until: float | None) -> None:
        """Collect completions up to this second, or without one until the pool would be ready."""
        running, durations, restart = self._running, self._rollouts.durations, heapq.heapreplace
        ended, ended_at, starts = self._ended, self._ended_at, self._starts
        room, blocked = 0, False
        while running:
            # One turn for every change in the number of slots at work, which changes their speed.
            limit = math.inf if until is None else self._work + (until - self._seconds) * self._speed
            slowness = 1 / self._speed
            origin = self._seconds - self._work * slowness
            ready = False
            while (first := running[0])[0] <= limit:
                end, rollout = first
                ended.append(rollout)
                ended_at.append(origin + end * slowness)
                if until is None and self.pool.policy.ready(self.pool.units + len(ended), len(running) - 1):
                    ready = True
                    break
                if not room and not blocked:
                    room = self._room()
                    blocked = room == 0
                if blocked:
                    break
                room -= 1
                starts.append(end)
                restart(running, (end + next(durations), self._next))
                self._next += 1
            else:
                break
            self._advance(end)
            heapq.heappop(running)
            self._idle += 1
            self._speed = self.workload.curve.speed(len(running))
            if ready:
                return
        if until is None:
            raise RunError(f"no rollout runs and none is admitted: {self.ledger.counts()}, {len(ended)} completed")
        self._advance(self._work + (until - self._seconds) * self._speed)
        self._seconds = until

    def _room(self) -> int:
        """How many of the next completions, the present one included, a new rollout would follow; AHEAD at most.

        A completion alone never makes room: every policy that refuses one refuses all until the trainer moves.
        """
        pooled, others = self.pool.units + len(self._ended) - 1, len(self._running) - 1
        return self._admitted(AHEAD, lambda k: AdmissionState(1, others, pooled + k + 1, self._drawn))

    def _fill_idle(self) -> None:
        """Start rollouts in waiting slots, as many as are admitted."""
        if not self._idle:
            return
        pooled, running = self.pool.units, len(self._running)
        number = self._admitted(self._idle, lambda k: AdmissionState(1, running + k, pooled, self._drawn))
        first = self._next == 0 and self.workload.staggered
        for k in range(number):
            start = self._work + (k * self.workload.mean_seconds / self._idle if first else 0.0)
            self._starts.append(start)
            heapq.heappush(self._running, (start + next(self._rollouts.durations), self._next))
            self._next += 1
        self._idle -= number
        self._speed = self.workload.curve.speed(len(self._running))

    def _admitted(self, most: int, state: Callable[[int], AdmissionState]) -> int:
        """How many of `state(0)`, `state(1)`, ... up to `most` the policy admits before the first that it does not."""
        admit = self.pool.policy.admit
        if admit(state(most - 1)):
            return most
        return bisect_left(range(most), True, key=lambda k: not admit(state(k)))

    def _advance(self, work: float) -> None:
        """Let time pass up to this moment of the work scale, with the slots that are at work now."""
        seconds = (work - self._work) / self._speed
        self._recorder.passed(seconds, len(self._running), self.pool.units)
        self._work = work
        self._seconds += seconds

    def _enter_pool(self) -> None:
        """Tell the ledger what started, and the pool what completed."""
        store, started = self._rollouts, len(self._starts)
        self.ledger.submit_many(started)
        store.started[self._next - started : self._next] = self._starts
        ids = np.array(self._ended, dtype=np.int64)
        ended_at = store.completed[ids] = np.array(self._ended_at)
        rollouts = store.take(ids)
        self.ledger.move_many(ids, State.GROUPING)
        self.pool.add_many(
            Arrivals(
                ids,
                self._ended,
                stamp(rollouts, store.started.take(ids), self._published[: self._version + 1], self._turns),
                np.full(ids.size, self._version),
                np.zeros(ids.size, dtype=np.bool_),
            )
        )
        self._recorder.completed(rollouts.length, self._seconds - ended_at)
        for collected in (self._starts, self._ended_at):
            collected.clear()
        self._ended = []

    def _record(self, draw: Draw[int]) -> None:
        drawn, rejected = draw.ids, draw.rejected_ids
        completed = self._rollouts.completed
        self._recorder.drew(
            draw,
            self._rollouts.lengths(drawn),
            self._seconds - completed[drawn],
            self._seconds - completed[rejected],
        )
