"""Entropy-shaped advantage: Cheng et al. 2025, "Reasoning with Exploration", arXiv:2506.14758."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_live_entropy, check_shape
from dew.errors import ConfigError
from dew.ops import at_least_float32


def entropy_advantages(
    advantages: Float[Tensor, "*P G"] | Float[Tensor, "*P G T"],
    entropy: Float[Tensor, "*P G T"],
    mask: Bool[Tensor, "*P G T"],
    *,
    alpha: float = 0.4,
    kappa: float = 2.0,
) -> Float[Tensor, "*P G T"]:
    """Aᵢₜ + min(α · Hᵢₜ, |Aᵢₜ| / κ): a bonus for entropy that never flips the sign of an advantage.

    `advantages` has one value per answer or one per token. H is that of the current policy, without gradient.
    0 where `mask` is False.
    """
    mask = check_live_entropy(entropy, mask)
    if not (alpha >= 0 and kappa > 1):
        raise ConfigError(f"alpha={alpha}, kappa={kappa}: give alpha >= 0 and kappa > 1; the paper uses 0.4 and 2.")
    A = at_least_float32(advantages)
    if A.shape == entropy.shape[:-1]:
        A = A.unsqueeze(-1).expand(entropy.shape)
    check_shape("advantages", A, entropy.shape, "answer (*P, G) or token (*P, G, T)")
    bonus = torch.minimum(alpha * at_least_float32(entropy).clamp_min(0), A.abs() / kappa)
    return torch.where(mask, A + bonus, 0)
