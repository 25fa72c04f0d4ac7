"""GRPO (Shao et al. 2024, arXiv:2402.03300) and Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_present, check_shape
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
