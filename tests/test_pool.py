import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_world import Rollout, World

from pace_agent.errors import RunError, UserError
from pace_agent.ledger import Ledger, State
from pace_agent.pool import Draw, Entry, PacePool, PoolOptions, Spans
from pace_agent.pool.options import PolicyName

# No example has a deadline: a busy machine is no failure.
examples = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])

POLICIES: tuple[PolicyName, ...] = (
    "sync",
    "unfiltered",
    "max_staleness",
    "bounded_admission",
    "drop_oldest",
    "pace",
)


def make(**options: Any) -> PacePool[str]:
    return PacePool(PoolOptions(**options), Ledger())


def put(pool: PacePool[str], *members: Sequence[tuple[int, int]], completed: int, last: bool = False) -> list[int]:
    """Add complete trajectories, each given as its (version, tokens) runs, in one call; their ids."""
    entries = []
    for runs in members:
        new = pool.ledger.submit()
        pool.ledger.move(new, State.GROUPING)
        spans = Spans(tuple(v for v, _ in runs), tuple(n for _, n in runs), (0,) * len(runs))
        entries.append(Entry(new, f"payload {new}", spans, completed, last))
    pool.add(entries)
    return [entry.id for entry in entries]


def put_plain(pool: PacePool[str], number: int, version: int = 0) -> list[int]:
    return put(pool, *[[(version, 10)]] * number, completed=version)


def drawn(pool: PacePool[str], version: int) -> Draw[str]:
    draw = pool.draw(version)
    assert draw is not None
    return draw


# One draw


def test_less_than_a_batch_draws_nothing() -> None:
    pool = make(batch_size=4)
    put_plain(pool, 3)
    assert not pool.ready()
    assert pool.draw(0) is None
    assert len(pool) == 3


def test_seven_are_ready_four_are_needed_three_remain() -> None:
    pool = make(policy="unfiltered", batch_size=4)
    ids = put_plain(pool, 7)
    draw = drawn(pool, 0)
    assert draw.ids.tolist() == ids[:4]
    assert draw.payloads == tuple(f"payload {k}" for k in ids[:4])
    assert (len(pool), pool.ledger.count(State.POOLED), draw.rejected_ids.size) == (3, 3, 0)


def test_pace_rejects_the_highest_effective_staleness_and_draws_the_oldest() -> None:
    pool = make(batch_size=2, fairness="none")
    (interrupted,) = put(pool, [(0, 1), (4, 9)], completed=4)  # S = 5 - 3.6
    (stale,) = put(pool, [(1, 5)], completed=4)  # S = 4
    (stalest,) = put(pool, [(0, 5)], completed=1)  # S = 5
    (fresh,) = put(pool, [(5, 5)], completed=5)
    draw = drawn(pool, 5)
    assert draw.rejected_ids.tolist() == [stale, stalest]
    assert draw.rejected_payloads == (f"payload {stale}", f"payload {stalest}")
    assert draw.ids.tolist() == [interrupted, fresh]
    assert pool.ledger.reasons()["rejected"] == {"stale": 2}


def test_another_lambda_or_kind_of_staleness_ranks_another_way() -> None:
    for options, rejected in (({}, 1), ({"lam": 0.0}, 0), ({"staleness": "none"}, 0), ({"staleness": "span"}, 1)):
        pool = make(batch_size=1, fairness="none", **options)
        put(pool, [(3, 5)], completed=3)  # W = 2, G = 0
        put(pool, [(0, 1), (1, 9)], completed=4)  # W = 1, G = 3.1, span 4
        assert drawn(pool, 5).rejected_ids.tolist() == [rejected]


def test_an_excess_is_rejected_only_beyond_the_target() -> None:
    pool = make(batch_size=2, target=5)
    put_plain(pool, 5)
    assert drawn(pool, 1).rejected_ids.size == 0
    put_plain(pool, 4, version=1)
    draw = drawn(pool, 1)
    assert draw.rejected_ids.size == 2
    assert draw.metrics["pool/excess"] == draw.metrics["pool/budget"] == draw.metrics["pool/rejected_total"] == 2
    assert (draw.metrics["pool/occupancy"], draw.metrics["pool/target"]) == (7, 5)


def test_freshest_draws_the_lowest_scores_but_last_attempts_first() -> None:
    pool = make(batch_size=2, target=10, order="freshest")
    old, older = put_plain(pool, 2)
    (newest,) = put_plain(pool, 1, version=3)
    (last,) = put(pool, [(0, 5)], completed=0, last=True)
    assert drawn(pool, 3).ids.tolist() == [newest, last]
    assert drawn(pool, 3).ids.tolist() == [old, older]


def test_a_last_attempt_is_never_rejected() -> None:
    pool = make(batch_size=1)
    put(pool, *[[(0, 5)]] * 3, completed=0, last=True)
    (fresh,) = put_plain(pool, 1, version=9)
    assert drawn(pool, 9).rejected_ids.tolist() == [fresh]
    assert drawn(pool, 9).rejected_ids.size == 0
    assert len(pool) == 1


def test_max_staleness_keeps_the_limit_and_rejects_beyond_it() -> None:
    # Started and finished at version 0, limit 2: used at 2, rejected at 3.
    for version, kept in ((2, True), (3, False)):
        pool = make(policy="max_staleness", batch_size=2, max_staleness=2)
        put_plain(pool, 2)
        draw = drawn(pool, version)
        assert draw.filled is kept
        assert (draw.ids.size, draw.rejected_ids.size) == ((2, 0) if kept else (0, 2))
        assert len(pool) == 0


def test_max_staleness_goes_by_the_oldest_token_and_keeps_what_is_fresh() -> None:
    pool = make(policy="max_staleness", batch_size=2, max_staleness=2)
    put(pool, [(0, 1), (3, 99)], completed=3)
    (fresh,) = put_plain(pool, 1, version=3)
    assert not drawn(pool, 3).filled
    assert pool.ledger.ids(State.POOLED).tolist() == [fresh]
    assert pool.admit()


def test_drop_oldest_keeps_the_newest() -> None:
    pool = make(policy="drop_oldest", batch_size=2, target=3)
    ids = put_plain(pool, 5)
    draw = drawn(pool, 0)
    assert (draw.rejected_ids.tolist(), draw.ids.tolist()) == (ids[:2], ids[2:4])


def test_groups_are_ranked_rejected_and_drawn_whole_by_their_tokens() -> None:
    pool = make(batch_size=1, unit="group", group_size=2, fairness="none")
    light = put(pool, [(0, 1)], [(8, 99)], completed=8)  # mean version 7.92
    heavy = put(pool, [(0, 99)], [(8, 1)], completed=8)  # mean version 0.08
    middle = put(pool, [(4, 10)], [(4, 10)], [(4, 10)], completed=8)
    assert pool.units == 3
    draw = drawn(pool, 8)
    assert draw.rejected_ids.tolist() == heavy + middle
    assert draw.ids.tolist() == light
    assert draw.metrics["pool/budget"] == 2
    assert draw.metrics["pool/rejected_total"] == 5


def test_a_full_pool_stops_new_rollouts_but_takes_what_is_in_flight() -> None:
    for policy in POLICIES:
        pool = make(policy=policy, batch_size=2, capacity=4)
        put_plain(pool, 4)
        assert pool.admit() is (policy == "unfiltered")
        put_plain(pool, 3)
        assert len(pool) == 7


# Versions and mistakes


def test_a_version_behind_a_completion_is_refused_before_anything_moves() -> None:
    pool = make(batch_size=1)
    put_plain(pool, 1, version=4)
    with pytest.raises(ValueError, match="completed at 4, ahead of the published version 3"):
        pool.draw(3)
    assert drawn(pool, 4).ids.size == 1


def test_only_complete_trajectories_are_taken_and_only_once() -> None:
    pool = make(batch_size=1)
    running = pool.ledger.submit()
    entry = Entry(running, "x", Spans((0,), (1,), (0,)), 0)
    with pytest.raises(RunError, match="RUNNING"):
        pool.add([entry])
    pool.ledger.move(running, State.GROUPING)
    pool.add([entry])
    with pytest.raises(RunError, match="POOLED"):
        pool.add([entry])
    assert len(pool) == 1
    pool.check()


def test_a_pool_and_a_ledger_that_disagree_stop_the_run() -> None:
    pool = make(batch_size=1)
    ids = put_plain(pool, 2)
    pool.ledger.move(ids[1], State.CANCELLED, "elsewhere")
    with pytest.raises(RunError, match="pooled"):
        pool.draw(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "paec"}, "pool.policy can't be 'paec'. Did you mean 'pace'?"),
        ({"order": "newest"}, "pool.order"),
        ({"batch_size": 0}, "pool.batch_size must be at least 1"),
        ({"batch_size": 8, "target": 4}, "pool.target must be at least 8 (pool.batch_size), got 4"),
        ({"batch_size": 8, "capacity": 4}, "pool.capacity must be at least 8"),
        ({"cap": 1.5}, "pool.cap"),
        ({"beta": float("nan")}, "pool.beta"),
    ],
)
def test_options_out_of_range_name_their_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        PoolOptions(**options)
    assert message in str(error.value)


# Admission


def test_a_run_taken_up_at_version_100_admits_no_flood() -> None:
    pool = make(policy="bounded_admission", batch_size=4, eta=1)
    started = 0
    while pool.admit():
        pool.ledger.submit()
        started += 1
    assert started == 8
    trained = make(policy="bounded_admission", batch_size=4, eta=1)
    for version in range(100):
        put_plain(trained, 4, version)
        trained.ledger.move_many(drawn(trained, version).ids, State.TRAINED)
    started = 0
    while trained.admit():
        trained.ledger.submit()
        started += 1
    assert started == 8


def test_sync_starts_the_next_batch_when_the_step_has_ended() -> None:
    pool = make(policy="sync", batch_size=4, group_size=2)
    put_plain(pool, 4)
    assert not pool.admit(2)
    batch = drawn(pool, 0)
    assert not pool.admit(2)
    pool.ledger.move_many(batch.ids, State.TRAINED)
    assert pool.admit(2)


def test_lost_rollouts_give_their_capacity_back() -> None:
    for policy in ("sync", "bounded_admission"):
        pool = make(policy=policy, batch_size=2, eta=0)
        a, b = pool.ledger.submit(), pool.ledger.submit()
        assert not pool.admit()
        pool.ledger.move(a, State.FAILED, "failed.engine")
        assert pool.admit()
        pool.ledger.submit()
        pool.ledger.move(b, State.GROUPING)
        assert not pool.admit()
        pool.ledger.move(b, State.REJECTED, "no_signal")
        assert pool.admit()


# Whole runs in the small world


def mixed(task: int, rng: random.Random) -> Rollout:
    """Lengths over two orders of magnitude, some stalls, failures, and tasks without signal."""
    length = max(1, round(rng.lognormvariate(3.0, 1.0)))
    stall = rng.expovariate(1.0) if rng.random() < 0.3 else 0.0
    return Rollout(length, length / 30, stall, rng.random(), rng.random() < 0.1, task % 5 != 0)


def healthy(task: int, rng: random.Random) -> Rollout:
    length = max(1, round(rng.lognormvariate(3.0, 1.0)))
    return Rollout(length, length / 30, rng.expovariate(1.0) if rng.random() < 0.3 else 0.0, rng.random())


@pytest.mark.parametrize(
    ("batch_size", "group_size", "unit"),
    [(6, 1, "trajectory"), (7, 4, "trajectory"), (3, 5, "trajectory"), (2, 4, "group")],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_for_hundreds_of_steps(
    policy: PolicyName, batch_size: int, group_size: int, unit: str
) -> None:
    options = PoolOptions(
        policy=policy, batch_size=batch_size, group_size=group_size, unit=unit, eta=0, max_staleness=1
    )
    slots = 2 * batch_size * options.unit_size + group_size
    world = World(options, mixed, slots=slots, step_seconds=1.0).run(200)
    counts = world.ledger.counts()
    assert counts["trained"] >= 200 * batch_size
    if unit == "trajectory":
        assert counts["trained"] == 200 * batch_size
    if policy != "unfiltered":
        assert world.most_pooled <= options.capacity_units + slots


@settings(examples, max_examples=10)
@given(
    st.sampled_from(["pace", "unfiltered", "bounded_admission"]),
    st.sampled_from(["length", "none"]),
    st.integers(1, 3),
    st.integers(0, 2**16),
)
def test_no_task_starves_when_rejected_ones_go_back(policy: Any, fairness: Any, group_size: int, seed: int) -> None:
    # Every fifth task is slow for a reason of its own: always among the stalest of its length, by any ranking.
    def rollout(task: int, rng: random.Random) -> Rollout:
        length = rng.randint(5, 50)
        return Rollout(length, 4.0 if task % 5 == 0 else length / 50)

    options = PoolOptions(policy=policy, fairness=fairness, batch_size=6, group_size=group_size, eta=2)
    world = World(options, rollout, slots=12 + group_size, step_seconds=1.0, seed=seed).run(40)
    assert world.lost_tasks == []
    # Four attempts of four steps, and the waiting between them.
    assert set(range(6)) <= set(world.trained_tasks)


@pytest.mark.parametrize("seed", range(3))
def test_a_task_of_five_steps_is_trained_on_within_twenty(seed: int) -> None:
    def rollout(task: int, rng: random.Random) -> Rollout:
        return Rollout(500, 5.0) if task % 8 == 3 else Rollout(rng.randint(20, 80), rng.uniform(0.2, 1.0))

    options = PoolOptions(batch_size=8)
    world = World(options, rollout, slots=24, step_seconds=1.0, seed=seed, max_attempts=3).run(80)
    assert min(world.trained_tasks[3]) <= 20
    trained = [length for batch in world.trained_lengths[20:] for length in batch]
    assert 0.8 / 8 <= np.mean([length == 500 for length in trained]) <= 1.2 / 8


@examples
@given(st.sampled_from(POLICIES), st.integers(1, 12), st.integers(0, 40), st.integers(0, 2**16))
def test_a_pool_with_a_batch_fills_one(policy: PolicyName, batch_size: int, more: int, seed: int) -> None:
    rng = random.Random(seed)
    pool = make(policy=policy, batch_size=batch_size, max_staleness=9)
    for _ in range(batch_size + more):
        version = rng.randint(0, 9)
        put(pool, [(rng.randint(0, version), rng.randint(1, 99))], completed=version, last=rng.random() < 0.2)
    before = len(pool)
    draw = drawn(pool, 9)
    assert draw.ids.size == batch_size
    assert before == draw.ids.size + draw.rejected_ids.size + len(pool)
    assert not set(draw.ids.tolist()) & set(draw.rejected_ids.tolist())


@examples
@given(st.integers(40, 400), st.integers(1, 30), st.floats(0.1, 1.5), st.integers(0, 2**16))
def test_fair_rejection_keeps_the_length_mix_within_its_bins(n: int, bins: int, sigma: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = make(batch_size=n // 2, bins=bins, window=512)
    lengths = np.maximum(1, np.rint(rng.lognormal(5, sigma, n))).astype(int)
    for length in lengths.tolist():
        # Longer is staler, without exception.
        put(pool, [(0, length), (20_000, 20_000)], completed=20_000)
    draw = drawn(pool, 20_000)
    rejected = lengths[draw.rejected_ids]
    n_bins = max(1, min(bins, n // 4))
    edges = np.unique(np.sort(lengths)[np.arange(1, n_bins) * n // n_bins])
    held = np.bincount(np.searchsorted(edges, lengths, side="right"), minlength=edges.size + 1)
    lost = np.bincount(np.searchsorted(edges, rejected, side="right"), minlength=edges.size + 1)
    assert (np.abs(lost - rejected.size * held / n) < 1).all()


def test_over_a_run_fair_rejection_trains_on_long_rollouts_and_plain_ranking_does_not() -> None:
    def summary(fairness: Any) -> Any:
        options = PoolOptions(batch_size=64, fairness=fairness)
        return World(options, healthy, slots=256, step_seconds=0.45, requeue=False).run(40).pool.summary()

    fair, plain = summary("length"), summary("none")
    assert fair.tail_share > 0.9
    assert 0.9 < fair.length_ratio < 1.05
    assert plain.tail_share < 0.3
    assert plain.token_mean < fair.token_mean


def test_sync_trains_on_nothing_stale() -> None:
    options = PoolOptions(policy="sync", batch_size=8, group_size=4)
    world = World(options, healthy, slots=32, step_seconds=1.0).run(50)
    assert max(draw["staleness/effective_max"] for draw in world.draws) == 0
    assert world.pool.summary().token_mean == 0
    # A group that refills a batch after a failure has members to spare: they wait one step, and no rollout spans it.
    world = World(options, mixed, slots=32, step_seconds=1.0).run(50)
    assert max(draw["staleness/generation_max"] for draw in world.draws) == 0
    assert max(draw["staleness/waiting_max"] for draw in world.draws) == 1


def test_bounded_admission_never_runs_further_ahead_than_allowed() -> None:
    options = PoolOptions(policy="bounded_admission", batch_size=8, group_size=4, eta=2)
    world = World(options, mixed, slots=200, step_seconds=1.0)
    submit, leads = world.ledger.submit, []

    def watched() -> int:
        new = submit()
        counts = world.ledger.counts()
        leads.append(sum(counts[name] for name in ("running", "grouping", "pooled", "drawn")))
        return new

    world.ledger.submit = watched  # type: ignore[method-assign]
    world.run(100)
    assert max(leads) == 3 * 8


# Figures


def test_a_draw_measures_the_split_of_its_staleness() -> None:
    pool = make(batch_size=2, target=9)
    put(pool, [(0, 30), (4, 10)], completed=4)  # G = 3, W = 2
    put(pool, [(5, 10)], completed=5)  # G = 0, W = 1
    metrics = drawn(pool, 6).metrics
    assert metrics["staleness/generation_mean"] == 1.5
    assert metrics["staleness/generation_max"] == 3
    assert metrics["staleness/waiting_mean"] == 1.5
    assert metrics["staleness/effective_mean"] == 3
    assert metrics["staleness/effective_p95"] == pytest.approx(4.8)
    assert metrics["staleness/token_mean"] == (30 * 6 + 10 * 2 + 10 * 1) / 50
    assert np.isnan(metrics["pool/tail_share"])
    summary = pool.summary()
    assert (summary.generation, summary.waiting, summary.effective) == (1.5, 1.5, 3)
    assert summary.token_mean == metrics["staleness/token_mean"]
    assert summary.multi_version_share == 0.5


def test_a_share_that_too_few_rollouts_define_is_none_with_its_reason() -> None:
    pool = make(batch_size=20)
    empty = pool.summary()
    assert empty.token_mean is None
    assert empty.reasons["token_mean"] == "nothing was drawn"
    assert "20" not in empty.reasons["length_ratio"]
    put_plain(pool, 20)
    drawn(pool, 0)
    summary = pool.summary()
    assert summary.length_ratio == 1
    assert summary.tail_share is None
    assert "0 of 20 generated rollouts are longer" in summary.reasons["tail_share"]


def test_the_length_bias_compares_what_was_trained_with_what_was_generated() -> None:
    pool = make(policy="unfiltered", batch_size=80)
    put(pool, *[[(0, 10)]] * 70, *[[(0, 100)]] * 10, *[[(0, 100)]] * 10, *[[(0, 10)]] * 70, completed=0)
    drawn(pool, 0)
    summary = pool.summary()
    assert summary.length_ratio == pytest.approx(1.0)
    assert summary.tail_share == pytest.approx((10 / 80) / (20 / 160))


# Checkpoints


@pytest.mark.parametrize("options", [{}, {"beta": 0.3}, {"unit": "group", "group_size": 2}, {"order": "freshest"}])
def test_a_restored_pool_goes_on_exactly_as_the_saved_one(options: dict[str, Any]) -> None:
    def feed(pool: PacePool[str], rng: random.Random, version: int) -> Draw[str] | None:
        for _ in range(7):
            members = [[(rng.randint(0, version), rng.randint(1, 300))] for _ in range(pool.options.group_size)]
            put(pool, *members, completed=version)
        draw = pool.draw(version)
        if draw is not None:
            pool.ledger.move_many(draw.ids, State.TRAINED)
        return draw

    pool = make(batch_size=4, target=6, bins=3, window=20, **options)
    rng = random.Random(7)
    for version in range(10):
        feed(pool, rng, version)
    saved = pickle.loads(pickle.dumps((pool.ledger.state_dict(), pool.state_dict())))
    other = make(batch_size=4, target=6, bins=3, window=20, **options)
    other.ledger.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert other.summary() == pool.summary()
    rng_other = random.Random()
    rng_other.setstate(rng.getstate())
    for version in range(10, 20):
        expected, got = feed(pool, rng, version), feed(other, rng_other, version)
        assert expected is not None
        assert got is not None
        assert got.ids.tolist() == expected.ids.tolist()
        assert got.payloads == expected.payloads
        assert got.rejected_ids.tolist() == expected.rejected_ids.tolist()
        assert {k: v for k, v in got.metrics.items() if "seconds" not in k} == pytest.approx(
            {k: v for k, v in expected.metrics.items() if "seconds" not in k}, nan_ok=True
        )
    assert other.summary() == pool.summary()


def test_a_pool_loads_only_with_its_own_ledger() -> None:
    pool = make(batch_size=4)
    put_plain(pool, 3)
    with pytest.raises(RunError, match="pooled"):
        make(batch_size=4).load_state_dict(pool.state_dict())


def test_another_window_keeps_the_last_lengths() -> None:
    pool = make(batch_size=4, window=8)
    for length in range(1, 12):
        put(pool, [(0, length)], completed=0)
    for size, expected in ((3, [9, 10, 11]), (100, list(range(4, 12)))):
        other = make(batch_size=4, window=size)
        other.ledger.load_state_dict(pool.ledger.state_dict())
        other.load_state_dict(pool.state_dict())
        assert sorted(other._window.values().tolist()) == expected
