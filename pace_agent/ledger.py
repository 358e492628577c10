"""One state per trajectory, and the law that none is lost.

What always holds:

* Every id from 0 to `submitted - 1` was given out once and is in exactly one state.
* submitted = running + grouping + pooled + drawn + trained + rejected + failed + cancelled. `check` tests it in
  constant time at every draw, `audit` recounts the columns.
* A trajectory moves only along `MOVES`; the last four states are final, and three of them carry a reason.
* After a restart the ids go on from the checkpoint: an id is unique in the surviving line, not across incarnations.

States and reasons stand in two dense columns indexed by id (three bytes a trajectory), so that a million are cheap and
thousands move in one call.
"""

from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pace_agent.errors import RunError


class State(IntEnum):
    """Where a trajectory is. The values are stored in checkpoints: append, never renumber."""

    RUNNING = 0
    """Its rollout is going on."""
    GROUPING = 1
    """Complete, waiting for the rest of its group."""
    POOLED = 2
    """In the pool, free to be drawn."""
    DRAWN = 3
    """In a batch whose optimiser step has not ended."""
    TRAINED = 4
    """Its optimiser step has ended."""
    REJECTED = 5
    """Complete, but not to be trained on."""
    FAILED = 6
    """Its rollout could not be completed or scored."""
    CANCELLED = 7
    """Given up by the run, through no fault of its own: the run ended or was rolled back."""


MOVES: Mapping[State, frozenset[State]] = {
    State.RUNNING: frozenset({State.GROUPING, State.FAILED, State.CANCELLED}),
    State.GROUPING: frozenset({State.POOLED, State.REJECTED, State.FAILED, State.CANCELLED}),
    State.POOLED: frozenset({State.DRAWN, State.REJECTED, State.CANCELLED}),
    State.DRAWN: frozenset({State.TRAINED, State.CANCELLED}),
    State.TRAINED: frozenset(),
    State.REJECTED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}

WITH_REASON = frozenset({State.REJECTED, State.FAILED, State.CANCELLED})
NO_SIGNAL = "no_signal"
"""Reason for rejecting the members of a group whose rewards are all equal."""
STALE = "stale"
"""Reason for rejecting what the pool's policy would not train on."""
ROLLBACK = "rollback"
"""Reason for cancelling what was in flight at the checkpoint from which a run goes on."""

_ALLOWED = np.array([[target in MOVES[source] for target in State] for source in State])
_SOURCES = _ALLOWED.T.tolist()
"""By target and source, whether the move is in `MOVES`."""


class Ledger:
    """Counts and states of every trajectory that the run submitted."""

    def __init__(self) -> None:
        self.incarnation = 0
        """How often the run has been taken up again from a checkpoint."""
        self._submitted = 0
        self._states = np.zeros(1024, dtype=np.int8)
        self._reason_codes = np.zeros(1024, dtype=np.int16)
        self._counts = [0] * len(State)
        self._reasons: list[tuple[State, str]] = []
        self._reason_counts: list[int] = []

    @property
    def submitted(self) -> int:
        return self._submitted

    def submit(self) -> int:
        """A new trajectory, running. Its id is the number of those before it."""
        new = self._submitted
        if new == self._states.size:
            self._states = np.concatenate([self._states, np.zeros_like(self._states)])
            self._reason_codes = np.concatenate([self._reason_codes, np.zeros_like(self._reason_codes)])
        self._states[new] = State.RUNNING
        self._submitted += 1
        self._counts[State.RUNNING] += 1
        return new

    def submit_many(self, number: int) -> NDArray[np.int64]:
        """`submit`, so many times; the ids, rising."""
        first, end = self._submitted, self._submitted + number
        if end > self._states.size:
            spare = np.zeros(max(self._states.size, number), dtype=np.int8)
            self._states = np.concatenate([self._states, spare])
            self._reason_codes = np.concatenate([self._reason_codes, spare.astype(np.int16)])
        self._states[first:end] = State.RUNNING
        self._submitted = end
        self._counts[State.RUNNING] += number
        return np.arange(first, end)

    def state(self, trajectory_id: int) -> State:
        """The present state; RunError for an id that was never given out."""
        return State(int(self._states[self._known(trajectory_id)]))

    def reason(self, trajectory_id: int) -> str:
        """Why the trajectory was rejected, failed or cancelled; "" in every other state."""
        code = int(self._reason_codes[self._known(trajectory_id)])
        return self._reasons[code][1] if self.state(trajectory_id) in WITH_REASON else ""

    def ids(self, state: State) -> NDArray[np.int64]:
        """All ids in `state`, rising."""
        return np.flatnonzero(self._states[: self._submitted] == state)

    def move(self, trajectory_id: int, state: State, reason: str = "") -> None:
        """Move one trajectory. Raises RunError, and changes nothing, for an unknown id or a move not in `MOVES`."""
        source = self.state(trajectory_id)
        if state not in MOVES[source]:
            raise RunError(f"trajectory {trajectory_id} can't go from {source.name} to {state.name}")
        code = self._reason_code(state, reason)
        self._states[trajectory_id] = state
        self._reason_codes[trajectory_id] = code
        self._count(source, state, code, 1)

    def move_many(self, trajectory_ids: ArrayLike, state: State, reason: str = "") -> None:
        """Move several at once: all, or none with RunError (unknown id, id named twice, move not in `MOVES`)."""
        ids = np.asarray(trajectory_ids, dtype=np.int64)
        if ids.size == 0:
            return
        ordered = np.sort(ids)
        if ordered[0] < 0 or ordered[-1] >= self._submitted:
            raise RunError(f"trajectory ids {ordered[0]} to {ordered[-1]}, but only {self._submitted} were submitted")
        sources = self._states.take(ids)
        numbers = np.bincount(sources, minlength=len(State)).tolist()
        if any(n and not allowed for n, allowed in zip(numbers, _SOURCES[state], strict=True)):
            illegal = ~_ALLOWED[sources, state]
            first = int(np.argmax(illegal))
            raise RunError(
                f"{illegal.sum()} of {ids.size} trajectories can't go to {state.name}; "
                f"the first, {ids[first]}, is {State(int(sources[first])).name}"
            )
        if np.count_nonzero(ordered[1:] == ordered[:-1]):
            raise RunError(f"a trajectory is named twice among {ids.size} that go to {state.name}")
        code = self._reason_code(state, reason)
        self._states[ids] = state
        if reason:
            self._reason_codes[ids] = code
            self._reason_counts[code] += ids.size
        for source, number in enumerate(numbers):
            self._counts[source] -= number
        self._counts[state] += ids.size

    def count(self, state: State, reason: str | None = None) -> int:
        """How many are in `state`, or in it for `reason`."""
        if reason is None:
            return self._counts[state]
        return self._reason_counts[self._reasons.index((state, reason))] if (state, reason) in self._reasons else 0

    def counts(self) -> dict[str, int]:
        """`submitted`, and one number per state by its lower-case name."""
        return {"submitted": self._submitted} | {state.name.lower(): self._counts[state] for state in State}

    def reasons(self) -> dict[str, dict[str, int]]:
        """Counts by state and reason, for the states that carry one."""
        out: dict[str, dict[str, int]] = {state.name.lower(): {} for state in State if state in WITH_REASON}
        for (state, reason), number in zip(self._reasons, self._reason_counts, strict=True):
            out[state.name.lower()][reason] = number
        return out

    def check(self) -> None:
        """Raise RunError with the numbers unless the conservation law holds. Constant time."""
        explained = sum(self._reason_counts)
        final = sum(self._counts[state] for state in WITH_REASON)
        if sum(self._counts) != self._submitted or min(self._counts) < 0 or explained != final:
            raise RunError(
                f"the ledger does not balance: {self.counts()}, {explained} reasons for {final} trajectories"
            )

    def audit(self) -> None:
        """`check`, with every state and reason counted anew from the columns: linear time."""
        self.check()
        states = self._states[: self._submitted]
        counted = np.bincount(states, minlength=len(State)).tolist()
        if counted != self._counts:
            raise RunError(f"the ledger's counts are {self._counts}, but its column holds {counted}")
        codes = self._reason_codes[: self._submitted][np.isin(states, [int(state) for state in WITH_REASON])]
        reasons = np.bincount(codes, minlength=len(self._reasons)).tolist()
        if reasons != self._reason_counts:
            raise RunError(f"the ledger's reasons are {self._reason_counts}, but its column holds {reasons}")

    def state_dict(self) -> dict[str, Any]:
        """Plain data: columns as numpy arrays of the submitted length."""
        return {
            "incarnation": self.incarnation,
            "states": self._states[: self._submitted].copy(),
            "reason_codes": self._reason_codes[: self._submitted].copy(),
            "reasons": [(int(state), reason) for state, reason in self._reasons],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the ledger of a checkpoint, as the next incarnation. Call `rollback` once the rest is loaded.

        The counts are made from the columns, so that a loaded ledger is an audited one.
        """
        states = np.asarray(state["states"], dtype=np.int8)
        codes = np.asarray(state["reason_codes"], dtype=np.int16)
        self.incarnation = int(state["incarnation"]) + 1
        self._submitted = states.size
        spare = np.zeros(1024, dtype=np.int8)
        self._states = np.concatenate([states, spare])
        self._reason_codes = np.concatenate([codes, spare.astype(np.int16)])
        self._reasons = [(State(value), str(reason)) for value, reason in state["reasons"]]
        self._counts = np.bincount(states, minlength=len(State)).tolist()
        explained = codes[np.isin(states, [int(final) for final in WITH_REASON])]
        self._reason_counts = np.bincount(explained, minlength=len(self._reasons)).tolist()
        self.audit()

    def rollback(self, states: Collection[State] = (State.RUNNING, State.DRAWN)) -> NDArray[np.int64]:
        """Cancel what was in flight at the checkpoint; returns the ids, whose tasks were never tried to their end.

        A checkpoint taken after a step holds no drawn trajectory. Name `GROUPING` too where the members of unfinished
        groups were not saved.
        """
        ids = np.concatenate([self.ids(state) for state in states])
        self.move_many(ids, State.CANCELLED, ROLLBACK)
        return np.sort(ids)

    def _known(self, trajectory_id: int) -> int:
        if not 0 <= trajectory_id < self._submitted:
            raise RunError(f"trajectory {trajectory_id} is unknown: {self._submitted} were submitted")
        return trajectory_id

    def _reason_code(self, state: State, reason: str) -> int:
        """The code of a final state's reason; 0 where a state carries none."""
        if (state in WITH_REASON) != bool(reason):
            wants = "needs a reason" if state in WITH_REASON else f"takes no reason, got {reason!r}"
            raise RunError(f"a move to {state.name} {wants}")
        if not reason:
            return 0
        if (state, reason) not in self._reasons:
            self._reasons.append((state, reason))
            self._reason_counts.append(0)
        return self._reasons.index((state, reason))

    def _count(self, source: State, target: State, code: int, number: int) -> None:
        self._counts[source] -= number
        self._counts[target] += number
        if target in WITH_REASON:
            self._reason_counts[code] += number
