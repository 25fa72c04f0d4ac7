"""GRPO (Shao et al. 2024, arXiv:2402.03300) and Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.credit.checks import check_present
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
