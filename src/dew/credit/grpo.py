"""GRPO (Shao et al. 2024, arXiv:2402.03300), Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), and the filter and
length penalty of DAPO (Yu et al. 2025, arXiv:2503.14476)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dew.checks import check_answers, check_present, check_shape
from dew.errors import ConfigError
from dew.ops import at_least_float32, standardize


def grpo_advantages(
    rewards: Float[Tensor, "*P G"],
    present: Bool[Tensor, "*P G"] | None = None,
    *,
    scale: bool = True,
) -> Float[Tensor, "*P G"]:
    """The reward of each answer relative to the mean of its group.

        Aᵢ = (rᵢ − mean r) / (std r + 1e-4)     GRPO
        Aᵢ =  rᵢ − mean r                       Dr. GRPO, `scale=False`

    `present` is False on the padding of a ragged group; such answers are not read and get 0.
    """
    present = check_present(rewards, present)
    r = torch.where(present, at_least_float32(rewards), 0)
    return standardize(r, present, -1, scale=scale)


def group_relative(
    rewards: Float[Tensor, "*P G"], present: Bool[Tensor, "*P G"] | None = None
) -> Float[Tensor, "*P G"]:
    """GRPO's advantages, exactly 0 for an answer whose reward differs from the mean by no more than rounding."""
    present = check_present(rewards, present)
    size = torch.where(present, at_least_float32(rewards), 0).abs().amax(-1, keepdim=True)
    differs = grpo_advantages(rewards, present, scale=False).abs() > 1e-5 * size
    return torch.where(differs, grpo_advantages(rewards, present), 0)


def wrong_sign(
    advantages: Float[Tensor, "*P G T"],
    rewards: Float[Tensor, "*P G"],
    present: Bool[Tensor, "*P G"] | None = None,
) -> Bool[Tensor, "*P G T"]:
    """True on tokens that are rewarded although their answer is below its group's mean, or penalised although it is
    above. With rewards of 0 and 1: rewarded in a wrong answer, or penalised in a correct one."""
    check_shape("rewards", rewards, advantages.shape[:-1], "answer (*P, G)")
    return at_least_float32(advantages) * group_relative(rewards, present).unsqueeze(-1) < 0


def has_signal(correct: Bool[Tensor, "*P G"], present: Bool[Tensor, "*P G"] | None = None) -> Bool[Tensor, "*P"]:
    """0 < n < G: the group has a correct and a wrong answer, so they can be compared (Eq. 8).

    Based on raw correctness: a shaped or summed reward always varies, and filtering on it would keep noise.
    """
    present = check_answers(correct, present)
    return (correct & present).any(-1) & (~correct & present).any(-1)


def soft_overlong(
    lengths: Int[Tensor, "*shape"] | Float[Tensor, "*shape"], *, limit: int, buffer: int
) -> Float[Tensor, "*shape"]:
    """The soft overlong punishment of DAPO, added to an answer's reward (Eq. 13).

    0                            len ≤ limit − buffer
    ((limit − buffer) − len)     in between
        / buffer
    −1                           limit < len
    """
    if not 0 < buffer <= limit:
        raise ConfigError(
            f"soft_overlong with limit={limit}, buffer={buffer}: the penalty grows over `buffer` tokens before "
            "the limit, so 0 < buffer <= limit. DAPO uses 16384 + 4096 = 20480 and 4096."
        )
    dtype = torch.promote_types(lengths.dtype, torch.float32)
    return (((limit - buffer) - lengths.to(dtype)) / buffer).clamp(-1, 0)
