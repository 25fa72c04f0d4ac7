"""Credit per answer, from the rewards of its group: GRPO (Shao et al. 2024, arXiv:2402.03300) and Dr. GRPO (Liu et al.
2025, arXiv:2503.20783); MaxRL, QAE, W-REINFORCE, REINFORCE++; and penalties for long answers."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dew.checks import check_answers, check_by_token, check_present, check_shape, check_tensors
from dew.errors import ConfigError
from dew.ops import PG, PGT, STD_EPS, Labels, MaskPG, MaskPGT, Values, at_least_float32, masked_mean, standardize

ROUNDING = 1e-9


def grpo_advantages(rewards: PG, present: MaskPG | None = None, *, scale: bool = True) -> PG:
    """The reward of each answer relative to the mean of its group.

        Aᵢ = (rᵢ − mean r) / (std r + 1e-4)     GRPO
        Aᵢ =  rᵢ − mean r                       Dr. GRPO, `scale=False`

    `present` is False on the padding of a ragged group; such answers are not read and get 0.
    """
    present = check_present(rewards, present)
    return standardize(at_least_float32(rewards), present, -1, scale=scale)


def group_relative(rewards: PG, present: MaskPG | None = None) -> PG:
    """GRPO's advantages, but exactly 0 for an answer whose reward equals the mean up to rounding."""
    present = check_present(rewards, present)
    r = torch.where(present, at_least_float32(rewards), 0)
    differs = standardize(r, present, -1, scale=False).abs() > 1e-5 * r.abs().amax(-1, keepdim=True)
    return torch.where(differs, standardize(r, present, -1), 0)


def wrong_sign(advantages: PGT, rewards: PG, present: MaskPG | None = None) -> MaskPGT:
    """True on tokens that are rewarded although their answer's reward is below the group mean, or penalised although it
    is above. With rewards of 0 and 1: rewarded in a wrong answer, or penalised in a correct one."""
    check_tensors(advantages=advantages)
    check_shape("rewards", rewards, advantages.shape[:-1], "answer (*P, G)")
    return at_least_float32(advantages) * group_relative(rewards, present).unsqueeze(-1) < 0


def has_signal(correct: MaskPG, present: MaskPG | None = None) -> Bool[Tensor, "*P"]:
    """True on groups with a correct and a wrong answer, 0 < n < G, so that they can be compared (DAPO, Eq. 8).

    Based on raw correctness: a shaped or summed reward always varies, and filtering on it would keep noise.
    """
    present = check_answers(correct, present)
    return (correct & present).any(-1) & (~correct & present).any(-1)


def maxrl_advantages(rewards: PG, present: MaskPG | None = None, *, extra: PG | None = None) -> PG:
    """MaxRL, Tajwar et al. 2026, arXiv:2602.02710: hard problems get larger advantages.

        Aᵢ = (rᵢ + eᵢ − mean(r + e)) / max(mean r, max r / G)          0 if max r ≤ 0

    For 0/1 rewards the expected gradient is that of the log-likelihood of a correct answer, truncated at order G. The
    other rewards e (`extra`) do not change the divisor, the success rate. Rewards r >= 0 have mean r >= max r / G, so
    the bound max r / G only matters with negative rewards, whose mean can be close to 0 or below.
    """
    present = check_present(rewards, present)
    r = torch.where(present, at_least_float32(rewards), 0)
    total = r
    if extra is not None:
        check_shape("extra", extra, rewards.shape, "answer (*P, G)")
        total = r + torch.where(check_present(extra, present), at_least_float32(extra), 0)
    best = torch.where(present, r, -torch.inf).amax(-1, keepdim=True)
    rate = torch.maximum(masked_mean(r, present, -1), best / present.sum(-1, keepdim=True).clamp_min(1))
    return torch.where(best > 0, standardize(total, present, -1, scale=False) / torch.where(best > 0, rate, 1), 0)


def qae_advantages(rewards: PG, present: MaskPG | None = None, *, quantile: float = 0.4) -> PG:
    """Quantile Advantage Estimation, Wu et al. 2025, arXiv:2509.22611: a quantile as baseline instead of the mean.

        Aᵢ = (rᵢ − Q_K r) / (std r + 1e-4)   Q_K: the smallest reward that at least K · G of the rewards do not exceed

    For 0/1 rewards: if at most a share 1 − K of the answers is correct, only these get credit; else only wrong ones.
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


def w_reinforce_advantages(correct: MaskPG, present: MaskPG | None = None, *, positive: float = 0.1) -> PG:
    """Weighted-REINFORCE, Zhu et al. 2025, arXiv:2506.01347: learn mainly from wrong answers.

    Aᵢ = λ on O⁺, −1 on O⁻               no baseline; λ = 0 is negative sample reinforcement (NSR)
    """
    present = check_answers(correct, present)
    if not 0 <= positive < float("inf"):
        raise ConfigError(f"positive={positive}: give a number >= 0; the paper uses 0.1.")
    return torch.where(present, torch.where(correct, float(positive), -1.0), 0)


def reinforce_pp_advantages(rewards: PG, mask: MaskPGT, present: MaskPG | None = None) -> PGT:
    """REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262: one mean and std for the whole batch.

        A′ᵢₜ = rᵢ − mean r of the group      Aᵢₜ = (A′ᵢₜ − mean) / (std + 1e-4) over all live tokens

    The batch is all groups passed to this call.
    """
    present = check_present(rewards, present)
    mask = check_by_token(mask)
    check_shape("rewards", rewards, mask.shape[:-1], "answer (*P, G)")
    mask = mask & present.unsqueeze(-1)
    centred = torch.where(mask, grpo_advantages(rewards, present, scale=False).unsqueeze(-1), 0)
    return standardize(centred, mask, tuple(range(mask.ndim)))


def soft_overlong(lengths: Labels | Values, *, limit: int, buffer: int) -> Values:
    """The soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476), added to an answer's reward (Eq. 13).

    0                            len ≤ limit − buffer
    ((limit − buffer) − len)     in between
        / buffer
    −1                           limit < len
    """
    check_tensors(lengths=lengths)
    if not 0 < buffer <= limit:
        raise ConfigError(
            f"soft_overlong with limit={limit}, buffer={buffer}: the penalty grows over `buffer` tokens before "
            "the limit, so 0 < buffer <= limit. DAPO uses 16384 + 4096 = 20480 and 4096."
        )
    return (((limit - buffer) - at_least_float32(lengths)) / buffer).clamp(-1, 0)


def group_overlong(
    lengths: Int[Tensor, "*P G"] | PG, correct: MaskPG, present: MaskPG | None = None, *, gamma: float = 0.75
) -> PG:
    """Group Relative Overlong Punishment, Tan et al., arXiv:2508.04349 v6, Appendix D: penalise answers that are long
    relative to their group, except in hard groups.

        easy   n/G ≥ γ       correct answers are penalised, knee L over the correct lengths
        hard   n/G ≤ 1 − γ   no penalty
        else                 knee L over all lengths; correct answers are penalised if n > m, else wrong ones

        L      = max((min + max)/2, mean) of these lengths
        charge = 0 below L,  −½ (len − L)/L on [L, 2L),  −½ from 2L

    n of the group's G answers are correct and m are wrong, judged before the penalty.
    """
    present = check_answers(correct, present)
    check_shape("lengths", lengths, correct.shape, "answer (*P, G)")
    if not 0.5 <= gamma <= 1:
        what = f"gamma={gamma}: below 0.5 a group would be easy and hard at once."
        raise ConfigError(f"{what} Give 0.5 to 1; the paper uses 0.75.")
    won, lost = correct & present, ~correct & present
    n, m = won.sum(-1, keepdim=True), lost.sum(-1, keepdim=True)
    share = n.double() / (n + m).clamp_min(1)
    easy, hard = share >= gamma - ROUNDING, share <= 1 - gamma + ROUNDING

    length = at_least_float32(lengths)
    L = torch.where(easy, _knee(length, won), _knee(length, present))
    charge = -0.5 * ((length - L) / L).clamp(0, 1)
    charged = torch.where(easy | (n > m), won, lost) & (easy | ~hard)
    return torch.where(charged, charge, 0)


def _knee(length: PG, over: MaskPG) -> Float[Tensor, "*P 1"]:
    shortest = torch.where(over, length, torch.inf).amin(-1, keepdim=True)
    longest = torch.where(over, length, -torch.inf).amax(-1, keepdim=True)
    middle = torch.maximum((shortest + longest) / 2, masked_mean(length, over, -1))
    # With nothing to average there is no penalty, so any positive knee will do. Empty answers have length 0.
    return torch.where(over.any(-1, keepdim=True), middle, 1).clamp_min(1e-9)
