"""GRPO against the same formulas in float64 numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_swarm.learning import grpo

LOW, HIGH = 0.2, 0.28


def tensor(values, grad=False):
    return torch.tensor(np.asarray(values), dtype=torch.float64, requires_grad=grad)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_advantages_are_rewards_less_their_mean(rewards):
    found = grpo.advantages(rewards, normalize=False)
    np.testing.assert_allclose(found, np.array(rewards) - np.mean(rewards), atol=1e-12)


@given(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=2, max_size=16).filter(lambda r: len(set(r)) > 1))
def test_normalised_advantages_are_in_standard_deviations(rewards):
    found = grpo.advantages(rewards, normalize=True)
    expected = (np.array(rewards) - np.mean(rewards)) / np.std(rewards, ddof=1)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert sum(found) == pytest.approx(0.0, abs=1e-9)


def random_batch(seed, rows=6, length=5):
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.0, (rows, length))
    old = logprobs + rng.normal(0, 0.4, (rows, length))
    advantages = rng.normal(0, 1, rows)
    return logprobs.ravel(), old.ravel(), np.repeat(advantages, length)


@pytest.mark.parametrize("seed", range(5))
def test_the_clipped_loss_and_its_gradient(seed):
    logprobs, old, advantages = random_batch(seed)
    ratio, a = np.exp(logprobs - old), advantages
    gain = np.where(a > 0, a * np.minimum(ratio, 1 + HIGH), a * np.maximum(ratio, 1 - LOW))
    clipped = np.where(a > 0, ratio > 1 + HIGH, ratio < 1 - LOW)
    assert clipped.any() and not clipped.all()

    given = tensor(logprobs, grad=True)
    loss, acts = grpo.clipped_loss(given, tensor(old), tensor(advantages), LOW, HIGH)
    loss.sum().backward()
    np.testing.assert_allclose(loss.detach(), -gain, rtol=1e-10)
    np.testing.assert_array_equal(acts, clipped)
    np.testing.assert_allclose(given.grad, np.where(clipped, 0.0, -ratio * a), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.5, 1.0, -1.28, 0.0),  # already much likelier: no further
        (1.5, -1.0, 1.5, 1.5),  # likelier, and bad: the whole way back
        (0.5, 1.0, -0.5, -0.5),  # less likely, and good: the whole way back
        (0.5, -1.0, 0.8, 0.0),  # already much less likely: no further
        (1.25, 1.0, -1.25, -1.25),  # within the wider upper side
        (0.79, -1.0, 0.8, 0.0),
    ],
)
def test_the_clip_takes_the_gradient_on_the_side_where_the_policy_has_moved_far_enough(
    ratio, advantage, loss, gradient
):
    logprobs = tensor([np.log(ratio) - 1.0], grad=True)
    found, acts = grpo.clipped_loss(logprobs, tensor([-1.0]), tensor([advantage]), LOW, HIGH)
    found.sum().backward()
    assert float(found.detach()) == pytest.approx(loss)
    assert float(logprobs.grad) == pytest.approx(gradient)
    assert bool(acts) is (gradient == 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_the_capped_loss_weighs_a_claim_at_most_by_the_cap(seed):
    logprobs, claimed, advantages = random_batch(seed)
    weight = np.minimum(np.exp(logprobs - claimed), 1 + HIGH)
    assert (weight == 1 + HIGH).any() and (weight < 1).any()
    given = tensor(logprobs, grad=True)
    loss = grpo.capped_loss(given, tensor(claimed), tensor(advantages), 1 + HIGH)
    loss.sum().backward()
    np.testing.assert_allclose(loss.detach(), -weight * advantages, rtol=1e-10)
    np.testing.assert_allclose(given.grad, -weight * advantages, rtol=1e-10)


@pytest.mark.parametrize("claim", [-1e300, -200.0, 0.0, 200.0, 1e300])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_claim_however_absurd_gives_a_token_more_than_the_cap(claim, advantage):
    logprobs = torch.tensor([-2.0], requires_grad=True)
    claimed = torch.tensor([claim], dtype=torch.float32)
    loss = grpo.capped_loss(logprobs, claimed, torch.tensor([advantage]), 1 + HIGH)
    loss.sum().backward()
    assert abs(float(loss.detach())) <= 1 + HIGH + 1e-6
    assert abs(float(logprobs.grad)) <= 1 + HIGH + 1e-6


def test_k3_is_the_kl_divergence_in_expectation_and_never_negative():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(20)), rng.dirichlet(np.ones(20))
    estimates = grpo.kl_k3(tensor([np.log(p)]), tensor([np.log(q)]))[0].numpy()
    assert (estimates >= 0).all()
    assert (p * estimates).sum() == pytest.approx((p * np.log(p / q)).sum())
    assert grpo.kl_k3(tensor([[-1.0]]), tensor([[-1.0]])).item() == 0.0


def test_k3_pulls_towards_the_reference():
    for policy, sign in ((-1.0, 1.0), (-3.0, -1.0)):
        logprobs = tensor([[policy]], grad=True)
        grpo.kl_k3(logprobs, tensor([[-2.0]])).sum().backward()
        assert np.sign(float(logprobs.grad)) == sign  # descending moves it to -2
