import pickle
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pace_agent.errors import RunError
from pace_agent.ledger import MOVES, WITH_REASON, Ledger, State

# No example has a deadline: a busy machine is no failure.
examples = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

PATHS = {
    State.RUNNING: (),
    State.GROUPING: (State.GROUPING,),
    State.POOLED: (State.GROUPING, State.POOLED),
    State.DRAWN: (State.GROUPING, State.POOLED, State.DRAWN),
    State.TRAINED: (State.GROUPING, State.POOLED, State.DRAWN, State.TRAINED),
    State.REJECTED: (State.GROUPING, State.POOLED, State.REJECTED),
    State.FAILED: (State.FAILED,),
    State.CANCELLED: (State.CANCELLED,),
}


def reason_for(state: State) -> str:
    return "because" if state in WITH_REASON else ""


def with_one_in(state: State) -> tuple[Ledger, int]:
    ledger = Ledger()
    new = ledger.submit()
    for step in PATHS[state]:
        ledger.move(new, step, reason_for(step))
    return ledger, new


@pytest.mark.parametrize("source", list(State))
@pytest.mark.parametrize("target", list(State))
def test_only_the_moves_of_the_table_are_allowed(source: State, target: State) -> None:
    for many in (False, True):
        ledger, new = with_one_in(source)
        before = ledger.counts()
        move = partial(ledger.move_many, [new]) if many else partial(ledger.move, new)
        if target in MOVES[source]:
            move(target, reason_for(target))
            assert ledger.state(new) is target
        else:
            with pytest.raises(RunError, match=source.name):
                move(target, reason_for(target))
            assert ledger.counts() == before
        ledger.audit()


def test_counts_name_every_state_and_sum_to_what_was_submitted() -> None:
    ledger = Ledger()
    ids = [ledger.submit() for _ in range(3000)]
    assert ids == list(range(3000))
    ledger.move_many(ids[:2000], State.GROUPING)
    ledger.move_many(np.arange(1500), State.POOLED)
    ledger.move_many(ids[:100], State.REJECTED, "stale")
    ledger.move_many(ids[1500:1600], State.REJECTED, "no_signal")
    ledger.move(2999, State.FAILED, "failed.sandbox")
    counts = ledger.counts()
    assert counts == {
        "submitted": 3000,
        "running": 999,
        "grouping": 400,
        "pooled": 1400,
        "drawn": 0,
        "trained": 0,
        "rejected": 200,
        "failed": 1,
        "cancelled": 0,
    }
    assert ledger.reasons()["rejected"] == {"stale": 100, "no_signal": 100}
    assert ledger.count(State.REJECTED, "no_signal") == 100
    assert ledger.count(State.REJECTED, "unheard of") == 0
    assert ledger.reason(1555) == "no_signal"
    assert ledger.reason(1700) == ""
    assert ledger.ids(State.FAILED).tolist() == [2999]
    ledger.audit()


def test_a_move_of_many_is_all_or_nothing() -> None:
    ledger = Ledger()
    for _ in range(4):
        ledger.submit()
    ledger.move(3, State.GROUPING)
    for ids in ([0, 3], [0, 4], [0, -1], [0, 1, 0]):
        with pytest.raises(RunError):
            ledger.move_many(ids, State.GROUPING)
        assert ledger.count(State.RUNNING) == 3
    ledger.move_many([], State.GROUPING)
    ledger.audit()


def test_an_end_needs_a_reason_and_nothing_else_takes_one() -> None:
    ledger = Ledger()
    new = ledger.submit()
    with pytest.raises(RunError, match="needs a reason"):
        ledger.move(new, State.FAILED)
    with pytest.raises(RunError, match="takes no reason"):
        ledger.move(new, State.GROUPING, "why")
    with pytest.raises(RunError, match="unknown"):
        ledger.move(7, State.GROUPING)
    assert ledger.state(new) is State.RUNNING


def test_a_lost_trajectory_is_noticed() -> None:
    ledger, _ = with_one_in(State.POOLED)
    ledger._counts[State.POOLED] = 0
    with pytest.raises(RunError, match="does not balance"):
        ledger.check()
    ledger, new = with_one_in(State.POOLED)
    ledger._states[new] = State.TRAINED
    ledger.check()
    with pytest.raises(RunError, match="column holds"):
        ledger.audit()


def test_a_rolled_back_run_goes_on_under_the_next_incarnation_with_fresh_ids() -> None:
    ledger = Ledger()
    for _ in range(5):
        ledger.submit()
    ledger.move_many([1, 2, 3, 4], State.GROUPING)
    ledger.move_many([2, 3, 4], State.POOLED)
    ledger.move_many([3, 4], State.DRAWN)
    ledger.move(4, State.TRAINED)
    saved = pickle.loads(pickle.dumps(ledger.state_dict()))
    lost = ledger.submit()
    ledger.move_many([3], State.TRAINED)

    resumed = Ledger()
    resumed.load_state_dict(saved)
    assert resumed.incarnation == 1
    assert resumed.rollback().tolist() == [0, 3]
    assert resumed.reason(0) == resumed.reason(3) == "rollback"
    assert resumed.rollback([State.GROUPING]).tolist() == [1]
    assert (resumed.count(State.POOLED), resumed.count(State.TRAINED), resumed.count(State.CANCELLED)) == (1, 1, 3)
    assert resumed.submit() == lost
    resumed.audit()


@examples
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(State))), max_size=60))
def test_the_law_holds_whatever_is_tried(attempts: list[tuple[int, State]]) -> None:
    ledger = Ledger()
    for _ in range(8):
        ledger.submit()
    for trajectory, state in attempts:
        known = trajectory < 8
        allowed = known and state in MOVES[ledger.state(trajectory)]
        if allowed:
            ledger.move(trajectory, state, reason_for(state))
        else:
            with pytest.raises(RunError):
                ledger.move(trajectory, state, reason_for(state))
        ledger.check()
    ledger.audit()
    loaded = Ledger()
    loaded.load_state_dict(ledger.state_dict())
    assert loaded.counts() == ledger.counts()
    assert loaded.reasons() == {
        state: {reason: n for reason, n in reasons.items() if n} for state, reasons in ledger.reasons().items()
    }
