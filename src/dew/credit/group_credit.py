"""Other ways to turn the rewards of a group into advantages: MaxRL, QAE, W-REINFORCE, REINFORCE++."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_answers, check_by_token, check_present, check_shape
from dew.errors import ConfigError
from dew.ops import STD_EPS, at_least_float32, masked_mean, standardize


def maxrl_advantages(
    rewards: Float[Tensor, "*P G"],
    present: Bool[Tensor, "*P G"] | None = None,
    *,
    extra: Float[Tensor, "*P G"] | None = None,
) -> Float[Tensor, "*P G"]:
    """MaxRL, Tajwar et al. 2026, arXiv:2602.02710: hard problems count more.

        Aᵢ = (rᵢ + eᵢ − mean(r + e)) / max(mean r, max r / G)          0 if max r ≤ 0

    For 0/1 rewards its expectation is the gradient of the log-likelihood of a correct answer, truncated at order G.
    Other rewards e do not change the success rate that it divides by. Rewards r >= 0 have mean r >= max r / G, so the
    second bound only holds for negative ones: their mean can be next to 0, or below.
    """
    present = check_present(rewards, present)
    r = torch.where(present, at_least_float32(rewards), 0)
    total = r if extra is None else r + torch.where(present, at_least_float32(extra), 0)
    best = torch.where(present, r, -torch.inf).amax(-1, keepdim=True)
    rate = torch.maximum(masked_mean(r, present, -1), best / present.sum(-1, keepdim=True).clamp_min(1))
    return torch.where(best > 0, standardize(total, present, -1, scale=False) / torch.where(best > 0, rate, 1), 0)


def qae_advantages(
    rewards: Float[Tensor, "*P G"], present: Bool[Tensor, "*P G"] | None = None, *, quantile: float = 0.4
) -> Float[Tensor, "*P G"]:
    """Quantile Advantage Estimation, Wu et al. 2025, arXiv:2509.22611: a quantile instead of the mean.

        Aᵢ = (rᵢ − Q_K r) / (std r + 1e-4)   Q_K: the smallest reward that at least K · G of the rewards do not exceed

    For 0/1 rewards: if at most 1 − K of the answers are correct, only these get credit; otherwise only the wrong ones.
    """
    present = check_present(rewards, present)
    if not 0 < quantile < 1:
        raise ConfigError(f"quantile={quantile}: give 0 < quantile < 1, e.g. 0.4.")
    r = torch.where(present, at_least_float32(rewards), 0)
    size = present.sum(-1, keepdim=True)
    rank = (quantile * size - 1e-6).ceil().long().clamp_min(1)  # 0.4 · 5 is a hair above 2 in floating point
    baseline = torch.where(present, r, torch.inf).sort(-1).values.gather(-1, rank - 1)
    centred = standardize(r, present, -1, scale=False)
    std = (centred.square().sum(-1, keepdim=True) / (size - 1).clamp_min(1)).sqrt()
    return torch.where(present, (r - baseline) / (std + STD_EPS), 0)


def w_reinforce_advantages(
    correct: Bool[Tensor, "*P G"], present: Bool[Tensor, "*P G"] | None = None, *, positive: float = 0.1
) -> Float[Tensor, "*P G"]:
    """Weighted-REINFORCE, Zhu et al. 2025, arXiv:2506.01347: mostly learn what to avoid.

    Aᵢ = λ on O⁺, −1 on O⁻               no baseline; λ = 0 is negative sample reinforcement (NSR)
    """
    present = check_answers(correct, present)
    if not 0 <= positive < float("inf"):
        raise ConfigError(f"positive={positive}: give a number >= 0; the paper uses 0.1.")
    A = torch.where(correct, torch.tensor(float(positive), device=correct.device), -1.0)
    return torch.where(present, A, 0)


def reinforce_pp_advantages(
    rewards: Float[Tensor, "*P G"], mask: Bool[Tensor, "*P G T"], present: Bool[Tensor, "*P G"] | None = None
) -> Float[Tensor, "*P G T"]:
    """REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262: one mean and std for the whole batch.

        A′ᵢₜ = rᵢ − mean r of the group      Aᵢₜ = (A′ᵢₜ − mean) / (std + 1e-4) over all live tokens

    The batch is everything that is passed.
    """
    present = check_present(rewards, present)
    mask = check_by_token(mask)
    check_shape("rewards", rewards, mask.shape[:-1], "answer (*P, G)")
    r = torch.where(present, at_least_float32(rewards), 0)
    centred = torch.where(mask, standardize(r, present, -1, scale=False).unsqueeze(-1), 0)
    return standardize(centred, mask, tuple(range(mask.ndim)))
