import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pace_agent.pool.budget import Budget, bin_counts, length_edges, rejection_budget, resample_carries, split_budget
from pace_agent.pool.choice import FEW, MANY, RUN, STRIDE, lowest, lowest_per_bin

# No example has a deadline: a busy machine is no failure.
examples = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("n", "kwargs", "expected"),
    [
        (100, {}, Budget(36, 36, 0.0)),
        (64, {}, Budget(0, 0, 0.0)),
        (63, {"carry": 0.9}, Budget(0, 0, 0.0)),
        (70, {"beta": 0.5}, Budget(6, 3, 0.0)),
        (71, {"beta": 0.5}, Budget(7, 3, 0.5)),
        (71, {"beta": 0.5, "carry": 0.5}, Budget(7, 4, 0.0)),
        (100, {"cap": 0.1}, Budget(36, 10, 0.0)),
        (100, {"beta": 2.0}, Budget(36, 36, 0.0)),
        (300, {"target": 200}, Budget(100, 100, 0.0)),
    ],
)
def test_the_budget_follows_its_formula(n: int, kwargs: dict[str, float], expected: Budget) -> None:
    target = int(kwargs.pop("target", 64))
    assert rejection_budget(n, 64, target, **kwargs) == expected


def test_a_tenth_of_the_excess_is_kept_to_over_many_draws() -> None:
    carry, rejected = 0.0, 0
    for _ in range(1000):
        budget = rejection_budget(64 + 3, 64, 64, beta=0.1, carry=carry)
        carry, rejected = budget.carry, rejected + budget.budget
        assert 0 <= carry < 1
    assert rejected == 300


@examples
@given(
    st.integers(0, 500), st.integers(1, 64), st.integers(0, 200), st.floats(0, 3), st.floats(0, 1), st.floats(0, 0.999)
)
def test_a_draw_that_could_fill_still_fills(n: int, m: int, beyond: int, beta: float, cap: float, carry: float) -> None:
    budget = rejection_budget(n, m, m + beyond, beta, cap, carry)
    assert 0 <= budget.budget <= max(0, n - m)
    assert budget.budget <= cap * n + 1e-6
    assert 0 <= budget.carry < 1
    assert budget.budget == 0 or budget.excess > 0


def test_edges_are_quantiles_with_equal_ones_merged() -> None:
    assert length_edges(np.arange(100), 1000, 4).tolist() == [25, 50, 75]
    assert length_edges(np.arange(100), 11, 16).tolist() == [50]
    assert length_edges(np.arange(100), 7, 16).tolist() == []
    assert length_edges(np.full(100, 30), 1000, 16).tolist() == []
    assert length_edges(np.array([1, 5, 5, 5, 5, 5, 5, 9]), 1000, 4).tolist() == [5]
    assert length_edges(np.empty(0, dtype=np.int64), 1000, 16).tolist() == []


@examples
@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.data())
def test_shares_sum_to_the_budget_and_fit(counts: list[int], data: st.DataObject) -> None:
    room = np.array([data.draw(st.integers(0, count)) for count in counts])
    budget = data.draw(st.integers(0, sum(counts)))
    carries = np.array(data.draw(st.lists(st.floats(-1, 1), min_size=len(counts), max_size=len(counts))))
    shares, carried = split_budget(budget, np.array(counts), carries, room)
    assert shares.sum() == min(budget, room.sum())
    assert (shares >= 0).all()
    assert (shares <= room).all()
    assert (np.abs(carried) <= 1).all()


@examples
@given(st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any), st.data())
def test_a_first_split_is_proportional_to_less_than_one_unit(counts: list[int], data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, sum(counts)))
    shares, _ = split_budget(budget, np.array(counts), np.zeros(len(counts)))
    assert (np.abs(shares - budget * np.array(counts) / sum(counts)) < 1).all()


@examples
@given(st.integers(2, 16), st.integers(0, 2**32 - 1))
def test_carried_fractions_keep_every_bin_near_its_part_over_many_draws(bins: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    carries, given_out, owed = np.zeros(bins), np.zeros(bins), np.zeros(bins)
    for _ in range(60):
        counts = rng.integers(1, 12, bins)
        budget = int(rng.integers(1, max(2, counts.sum() // 2)))
        shares, carries = split_budget(budget, counts, carries)
        given_out += shares
        owed += budget * counts / counts.sum()
    assert (np.abs(given_out - owed) < 2).all()


def test_what_a_full_bin_can_not_take_goes_to_the_others() -> None:
    counts, room = np.array([10_000, 10_000, 20_000]), np.array([0, 10_000, 20_000])
    shares, _ = split_budget(20_000, counts, np.zeros(3), room)
    assert shares.tolist() == [0, 6667, 13333]


def test_carries_move_to_another_number_of_bins_with_their_sum() -> None:
    carries = np.array([0.5, -0.25, 0.0, -0.25])
    assert resample_carries(carries, 2).tolist() == [0.25, -0.25]
    assert resample_carries(carries, 7).sum() == pytest.approx(0)
    assert resample_carries(np.zeros(0), 3).tolist() == [0, 0, 0]


def in_order(values: NDArray[np.float64], rows: NDArray[np.int64], k: int) -> list[int]:
    """The k lowest of `rows` by a plain stable sort."""
    return sorted(rows[np.argsort(values[rows], kind="stable")[:k]].tolist())


@examples
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25, 7.0]) | st.floats(-1e6, 1e6), min_size=1, max_size=60), st.data())
def test_the_lowest_are_exact_with_ties_to_the_earlier(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(values)))
    array = np.array(values)
    assert lowest(array, k).tolist() == in_order(array, np.arange(array.size), k)


@examples
@given(
    st.integers(1, FEW) | st.integers(FEW + 1, FEW + 400) | st.integers(MANY, MANY + 2000),
    st.integers(1, 20),
    st.sampled_from([1, 4, 1_000_000]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([3, 60, 100_000]),
    st.integers(0, 2**32 - 1),
)
def test_the_lowest_of_every_bin_are_exact(
    n: int, n_bins: int, ties: int, share_spared: float, longest: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, n)
    # Longer is lower, by much or not at all, so that the bins' lowest lie far apart or together.
    values = np.floor((rng.normal(50, 3, n) - rng.choice([0, 100]) * lengths / longest) * ties) / ties
    spared = rng.random(n) < share_spared
    edges = length_edges(lengths, n, n_bins)
    of_bin = np.searchsorted(edges, lengths, side="right")
    assert bin_counts(np.bincount(lengths), edges).tolist() == np.bincount(of_bin, minlength=edges.size + 1).tolist()
    members = [np.flatnonzero((of_bin == b) & ~spared) for b in range(edges.size + 1)]
    shares = np.array([rng.integers(0, rows.size // rng.choice([1, 20]) + 1) for rows in members])
    expected = [k for rows, share in zip(members, shares, strict=True) for k in in_order(values, rows, share)]
    assert lowest_per_bin(values, lengths, edges, shares, spared).tolist() == sorted(expected)


def test_a_sample_that_misleads_changes_nothing() -> None:
    n = 4 * MANY
    values = np.where(np.arange(n) % STRIDE < RUN, -1.0, np.arange(n))  # the sample sees only the lowest
    lengths, edges = np.ones(n, dtype=np.int64), np.empty(0, dtype=np.int64)
    chosen = lowest_per_bin(values, lengths, edges, np.array([n // 2]), np.zeros(n, dtype=np.bool_))
    assert chosen.tolist() == in_order(values, np.arange(n), n // 2)
