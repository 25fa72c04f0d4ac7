"""FIPO, future-KL influenced policy optimization: Ma et al. 2026, arXiv:2603.19835."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_by_token
from dew.ops import at_least_float32

IGNORED = 10.0
"""A ratio above this does not count for the tokens before it, as in the authors' runs."""
UNSAFE = 4.0
"""A token of a wrong answer whose ratio is above this gets no weight above 1."""


def future_weights(
    log_w: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    *,
    half_life: float = 32.0,
    low: float = 1.0,
    high: float = 1.2,
) -> Float[Tensor, "*B T"]:
    """Whether the tokens from t on have become more or less likely since they were sampled.

        Fₜ = Σ_{k ≥ t} γ^(k − t) log wₖ      γ = 2^(−1 / half_life), over live tokens with wₖ ≤ 10
        fₜ = clip(exp Fₜ, low, high)         where A < 0 and wₜ > 4: then clipped to (0.8, 1)

    1 on-policy, 1 where `mask` is False. No gradient flows through it.
    """
    check_by_token(mask, log_w=log_w, advantages=advantages)
    log_w = torch.where(mask, at_least_float32(log_w), 0)
    w = log_w.exp()
    F = torch.where(w > IGNORED, 0, log_w)
    T, span = F.shape[-1], 1
    while span < T:  # after each pass, Fₜ covers the tokens t to t + 2 span − 1
        later = torch.nn.functional.pad(F, (0, span))[..., span:]
        F, span = F + 2 ** (-span / half_life) * later, 2 * span
    f = F.exp().clamp(low, high)
    f = torch.where((advantages < 0) & (w > UNSAFE), f.clamp(0.8, 1.0), f)
    return torch.where(mask, f, 1)
