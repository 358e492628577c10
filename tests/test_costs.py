"""What things cost on virtual time, and which costs are refused."""

import statistics

import pytest

from pace_agent.config import RunConfig, load_config
from pace_agent.costs import DECODE_CURVE, Costs
from pace_agent.errors import UserError


def load(*options: str) -> RunConfig:
    return load_config(overrides=[*options, "--clock", "virtual"])


def test_a_decode_step_follows_the_curve() -> None:
    costs = Costs(decode_curve=((2, 1.0), (4, 2.0), (8, 3.0)))
    assert [costs.decode(rows) for rows in (1, 2, 3, 4, 6, 8, 12)] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert Costs(decode_curve=((1, 0.5),)).decode(100) == 0.5
    assert [Costs().decode(rows) for rows, _ in DECODE_CURVE] == pytest.approx([seconds for _, seconds in DECODE_CURVE])


def test_prefill_comes_on_top() -> None:
    costs = Costs(decode_curve=((1, 1.0), (2, 1.5)), prefill_token_seconds=0.25)
    assert costs.engine_step(sampled=2, prefilled=4) == 2.5
    assert costs.engine_step(sampled=0, prefilled=4) == 2.0


def test_a_trainer_step_costs_by_tokens_or_as_a_whole() -> None:
    assert Costs(trained_token_seconds=0.5).trainer_step(10) == 5.0
    assert Costs(trained_token_seconds=0.5, step_seconds=3.0).trainer_step(10) == 3.0


def test_tool_calls_are_drawn_from_the_seed() -> None:
    costs = Costs(tool_seconds=2.0, tool_sigma=0.5, tool_slow_share=0.2, tool_slow_seconds=100.0)
    drawn = [costs.tool_call(seed, number) for seed in range(500) for number in range(4)]
    assert drawn == [costs.tool_call(seed, number) for seed in range(500) for number in range(4)]
    assert len(set(drawn)) > 1000
    assert 0.17 < drawn.count(100.0) / len(drawn) < 0.23
    assert 1.9 < statistics.median(seconds for seconds in drawn if seconds != 100.0) < 2.1
    assert Costs(tool_seconds=2.0).tool_call(1, 1) == 2.0


def test_production_sets_the_trainers_pace() -> None:
    config = load("--clock.production", "2", "--clock.decode_curve", "[[1, 0.01], [10, 0.02]]")
    costs = config.clock.costs(rows=10)
    assert costs.trained_token_seconds == pytest.approx(2 * costs.token_seconds(10))
    assert costs.token_seconds(10) > 0.002
    default = load().clock
    assert default.costs(rows=48).trained_token_seconds == pytest.approx(1.5 * Costs().token_seconds(48))
    assert load("--clock.trained_token_seconds", "7").clock.costs(rows=48).trainer_step(2) == 14.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--clock.step_seconds", "0"], "clock.step_seconds"),
        (["--clock.update_seconds", "-1"], "clock.update_seconds"),
        (["--clock.prefill_token_seconds", "nan"], "clock.prefill_token_seconds"),
        (["--clock.trained_token_seconds", "inf"], "clock.trained_token_seconds"),
        (["--clock.tool_seconds", "0"], "clock.tool_seconds"),
        (["--clock.production", "0.5"], "clock.production"),
        (["--clock.production", "2", "--clock.step_seconds", "1"], "clock.step_seconds"),
        (["--clock.tool_sigma", "1"], "clock.tool_seconds"),
        (["--clock.tool_slow_share", "0.1"], "clock.tool_slow_seconds"),
        (["--clock.tool_slow_seconds", "1"], "clock.tool_slow_share"),
        (["--clock.decode_curve", "[]"], "clock.decode_curve"),
        (["--clock.decode_curve", "[[1, 0.0]]"], "clock.decode_curve"),
        (["--clock.decode_curve", "[[1, nan]]"], "clock.decode_curve"),
        (["--clock.decode_curve", "[[0, 1.0]]"], "clock.decode_curve"),
        (["--clock.decode_curve", "[[1.5, 1.0]]"], "clock.decode_curve"),
        (["--clock.decode_curve", "[[1, 1.0, 2.0]]"], "clock.decode_curve"),
        (["--clock.decode_curve", "[[4, 1.0], [4, 2.0]]"], "clock.decode_curve"),
        (["--clock.decode_curve", "[[1, 2.0], [4, 1.0]]"], "clock.decode_curve"),
        (["--clock.decode_curve", "fast"], "clock.decode_curve"),
        (["--engine.kind", "sglang"], "engine.kind"),
    ],
)
def test_what_is_no_cost_is_refused_by_name(options: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        load(*options)
