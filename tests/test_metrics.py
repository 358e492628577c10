import json
import math
import random
from statistics import fmean

import pytest

from pace_agent.evaluation.metrics import EvalSample, estimate, format_table, pass_at_k, summarise, t_quantile
from pace_agent.types import Message, StopReason, Task, Trajectory

DONE, CUT, BROKEN = StopReason.TERMINATED, StopReason.TRUNCATED_TOKENS, StopReason.FAILED_ENGINE


def sample(place: int, number: int, reward: float | None, stop: StopReason = DONE) -> EvalSample:
    return EvalSample(
        place=place, task_id=f"task-{place}", number=number, seed=place * 100 + number, stop=stop, reward=reward
    )


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [(4, 1, 2, 0.5), (8, 2, 4, 0.7857142857), (4, 0, 4, 0.0), (4, 4, 1, 1.0), (5, 3, 4, 1.0), (10, 3, 1, 0.3)],
)
def test_pass_at_k(n: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(expected)


@pytest.mark.parametrize("correct", [0, 1, 2])
def test_pass_at_k_beyond_n_is_not_reported(correct: int) -> None:
    assert pass_at_k(2, correct, 5) is None


def test_pass_at_k_is_the_mean_over_all_choices() -> None:
    rng = random.Random(0)
    outcomes = [True] * 3 + [False] * 6
    drawn = [any(rng.sample(outcomes, 4)) for _ in range(20_000)]
    assert pass_at_k(9, 3, 4) == pytest.approx(fmean(drawn), abs=0.01)


@pytest.mark.parametrize(("n", "correct", "k"), [(2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_pass_at_k_refuses_nonsense(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="correct"):
        pass_at_k(n, correct, k)


@pytest.mark.parametrize(("degrees", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (29, 2.045)])
def test_t_quantile(degrees: int, expected: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(expected, rel=0.01)


def test_interval_is_over_tasks_not_rollouts() -> None:
    """Repeating every rollout of a task adds no information about other tasks."""
    once = estimate([[0.0], [1.0], [1.0], [0.0], [1.0]])
    often = estimate([[0.0] * 10, [1.0] * 10, [1.0] * 10, [0.0] * 10, [1.0] * 10])
    assert once == often
    assert once is not None
    assert once.mean == pytest.approx(0.6)


def test_interval_covers_as_often_as_it_says() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(600):
        tasks = [
            [float(rng.random() < level) for _ in range(4)] for level in (rng.betavariate(2, 2) for _ in range(25))
        ]
        found = estimate(tasks)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0.5 <= found.high
    assert 0.92 <= hits / 600 <= 0.98


@pytest.mark.parametrize("values", [[[1.0]], [[1.0], [1.0], [1.0]]])
def test_no_interval_without_a_spread(values: list[list[float]]) -> None:
    found = estimate(values)
    assert found is not None
    assert (found.mean, found.low, found.high) == (1.0, None, None)


def test_nothing_scored_is_not_zero() -> None:
    assert estimate([[], []]) is None
    result = summarise([sample(0, 0, None, BROKEN)], env_id="e", n=1)
    assert result.reward is None
    assert result.truncated_share == 0.0


def test_errors_are_counted_apart_with_both_means() -> None:
    samples = [sample(place, 0, 1.0) for place in range(8)] + [sample(8, 0, 0.0), sample(9, 0, None, BROKEN)]
    result = summarise(samples, env_id="e", n=1)
    assert result.reward is not None
    assert result.reward.mean == pytest.approx(8 / 9)
    assert result.reward_errors_as_zero is not None
    assert result.reward_errors_as_zero.mean == pytest.approx(0.8)
    assert (result.tasks, result.samples, result.errors) == (10, 10, 1)
    assert result.errors_by_reason == {"failed.engine": 1}
    assert result.pass_at_k == {1: pytest.approx(0.8)}


def test_truncated_rollouts_keep_their_reward_and_are_told_apart() -> None:
    samples = [sample(0, 0, 1.0), sample(1, 0, 0.0), sample(2, 0, 0.0, CUT), sample(3, 0, 0.0, CUT)]
    result = summarise(samples, env_id="e", n=1)
    assert result.truncated_share == 0.5
    assert result.reward is not None
    assert result.reward.mean == 0.25
    assert result.reward_finished is not None
    assert result.reward_finished.mean == 0.5


def test_a_grader_without_a_reward_is_an_error() -> None:
    result = summarise([sample(0, 0, 1.0), sample(0, 1, None)], env_id="e", n=2)
    assert result.errors_by_reason == {"failed.grader": 1}


def test_a_failed_rollout_keeps_the_label() -> None:
    """pass@4 of four rollouts stays pass@4 when one of them failed; it counts as not passed."""
    samples = [sample(0, 0, 1.0), sample(0, 1, 0.0), sample(0, 2, 0.0), sample(0, 3, None, BROKEN)]
    result = summarise(samples, env_id="e", n=4)
    assert result.pass_at_k == {1: 0.25, 2: 0.5, 4: 1.0}
    assert (result.n, result.samples) == (4, 4)


def test_missing_rollouts_leave_pass_at_k_open() -> None:
    result = summarise([sample(0, 0, 1.0), sample(1, 0, 1.0), sample(1, 1, 0.0)], env_id="e", n=2)
    assert result.pass_at_k == {1: 0.75, 2: None}


@pytest.mark.parametrize("numbers", [(0, 0), (0, 1, 2)])
def test_a_rollout_is_counted_once(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="task 5"):
        summarise([sample(5, number, 1.0) for number in numbers], env_id="e", n=2)


def test_two_tasks_with_the_same_content_are_two_rows() -> None:
    twins = [EvalSample(place=place, task_id="same", number=0, seed=place, stop=DONE, reward=1.0) for place in (0, 1)]
    assert summarise(twins, env_id="e", n=1).tasks == 2


def test_a_sample_of_a_trajectory() -> None:
    trajectory = Trajectory(
        id=1,
        group_id=7,
        task=Task(id="t", prompt="?"),
        env_id="e",
        attempt=2,
        turns=(),
        messages=(Message("user", "?"),),
        stop=BROKEN,
        reward=None,
        completed_version=0,
        error="gone",
    )
    found = EvalSample.of(trajectory, number=2, seed=11)
    assert (found.place, found.task_id, found.number, found.seed, found.error) == (7, "t", 2, 11, "gone")
    assert not found.scored


def test_table_and_json() -> None:
    samples = [
        sample(place, number, float(place % 2), DONE if number else CUT) for place in range(4) for number in range(2)
    ]
    samples[0] = sample(0, 0, None, StopReason.FAILED_SANDBOX)
    result = summarise(samples, env_id="pace/Shop-v0", n=2)
    table = format_table(result)
    assert "4 tasks x 2 rollouts" in table
    assert "failed.sandbox 1" in table
    assert "3 of 7" in table
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["pass_at_k"] == {"1": 0.5, "2": 0.5}
    assert data["error_policy"] == "excluded"
    assert math.isclose(data["truncated_share"], 3 / 7)
