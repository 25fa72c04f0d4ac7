"""STEER, entropy-change-aware reweighting: Hao et al. 2025, arXiv:2510.10150."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_by_token, check_live_entropy
from dew.errors import ConfigError
from dew.ops import at_least_float32

LEAST_LOGP = math.log(1e-8)
"""Less likely tokens count as this likely, as in the authors' code: one at log π = −40 would set k for the batch."""
LEAST = 0.02
"""Below this largest |Ω|, weights stay closer to 1: the constant of the authors' code."""


def steer_weights(
    advantages: Float[Tensor, "*shape"],
    logp: Float[Tensor, "*shape"],
    entropy: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    least: float = 0.8,
) -> Float[Tensor, "*shape"]:
    """A weight for each token: small where the update would change the entropy most.

        Ωᵢₜ = Aᵢₜ (1 − πᵢₜ) (log πᵢₜ + Hᵢₜ)                    first-order change of the entropy, on-policy
        wᵢₜ = exp(−k |Ωᵢₜ|)    k = −log(least) / max(max |Ω|, 0.02)         π ≥ 1e-8

    The largest |Ω| is that of the batch, which is everything that is passed. 0 where `mask` is False.
    """
    mask = check_live_entropy(entropy, mask)
    mask = check_by_token(mask, advantages=advantages, logp=logp)
    if not 0 < least <= 1:
        raise ConfigError(f"least={least}: the smallest weight of a token. Give 0 < least <= 1; the authors use 0.8.")
    A, log_pi, H = (torch.where(mask, at_least_float32(x), 0) for x in (advantages, logp, entropy))
    change = (A * -log_pi.expm1() * (log_pi.clamp_min(LEAST_LOGP) + H)).abs()
    k = -math.log(least) / change.max().clamp_min(LEAST) if change.numel() else 0.0
    return torch.where(mask, (-k * change).exp(), 0)
