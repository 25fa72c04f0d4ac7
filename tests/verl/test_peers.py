"""The same rules in verl: its functions on a whole batch give the same numbers. Needs verl (make test-verl)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: these run with `make test-verl`")

from verl.trainer.ppo import core_algos

from dew import Rollouts, get_algorithm
from dew.algorithms.base import Part
from dew.engines.verl import plugin
from verl_worker import actor

plugin.register()
LENGTHS = torch.tensor([5, 3, 4, 2, 5, 1, 6, 4])
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]


def batch(seed):
    """Rows of two groups, as verl's functions take them, and the same as Rollouts; the policy has moved since."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(6) < LENGTHS[:, None]
    old = -3 * torch.rand(8, 6, generator=g) * mask
    logp = (old + 0.3 * torch.randn(8, 6, generator=g)) * mask
    squares = (old.exp() ** 2 + (1 - old.exp()) ** 2 * torch.rand(8, 6, generator=g)) * mask
    reward = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
    grouped = Rollouts.from_rows(GROUPS, mask=mask, reward=reward, logp=old, sum_sq=squares, entropy=-old)
    return mask, old, logp, squares, reward, grouped


def config(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, **policy_loss):
    bounds = {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high, "clip_ratio_c": clip_ratio_c}
    made = actor(clip_ratio=0.2, **bounds, tau_pos=1.0, tau_neg=1.05)
    object.__setattr__(made, "policy_loss", SimpleNamespace(**policy_loss))  # the dataclass is frozen
    return made


def verls(name, old, logp, A, mask, **policy_loss):
    leaf = logp.clone().requires_grad_()
    value, _ = core_algos.get_policy_loss_fn(name)(
        old, leaf, A, mask.long(), loss_agg_mode="token-mean", config=config(**policy_loss)
    )
    value.backward()
    return value.detach(), leaf.grad


def ours(algorithm, old, logp, A, mask, penalty=None):
    leaf = logp.clone().requires_grad_()
    value, _ = algorithm.loss(leaf, Part(mask=mask, old_logp=old, penalty=penalty), A)
    value.backward()
    return value.detach(), leaf.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["cispo", "sapo"])
def test_the_surrogates_are_verls(name, seed):
    mask, old, logp, _, _, grouped = batch(seed)
    algorithm = get_algorithm(name, clip_low=0.2, clip_high=0.28)
    A = grouped.to_rows(algorithm.advantages(grouped))
    expected = verls(name, old, logp, A, mask)
    torch.testing.assert_close(ours(algorithm, old, logp, A, mask), expected, rtol=1e-5, atol=1e-6)
    assert expected[1].abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "algorithm"), [("dppo_tv", "dapo"), ("dppo_kl", "dapo"), ("geo_mean", "gmpo")])
def test_trust_regions_and_the_geometric_mean_are_verls(name, algorithm, seed):
    mask, old, logp, _, _, grouped = batch(seed)
    logp = logp.clamp_max(-0.01)  # probabilities
    algorithm = get_algorithm(algorithm, surrogate=name, clip_low=0.05, clip_high=0.08)
    A = grouped.to_rows(algorithm.advantages(grouped))
    expected = verls(name, old, logp, A, mask, clip_ratio_low=0.05, clip_ratio_high=0.08, clip_ratio_c=1e4)
    torch.testing.assert_close(ours(algorithm, old, logp, A, mask), expected, rtol=1e-5, atol=1e-6)
    if name != "geo_mean":  # some are dropped, by this and not by the ratio
        kept = ours(get_algorithm("dapo", surrogate=name, clip_low=1.0, clip_high=9.0), old, logp, A, mask)[1]
        assert 0 < ((expected[1] == 0) & (kept != 0)).sum() < mask.sum() / 2


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_is_verls_on_policy(seed):
    """verl takes the covariance with the policy being trained: the same while it is the one that sampled. It draws at
    random; with so large a share both take every token between the bounds."""
    mask, old, _, _, _, grouped = batch(seed)
    bounds = {"cov_low": 0.2, "cov_high": 0.8}
    algorithm = get_algorithm("clip_cov", cov_share=1.0, **bounds)
    plain = grouped.to_rows(get_algorithm("dapo").advantages(grouped))
    A = grouped.to_rows(algorithm.advantages(grouped))
    dropped = (plain != 0) & (A == 0)
    assert 0 < dropped.sum() < mask.sum() / 2
    expected = verls("clip_cov", old, old, plain, mask, clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=0.8)
    torch.testing.assert_close(ours(algorithm, old, old, A, mask), expected, rtol=1e-5, atol=1e-6)
    assert (expected[1] == 0)[dropped].all()


@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_is_verls(seed):
    """The selection on-policy, and then the loss of the selected tokens off-policy."""
    mask, old, _, _, _, grouped = batch(seed)
    algorithm = get_algorithm("kl_cov", cov_share=0.2, cov_coef=0.7)
    given = algorithm.advantages(grouped)
    A, penalty = grouped.to_rows(given), grouped.to_rows(algorithm.penalties(grouped, given))
    expected = verls("kl_cov", old, old, A, mask, kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    torch.testing.assert_close(ours(algorithm, old, old, A, mask, penalty), expected, rtol=1e-5, atol=1e-6)
    assert (penalty > 0).sum() == int(0.2 * mask.sum())
    # where the policy has moved by the same amount everywhere, verl's covariance and its selection are the same
    moved = (old - 0.1) * mask
    expected = verls("kl_cov", old, moved, A, mask, kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    torch.testing.assert_close(ours(algorithm, old, moved, A, mask, penalty), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours(algorithm, old, moved, A, mask, 0 * penalty)[1], expected[1])


@pytest.mark.parametrize("seed", range(3))
def test_otb_is_verls(seed):
    mask, old, _, squares, reward, grouped = batch(seed)
    rewards = torch.zeros_like(old)
    rewards[torch.arange(8), LENGTHS - 1] = reward
    expected, _ = core_algos.get_adv_estimator_fn("optimal_token_baseline")(
        rewards, mask.long(), np.array(GROUPS), old, squares
    )
    torch.testing.assert_close(
        grouped.to_rows(get_algorithm("otb").advantages(grouped)), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("seed", range(3))
def test_reinforce_pp_is_verls_with_baseline(seed):
    """verl's constant below the root is 1e-8, ours beside it 1e-4."""
    mask, old, _, _, reward, grouped = batch(seed)
    rewards = torch.zeros_like(old)
    rewards[:, 0] = reward
    expected, _ = core_algos.get_adv_estimator_fn("reinforce_plus_plus_baseline")(
        rewards, mask.long(), np.array(GROUPS)
    )
    found = grouped.to_rows(get_algorithm("reinforce_pp").advantages(grouped))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
