"""The number of rollouts in flight, fixed or following the trainer's pace."""

import pytest

from pace_agent.config import load_config
from pace_agent.errors import UserError
from pace_agent.rollout.concurrency import AIM, Concurrency

BATCH, STEP_SECONDS = 64, 10.0


def steps(controller: Concurrency, number: int, *, per_second: float, curve: float = 1.0) -> float:
    """A trainer that is busy for ten seconds and waits for a batch; the share of time that it waited at the end."""
    now, pooled, wait = 0.0, 0.0, 0.0
    for _ in range(number):
        rate = per_second * controller.limit**curve
        wait = max(0.0, (BATCH - pooled) / rate)
        controller.arrived(round(rate * wait))
        now, pooled = now + wait, max(pooled, BATCH)
        controller.drawn(now, BATCH)
        controller.trained(now + STEP_SECONDS)
        came = rate * STEP_SECONDS
        controller.arrived(round(came))
        now, pooled = now + STEP_SECONDS, came  # a draw leaves no excess
    return wait / STEP_SECONDS


@pytest.mark.parametrize("start", [8, 64, 128])
@pytest.mark.parametrize("curve", [1.0, 0.5])
def test_it_finds_the_trainers_pace_from_both_sides(start: int, curve: float) -> None:
    """40 in flight would give a batch in ten seconds."""
    controller = Concurrency(start, least=8, most=128)
    waited = steps(controller, 80, per_second=BATCH / STEP_SECONDS / 40**curve, curve=curve)
    assert controller.limit == pytest.approx(40 * AIM ** (1 / curve), rel=0.05)
    assert waited == 0.0


def test_it_stays_within_its_bounds() -> None:
    low, high = Concurrency(64, least=8, most=128), Concurrency(64, least=8, most=128)
    steps(low, 60, per_second=100.0)
    steps(high, 60, per_second=0.001)
    assert (low.limit, high.limit) == (8, 128)


def test_a_fixed_number_stays() -> None:
    controller = Concurrency(64)
    steps(controller, 20, per_second=100.0)
    controller.load_state_dict({"limit": 3.0})
    assert controller.limit == 64


def test_it_goes_on_from_a_checkpoint() -> None:
    before, after = Concurrency(64, least=8, most=128), Concurrency(64, least=8, most=128)
    steps(before, 20, per_second=0.3)
    after.load_state_dict(before.state_dict())
    assert after.limit == before.limit != 64


def test_a_trainer_that_takes_no_time_moves_nothing() -> None:
    controller = Concurrency(64, least=8, most=128)
    for _ in range(5):
        controller.arrived(640)
        controller.drawn(1.0, BATCH)
        controller.trained(1.0)
    assert controller.limit == 64


def test_the_key_takes_a_number_or_auto() -> None:
    assert load_config(overrides=["--rollout.concurrency", "auto"]).rollout.concurrency == "auto"
    assert load_config(overrides=["--rollout.concurrency", "12"]).rollout.concurrency == 12
    for wrong in ("0", "-3", "many", "1.5", "true"):
        with pytest.raises(UserError, match=r"rollout\.concurrency"):
            load_config(overrides=["--rollout.concurrency", wrong])
