"""Advantages, corrections for stale data, and the clipped loss: pure functions against figures by hand."""

import math

import numpy as np
import pytest
import torch

from pace_agent.trainers.advantages import group_advantages
from pace_agent.trainers.loss import clipped_loss, correct, fill_missing, importance_weights, log_ratios, unit_means

NAN = float("nan")


def test_advantages_are_centred_and_scaled_by_the_sample_deviation():
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0])
    deviation = math.sqrt((0.75**2 + 3 * 0.25**2) / 3) + 1e-4
    assert advantages == pytest.approx([0.75 / deviation] + [-0.25 / deviation] * 3, abs=1e-12)
    assert group_advantages([1.0, 0.0, 0.0, 0.0], "none") == pytest.approx([0.75, -0.25, -0.25, -0.25], abs=1e-12)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_rewards_and_single_rollouts_carry_no_signal(scale):
    assert group_advantages([float(np.float32(0.3))] * 7, scale) == (0.0,) * 7
    assert group_advantages([0.1 + 0.2] * 5, scale) == (0.0,) * 5
    assert group_advantages([0.7], scale) == (0.0,)
    assert group_advantages([], scale) == ()


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, bad])


def test_a_missing_logprob_on_a_live_token_makes_its_ratio_one_and_is_counted():
    current = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    behaviour = torch.tensor([[NAN, -1.5, NAN]])
    mask = torch.tensor([[True, True, False]])
    filled, missing = fill_missing(behaviour, current, mask)
    assert missing.item() == 1
    ratios = torch.exp(current - filled)
    assert ratios[0, 0].item() == 1.0
    assert ratios[0, 1].item() == pytest.approx(math.exp(-0.5))
    loss = clipped_loss(current, filled, torch.ones(1, 1), mask, epsilon_low=0.2, epsilon_high=0.2, n_tokens=2)
    loss.backward()
    assert torch.isfinite(current.grad).all()
    assert current.grad[0, 2] == 0.0
    assert current.grad[0, 0] == pytest.approx(-0.5)


def test_nan_at_a_masked_position_reaches_neither_loss_nor_gradient():
    current = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-1.0, NAN]])
    mask = torch.tensor([[True, False]])
    loss = clipped_loss(current, old, torch.ones(1, 1), mask, epsilon_low=0.2, epsilon_high=0.2, n_tokens=1)
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert current.grad.tolist() == [[-1.0, 0.0]]


def test_the_clip_stops_the_gradient_only_where_it_would_gain_more():
    """Ratios 1.5 and 0.5 under both signs: the clipped side has no gradient, the other keeps the whole ratio."""
    current = torch.log(torch.tensor([[1.5, 0.5], [1.5, 0.5]])).requires_grad_()
    advantages = torch.tensor([[2.0], [-2.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    loss = clipped_loss(current, torch.zeros(2, 2), advantages, mask, epsilon_low=0.2, epsilon_high=0.28, n_tokens=4)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.28 * 2 + 0.5 * 2 - 1.5 * 2 - 0.8 * 2) / 4)
    assert current.grad.flatten().tolist() == pytest.approx([0.0, -0.25, 0.75, 0.0])


def weights_of(level, **others):
    log_r = torch.log(torch.tensor([[2.0, 8.0, 1.0, 0.5]]))
    mask = torch.tensor([[True, True, False, True]])
    return importance_weights(torch.where(mask, log_r, 0.0), mask, level, **others)[0].tolist()


def test_importance_weights_per_token_turn_and_sequence():
    assert weights_of("token") == pytest.approx([2.0, 8.0, 1.0, 0.5])
    assert weights_of("turn", turns=torch.tensor([[0, 0, 1, 1]])) == pytest.approx([4.0, 4.0, 1.0, 0.5])
    assert weights_of("sequence") == pytest.approx([2.0, 2.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="turn"):
        weights_of("turn")


def test_unit_means_of_a_row_without_live_tokens_are_zero():
    mask = torch.zeros(1, 3, dtype=torch.bool)
    assert unit_means(torch.ones(1, 3), mask, torch.zeros(1, 3, dtype=torch.long)).tolist() == [[0.0] * 3]


def corrected(correction):
    current = torch.log(torch.tensor([[0.2, 0.9, 0.3]])).requires_grad_()
    behaviour = torch.log(torch.tensor([[0.1, 0.1, 0.3]]))
    mask = torch.ones(1, 3, dtype=torch.bool)
    result = correct(
        correction, current=current, behaviour=behaviour, advantages=torch.tensor([[3.0]]), mask=mask, cap=4.0
    )
    return current, behaviour, result


def test_no_correction_clips_around_the_behaviour():
    _, behaviour, result = corrected("none")
    assert result.old is behaviour
    assert result.advantages.tolist() == [[3.0]]


@pytest.mark.parametrize(("correction", "beyond"), [("truncated_is", 4.0), ("decoupled", 0.0)])
def test_corrections_weigh_the_advantage_and_take_the_proximal_policy_as_old(correction, beyond):
    current, _, result = corrected(correction)
    assert torch.equal(result.old, current.detach())
    assert not result.old.requires_grad
    assert not result.advantages.requires_grad
    assert result.advantages[0].tolist() == pytest.approx([6.0, 3.0 * beyond, 3.0], rel=1e-5)
    assert result.capped.item() == pytest.approx(1 / 3)


def test_a_truncated_weight_gives_the_policy_gradient_of_the_behaviour_policy():
    """Below the cap the gradient is w A grad log p: what importance sampling says."""
    current, _, result = corrected("truncated_is")
    loss = clipped_loss(
        current,
        result.old,
        result.advantages,
        torch.ones(1, 3, dtype=torch.bool),
        epsilon_low=0.2,
        epsilon_high=0.2,
        n_tokens=1,
    )
    loss.backward()
    assert current.grad[0].tolist() == pytest.approx([-6.0, -12.0, -3.0], rel=1e-5)


def test_log_ratios_are_zero_where_nothing_was_sampled():
    current, behaviour = torch.tensor([[-1.0, -5.0]]), torch.tensor([[-2.0, 0.0]])
    assert log_ratios(current, behaviour, torch.tensor([[True, False]])).tolist() == [[1.0, 0.0]]
