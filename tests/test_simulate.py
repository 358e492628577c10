import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool_world import Rollout, World

from pace_agent.cli import main
from pace_agent.errors import RunError, UserError
from pace_agent.ledger import Ledger, State
from pace_agent.pool import Arrivals, Entry, PacePool, PoolOptions, Spans, SpanTable
from pace_agent.pool.figures import spreads
from pace_agent.pool.staleness import STALENESS_KINDS, generation_staleness, generation_staleness_of_many
from pace_agent.simulate import DecodeCurve, Figures, Simulator, Workload
from pace_agent.simulate.rules import RULES, rule_options
from pace_agent.simulate.stamps import stamp
from pace_agent.simulate.workload import Rollouts

FLAT = DecodeCurve(fixed=1.0, shared=0.0)
GOLDEN = (1 + math.sqrt(5)) / 2
"""A ratio at which no completion ever falls on the end of a step."""


def figures(workload: Workload | None = None, *, seeds: int = 3, step_seconds: float | None = None, **pool: Any) -> Any:
    """Means over some seeds, at the settings of the tables unless others are given."""
    options = PoolOptions(**({"batch_size": 64} | pool))
    runs = [Simulator(workload or Workload(), options, seed=k, step_seconds=step_seconds).run() for k in range(seeds)]
    return {name: np.mean([getattr(run, name) for run in runs]) for name in Figures.__slots__ if name != "ledger"}


def command(*arguments: str) -> int:
    """The exit code of `pace-agent simulate`."""
    try:
        return main(["simulate", *arguments])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))


# The bulk way into the pool


def some_spans(rng: random.Random, version: int) -> Spans:
    """One to twelve turns, each of a few runs, none newer than `version`."""
    runs = [
        (rng.randint(0, version), rng.randint(1, 50), turn)
        for turn in range(rng.randint(1, 12))
        for _ in range(rng.randint(1, 3))
    ]
    return Spans(*zip(*runs, strict=True))


@pytest.mark.parametrize("kind", STALENESS_KINDS)
def test_staleness_in_columns_is_that_of_each_trajectory_to_the_last_bit(kind: Any) -> None:
    rng = random.Random(1)
    spans = [some_spans(rng, 20) for _ in range(300)]
    table = SpanTable.of(spans)
    assert table.n_sampled.tolist() == [each.n_sampled for each in spans]
    together = generation_staleness_of_many(table, np.full(300, 20), kind)
    assert together.tolist() == [generation_staleness(each, 20, kind) for each in spans]
    with pytest.raises(ValueError, match="newer"):
        generation_staleness_of_many(table, np.zeros(300, dtype=np.int64), kind)


@pytest.mark.parametrize(
    "options",
    [
        *({"policy": policy} for policy in ("sync", "unfiltered", "max_staleness", "bounded_admission", "drop_oldest")),
        *({"staleness": kind, "lam": 0.7} for kind in STALENESS_KINDS),
        {"fairness": "none", "order": "freshest"},
        {"beta": 0.3, "target": 40},
        {"unit": "group", "group_size": 3},
    ],
)
def test_bulk_and_single_entry_make_the_same_draws(options: dict[str, Any]) -> None:
    pools = [PacePool[int](PoolOptions(**({"batch_size": 16, "window": 50} | options)), Ledger()) for _ in range(2)]
    rng = random.Random(0)
    draws = 0
    for version in range(40):
        for _ in range(rng.randint(0, 12)):
            size = 3 if "unit" in options else rng.randint(0, 5)
            spans, last = [some_spans(rng, version) for _ in range(size)], [rng.random() < 0.1 for _ in range(size)]
            for pool in pools:
                pool.ledger.move_many(pool.ledger.submit_many(size), State.GROUPING)
            ids = pools[0].ledger.ids(State.GROUPING)
            pools[0].add([Entry(k, k, s, version, one) for k, s, one in zip(ids.tolist(), spans, last, strict=True)])
            completed = np.full(size, version)
            pools[1].add_many(Arrivals(ids, ids.tolist(), SpanTable.of(spans), completed, np.array(last, dtype=bool)))
        one, many = (pool.draw(version) for pool in pools)
        assert (one is None) == (many is None)
        if one is None or many is None:
            continue
        draws += 1
        for name in ("ids", "rejected_ids", "generation", "waiting"):
            assert getattr(one, name).tolist() == getattr(many, name).tolist()
        assert (one.payloads, one.rejected_payloads) == (many.payloads, many.rejected_payloads)
        timeless = [{k: v for k, v in draw.metrics.items() if "seconds" not in k} for draw in (one, many)]
        np.testing.assert_equal(*timeless)
        for pool in pools:
            pool.ledger.move_many(one.ids, State.TRAINED)
    assert draws > 5
    assert pools[0].summary() == pools[1].summary()
    first, second = (pool.state_dict() for pool in pools)
    np.testing.assert_equal(first, second)


def test_the_bulk_way_in_refuses_what_the_single_one_refuses() -> None:
    pool = PacePool[str](PoolOptions(batch_size=1), Ledger())
    ids = pool.ledger.submit_many(2)
    table = SpanTable.of([Spans((3,), (5,), (0,)), Spans((4,), (5,), (0,))])
    good = Arrivals(ids, "ab", table, np.array([4, 4]), np.zeros(2, dtype=bool))
    with pytest.raises(RunError, match="RUNNING"):
        pool.add_many(good)
    pool.ledger.move_many(ids, State.GROUPING)
    with pytest.raises(ValueError, match="1 versions newer"):
        pool.add_many(Arrivals(ids, "ab", table, np.array([4, 3]), np.zeros(2, dtype=bool)))
    assert len(pool) == 0
    pool.add_many(good)
    with pytest.raises(RunError, match="POOLED"):
        pool.add_many(good)
    with pytest.raises(ValueError, match="columns of"):
        Arrivals(ids, "abc", table, np.array([4, 4]), np.zeros(2, dtype=bool))
    draw = pool.draw(4)
    assert draw is not None
    assert draw.payloads == ("b",)


@pytest.mark.parametrize(
    ("counts", "first"), [([1, 0], [0]), ([1, 1], [0, 2]), ([1, 1], [1]), ([1], []), ([], [0]), ([1, 1], [0, 0])]
)
def test_columns_of_runs_that_fit_no_trajectories_are_refused(counts: list[int], first: list[int]) -> None:
    columns = [np.array(counts, dtype=np.int64)] * 3
    with pytest.raises(ValueError, match="at least one"):
        SpanTable(*columns, np.array(first, dtype=np.int64))


def test_many_are_submitted_as_one_after_another() -> None:
    ledger, one = Ledger(), Ledger()
    for number in (0, 3, 2000, 1, 5000):
        ids = ledger.submit_many(number)
        assert ids.tolist() == [one.submit() for _ in range(number)]
    ledger.audit()
    assert ledger.counts() == one.counts()


@pytest.mark.parametrize("n", [1, 2, 19, 20, 21, 64, 1000])
def test_the_spread_is_what_numpy_says(n: int) -> None:
    values = np.random.default_rng(n).exponential(3, n)
    found = spreads(generation=values, waiting=values - 1)
    for name, column in (("generation", values), ("waiting", values - 1)):
        expected = (column.mean(), np.percentile(column, 95), column.max())
        assert [found[f"staleness/{name}_{end}"] for end in ("mean", "p95", "max")] == pytest.approx(expected)


# Stamps


def token_by_token(rollouts: Rollouts, k: int, started: float, published: list[float]) -> list[tuple[int, int, int]]:
    """Runs of one rollout by looking at every token: token i is there once i + 1/2 of the tokens' time has passed."""
    length, decode, stall = int(rollouts.length[k]), float(rollouts.decode[k]), float(rollouts.stall[k])
    at = float(rollouts.stall_at[k]) * decode
    runs: list[tuple[int, int, int]] = []
    for token in range(length):
        passed = (token + 0.5) / length * decode
        moment = started + passed + (stall if passed > at else 0.0)
        version = max(v for v, time in enumerate(published) if time <= moment)
        turn = int(stall > 0 and token >= round(at / decode * length))
        if runs and runs[-1][0] == version and runs[-1][2] == turn:
            runs[-1] = (version, runs[-1][1] + 1, turn)
        else:
            runs.append((version, 1, turn))
    return runs


def test_every_token_has_the_version_that_was_published_when_it_was_sampled() -> None:
    rng = np.random.default_rng(0)
    n = 200
    rollouts = Rollouts(rng.integers(1, 60, n), rng.uniform(0.5, 8, n), rng.choice([0.0, 0.4, 3.0], n), rng.random(n))
    published = np.concatenate(([0.0], np.sort(rng.uniform(0, 15, 14))))
    started = rng.uniform(0, 15, n)
    table = stamp(rollouts, started, published)
    bounds = [*table.first.tolist(), table.counts.size]
    several = 0
    for k in range(n):
        rows = slice(bounds[k], bounds[k + 1])
        runs = list(zip(*(c[rows].tolist() for c in (table.versions, table.counts, table.turns)), strict=True))
        expected = token_by_token(rollouts, k, float(started[k]), published.tolist())
        assert runs == expected
        several += len(runs) > 3
    assert several > 50
    plain = stamp(rollouts, started, published, turns=False)
    assert not plain.turns.any()
    assert plain.n_sampled.tolist() == rollouts.length.tolist()
    everything = np.full(n, 14)
    expected_staleness = generation_staleness_of_many(table, everything).tolist()
    assert generation_staleness_of_many(plain, everything).tolist() == expected_staleness


# Against a simulation that takes one event at a time, with one object for each rollout


@pytest.mark.parametrize(
    ("rule", "more"),
    [*((name, {}) for name in RULES), ("pace-length", {"beta": 0.4, "target": 20}), ("bounded_admission", {"eta": 0})],
)
def test_it_makes_the_draws_of_the_small_world(rule: str, more: dict[str, Any]) -> None:
    workload = Workload(slots=40, mean_length=60, ratio=1.7, curve=FLAT, staggered=False)
    options = PoolOptions(**({"batch_size": 12, **RULES[rule]} | more))
    simulator = Simulator(workload, options, steps=60, warmup=0, seed=3)
    drawn: list[tuple[list[int], list[int], float, float]] = []
    record = simulator._record

    def watched(draw: Any) -> None:
        drawn.append((draw.ids.tolist(), draw.rejected_ids.tolist(), draw.generation.sum(), draw.waiting.sum()))
        record(draw)

    simulator._record = watched  # type: ignore[method-assign]
    simulator.run()
    given = workload.draw(np.random.default_rng(3), 8192)
    columns = zip(
        given.length.tolist(), given.decode.tolist(), given.stall.tolist(), given.stall_at.tolist(), strict=True
    )
    world = World(
        options,
        lambda task, rng: Rollout(*next(columns)),
        slots=workload.slots,
        step_seconds=workload.step_seconds(12),
        requeue=False,
    )
    theirs: list[tuple[list[int], list[int], float, float]] = []
    draw = world.pool.draw

    def their_draw(version: int) -> Any:
        made = draw(version)
        assert made is not None
        theirs.append((made.ids.tolist(), made.rejected_ids.tolist(), made.generation.sum(), made.waiting.sum()))
        return made

    world.pool.draw = their_draw  # type: ignore[method-assign]
    world.run(60)
    assert len(drawn) >= 60
    assert drawn == theirs[: len(drawn)]


# Closed forms


def steady(ratio: float = GOLDEN, slots: int = 32, **more: Any) -> Workload:
    """Equal rollouts whose completions are evenly spaced."""
    return Workload(slots=slots, ratio=ratio, lengths="deterministic", curve=FLAT, **more)


def test_equal_rollouts_under_pace_have_the_staleness_of_their_age() -> None:
    m = 8
    run = Simulator(steady(), PoolOptions(batch_size=m, fairness="none")).run()
    step, length = run.step_seconds, steady().mean_seconds
    # The youngest M of the M * ratio of a step are drawn: those that completed less than D / ratio before its end. A
    # token of age b at completion, of a rollout that waited a, has seen floor((a + b) / D) publications, and one more.
    ages = (np.arange(2000) + 0.5) / 2000
    a, b = np.meshgrid(ages * step / GOLDEN, ages * length)
    assert run.token_waiting == 1
    assert run.token_staleness == pytest.approx(1 + np.floor((a + b) / step).mean(), rel=0.005)
    assert run.rejected_share == pytest.approx(1 - 1 / GOLDEN, rel=0.005)
    assert run.busy == pytest.approx(1)
    # Emptied at every draw, and filled evenly: half of what a step brings.
    assert run.pool_mean == pytest.approx(m * GOLDEN / 2, rel=0.005)
    assert run.pool_seconds == pytest.approx(step / 2, rel=0.005)
    assert run.produced_per_second == pytest.approx(steady().production, rel=0.001)


def test_unfiltered_falls_behind_by_what_is_produced_too_much() -> None:
    m = 8
    run = Simulator(steady(), PoolOptions(policy="unfiltered", batch_size=m), steps=120, warmup=40).run()
    # Rollout i completes i arrivals after the first; step k begins when (M - 1) + k * M * ratio have arrived.
    expected = [
        k - max(0, math.floor((i - (m - 1)) / (m * GOLDEN))) for k in range(40, 120) for i in range(k * m, (k + 1) * m)
    ]
    assert run.token_waiting == pytest.approx(np.mean(expected), abs=1e-9)
    assert run.rejected_share == 0


def test_bounded_admission_runs_exactly_eta_steps_ahead() -> None:
    workload, m, eta = steady(slots=24), 8, 4
    run = Simulator(workload, PoolOptions(policy="bounded_admission", batch_size=m, eta=eta)).run()
    step, length = run.step_seconds, workload.mean_seconds
    # Every step's end admits M, which are drawn eta steps later; until then they run, and then they wait.
    assert run.pool_seconds == pytest.approx(eta * step - length)
    completed_after = math.floor(length / step)
    assert run.token_waiting == eta - completed_after
    passed = (np.arange(100_000) + 0.5) / 100_000 * length
    assert run.token_generation == pytest.approx(completed_after - np.floor(passed / step).mean(), rel=0.002)
    assert run.slots_busy == pytest.approx(m * length / step / 24)


def test_sync_takes_generation_and_step_in_turn() -> None:
    workload, m = steady(slots=32), 8
    run = Simulator(workload, PoolOptions(policy="sync", batch_size=m)).run()
    assert run.token_staleness == 0
    assert run.seconds / run.steps == pytest.approx(workload.mean_seconds + run.step_seconds)
    assert run.slots_busy == pytest.approx(m / 32 * (1 - run.busy))
    curved = Workload(slots=32, lengths="deterministic", curve=DecodeCurve(0.5, 0.5, slots=32))
    run = Simulator(curved, PoolOptions(policy="sync", batch_size=m)).run()
    # With 8 of 32 slots at work a decode step takes 0.5 + 0.5 * 8 / 32 of its time.
    assert run.seconds / run.steps == pytest.approx(0.625 * curved.mean_seconds + run.step_seconds)


@pytest.mark.parametrize("rule", RULES)
def test_little_and_the_balance_hold_for_every_rule(rule: str) -> None:
    simulator = Simulator(Workload(slots=128), rule_options(rule, batch_size=32), steps=500, warmup=100)
    run = simulator.run()
    simulator.ledger.audit()
    counts = dict(run.ledger)
    submitted = counts.pop("submitted")
    assert submitted == sum(counts.values())
    assert counts["trained"] == 500 * 32
    assert counts["running"] <= 128
    # What came in and did not leave is in the pool; arrivals times wait is what waits on average.
    if rule != "unfiltered":
        assert run.pool_mean == pytest.approx(run.produced_per_second * run.pool_seconds, rel=0.02)
    assert run.token_staleness == pytest.approx(run.token_generation + run.token_waiting)


def test_single_rollouts_from_many_slots_wait_as_in_a_queue_with_a_constant_service_time() -> None:
    # Completions of 500 independent slots are nearly a Poisson process: M/D/1, with W = rho D / (2 (1 - rho)).
    workload = Workload(slots=500, mean_length=200, curve=FLAT)
    for rho in (0.5, 0.7):
        step = rho / workload.production
        options = PoolOptions(policy="unfiltered", batch_size=1)
        run = Simulator(workload, options, steps=14_000, warmup=2_000, step_seconds=step).run()
        assert run.busy == pytest.approx(rho, rel=0.03)
        assert run.pool_seconds == pytest.approx(rho * step / (2 * (1 - rho)), rel=0.08)


def test_the_workload_has_the_means_that_it_states() -> None:
    for workload in (
        Workload(),
        Workload(sigma=1.5, cut=3),
        Workload(sigma=0, speed_sigma=0),
        Workload(mean_length=40),
    ):
        drawn = workload.draw(np.random.default_rng(0), 400_000)
        assert drawn.length.mean() == pytest.approx(workload.mean_tokens, rel=0.01)
        assert (drawn.decode + drawn.stall).mean() == pytest.approx(workload.mean_seconds, rel=0.01)
        assert drawn.length.max() <= workload.cut * workload.mean_length
        assert np.count_nonzero(drawn.stall) / 400_000 == pytest.approx(0.3, rel=0.02)


def test_a_seed_fixes_the_run() -> None:
    runs = [Simulator(Workload(), PoolOptions(batch_size=64), steps=40, warmup=4, seed=k).run() for k in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


# The tables of the rules and of the concurrency. A rule that rejects nothing trains on what it completes, so that its
# tail share is 1; in the first table it is 1.04. Tail shares are compared with that divided out.

TABLE = {
    "bounded admission": ({"policy": "bounded_admission", "eta": 4}, 4.84, 1.04, 1.01, 0.0),
    "waiting only": ({"staleness": "none", "fairness": "none"}, 3.85, 1.04, 1.02, 0.34),
    "S": ({"fairness": "none"}, 1.76, 0.02, 0.54, 0.34),
    "8 bins": ({"bins": 8}, 2.69, 0.84, 0.92, 0.34),
    "16 bins": ({"bins": 16}, 3.00, 1.02, 0.97, 0.34),
    # The table has 32 bins in a pool of 96, whose bins the product limits to a quarter of that; with 32, it is 3.26.
    "24 bins": ({"bins": 32}, 3.09, 1.03, 0.99, 0.34),
}


@pytest.mark.parametrize("rule", TABLE)
def test_the_table_of_the_rules(rule: str) -> None:
    options, staleness, tail, ratio, rejected = TABLE[rule]
    run = figures(**options)
    assert run["token_staleness"] == pytest.approx(staleness, rel=0.05)
    assert run["tail_share"] == pytest.approx(tail / 1.04, rel=0.05, abs=0.015)
    assert run["length_ratio"] == pytest.approx(ratio, rel=0.05)
    assert run["rejected_share"] == pytest.approx(rejected, rel=0.05)
    assert run["busy"] > 0.999


@pytest.mark.parametrize(
    ("slots", "ratio", "step", "staleness", "rejected", "bounded"),
    [
        (256, 1.50, 1.00, 3.00, 0.34, 4.84),
        (170, 1.20, 1.00, 2.99, 0.17, 4.76),
        (147, 1.09, 1.02, 3.03, 0.10, 4.66),
        (134, 1.03, 1.03, 3.06, 0.06, 4.40),
    ],
)
def test_the_table_of_the_concurrency(
    slots: int, ratio: float, step: float, staleness: float, rejected: float, bounded: float
) -> None:
    pace = Workload().step_seconds(64)
    workload = Workload(slots=slots)
    run = figures(workload, step_seconds=pace)
    assert workload.production * pace / 64 == pytest.approx(ratio, rel=0.01)
    assert 1 / run["busy"] == pytest.approx(step, rel=0.02)
    assert run["token_staleness"] == pytest.approx(staleness, rel=0.05)
    assert run["rejected_share"] == pytest.approx(rejected, abs=0.01)
    assert 0.95 < run["tail_share"] < 1.02
    run = figures(workload, step_seconds=pace, policy="bounded_admission", eta=4)
    assert run["token_staleness"] == pytest.approx(bounded, rel=0.05)


# Mistakes, and the command


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 0.9}, "ratio must be at least 1"),
        ({"ratio": math.nan}, "ratio must be at least 1"),
        ({"token_seconds": 0.0}, "token_seconds must be a number above 0"),
        ({"mean_length": math.nan}, "mean_length must be a number above 0"),
        ({"slots": 0}, "slots must be at least 1"),
        ({"stall_share": 1.5}, "stall_share must be at least 0 and at most 1"),
        ({"sigma": math.inf}, "sigma"),
        ({"lengths": "log-normal"}, "Did you mean 'lognormal'?"),
    ],
)
def test_a_workload_out_of_range_names_its_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        Workload(**settings)
    assert message in str(error.value)


def test_what_can_not_be_simulated_is_said() -> None:
    with pytest.raises(UserError, match="can't both be 0"):
        DecodeCurve(0.0, 0.0)
    for more, message in (
        ({"step_seconds": 0.0}, "step_seconds must be above 0"),
        ({"step_seconds": math.nan}, "step_seconds must be above 0"),
        ({"steps": 10, "warmup": 10}, "steps must be more than warmup"),
    ):
        with pytest.raises(UserError, match=message):
            Simulator(Workload(), PoolOptions(), **more)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="group_size"):
        Simulator(Workload(), PoolOptions(group_size=8))
    with pytest.raises(UserError, match="Did you mean 'pace-length'"):
        rule_options("pace_length")


def test_the_command_prints_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "pool.png"
    assert command("--help") == 0
    assert "Usage: pace-agent simulate" in capsys.readouterr().out
    small = ("--slots", "64", "--batch", "16", "--steps", "40")
    assert command(*small, "--figure", str(picture)) == 0
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines() if line.split() and line.split()[0] in RULES] == list(RULES)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert command(*small, "--policies", "sync,pace-none", "--json", "--seed", "2") == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = json.loads(out)
    assert list(found["policies"]) == ["sync", "pace-none"]
    assert found["policies"]["sync"]["token_staleness"] == 0
    options = rule_options("pace-none", batch_size=16)
    expected = Simulator(Workload(slots=64), options, steps=40, warmup=10, seed=2).run()
    assert found["policies"]["pace-none"] == json.loads(json.dumps(expected.to_dict()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "0.5"], "ratio must be at least 1"),
        (["--ratio", "2", "--step-seconds", "1"], "give one of them"),
        (["--token-seconds", "0"], "token_seconds"),
        (["--batch", "64", "--capacity", "32"], "pool.capacity must be at least 64"),
        (["--policies", "sink"], "Did you mean 'sync'?"),
        (["--figure", "pool.svg"], "--figure names a .png file"),
    ],
)
def test_the_command_refuses_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == 2
    assert message in capsys.readouterr().err
