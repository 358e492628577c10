import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pace_agent.pool.staleness import (
    STALENESS_KINDS,
    Spans,
    effective_staleness,
    generation_staleness,
    waiting_staleness,
)
from pace_agent.types import Turn, VersionSpan

# No example has a deadline: a busy machine is no failure.
examples = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def turn(*runs: tuple[int, int]) -> Turn:
    spans, position = [], 0
    for version, count in runs:
        spans.append(VersionSpan(version, position, position + count))
        position += count
    return Turn((1,), (2,) * position, (0.0,) * position, tuple(spans))


def test_each_kind_of_generation_staleness() -> None:
    # Turn 0: 1 token of version 3, 3 of version 5. Turn 1: 4 of version 6. Completed at 7.
    spans = Spans.of([turn((3, 1), (5, 3)), turn((6, 4))])
    assert spans == Spans((3, 5, 6), (1, 3, 4), (0, 0, 1))
    assert generation_staleness(spans, 7, "tokens") == (4 + 3 * 2 + 4 * 1) / 8
    assert generation_staleness(spans, 7, "turns") == ((4 + 3 * 2) / 4 + 1) / 2
    assert generation_staleness(spans, 7, "span") == 4
    assert generation_staleness(spans, 7, "none") == 0


def test_a_rollout_interrupted_near_its_start_is_nearly_fresh() -> None:
    spans = Spans((0, 9), (1, 99), (0, 0))
    assert generation_staleness(spans, 10, "span") == 10
    assert generation_staleness(spans, 10) == pytest.approx(1.09)


def test_a_turn_without_sampled_tokens_has_no_say_in_the_turn_mean() -> None:
    spans = Spans.of([turn((4, 2)), turn(), turn((2, 1))])
    assert generation_staleness(spans, 4, "turns") == 1.0


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[Spans, int]:
    steps = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.booleans()), min_size=1, max_size=8))
    versions, turns = np.cumsum([rise for rise, _, _ in steps]), np.cumsum([new for _, _, new in steps])
    counts = tuple(count for _, count, _ in steps)
    spans = Spans(tuple(versions.tolist()), counts, tuple(turns.tolist()))
    return spans, int(versions[-1]) + draw(st.integers(0, 3))


@examples
@given(trajectories(), st.data())
def test_the_score_does_not_depend_on_how_spans_are_split(trajectory: tuple[Spans, int], data: st.DataObject) -> None:
    spans, completed = trajectory
    versions, counts, turns = [], [], []
    for version, count, in_turn in zip(spans.versions, spans.counts, spans.turns, strict=True):
        cuts = sorted(data.draw(st.sets(st.integers(1, max(count - 1, 1)), max_size=3)) - {count})
        for start, end in zip([0, *cuts], [*cuts, count], strict=True):
            versions.append(version)
            counts.append(end - start)
            turns.append(in_turn)
    split = Spans(tuple(versions), tuple(counts), tuple(turns))
    for kind in STALENESS_KINDS:
        assert generation_staleness(split, completed, kind) == generation_staleness(spans, completed, kind)


@examples
@given(trajectories(), st.integers(0, 5))
def test_with_lambda_1_the_score_is_the_lag_of_the_mean_token(trajectory: tuple[Spans, int], wait: int) -> None:
    spans, completed = trajectory
    tokens = np.repeat(spans.versions, spans.counts)
    generation = generation_staleness(spans, completed)
    score = effective_staleness(completed + wait, completed, generation)
    assert generation == pytest.approx(float(np.mean(completed - tokens)))
    assert float(score) == pytest.approx(completed + wait - tokens.mean())


def test_effective_staleness_weighs_both_parts_elementwise() -> None:
    completed, generation = np.array([3, 5, 5]), np.array([2.0, 0.5, 0.0])
    assert waiting_staleness(5, completed).tolist() == [2, 0, 0]
    assert effective_staleness(5, completed, generation, lam=2).tolist() == [6, 1, 0]
    assert effective_staleness(5, completed, generation, lam=0).tolist() == [2, 0, 0]


def test_impossible_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="version 4 in a rollout completed at 3"):
        generation_staleness(Spans((4,), (1,), (0,)), 3)
    with pytest.raises(ValueError, match="ahead of the published version 2"):
        waiting_staleness(2, np.array([2, 3]))


@pytest.mark.parametrize("spans", [((), (), ()), ((1,), (0,), (0,)), ((1, 2), (3,), (0,))])
def test_what_holds_no_token_is_never_scored(spans: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"at least one sampled token|versions"):
        Spans(*spans)
