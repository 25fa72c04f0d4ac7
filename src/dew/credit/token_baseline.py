"""OTB, the optimal token baseline: arXiv:2602.07078."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_by_token, check_shape
from dew.ops import at_least_float32, masked_sum


def token_baseline_advantages(
    rewards: Float[Tensor, "*P G"],
    logp: Float[Tensor, "*P G T"],
    sum_sq: Float[Tensor, "*P G T"],
    mask: Bool[Tensor, "*P G T"],
) -> Float[Tensor, "*P G T"]:
    """The reward minus a baseline that weights each answer by the energy of its gradient so far.

        Wᵢₜ = Σ_{j≤t} (1 − 2πᵢⱼ + Σ_v π_v²)      ‖∂ log π / ∂z‖² of the tokens up to t: certain tokens add nothing
        Bₜ  = Σᵢ rᵢ Wᵢₜ / Σᵢ Wᵢₜ                 over the answers that are alive at t
        Aᵢₜ = rᵢ − Bₜ                            B is 0 where only one answer is alive

    0 where `mask` is False.
    """
    mask = check_by_token(mask, logp=logp, sum_sq=sum_sq)
    check_shape("rewards", rewards, mask.shape[:-1], "answer (*P, G)")
    r = torch.where(mask, at_least_float32(rewards).unsqueeze(-1), 0)
    energy = 1 - 2 * at_least_float32(logp).exp() + at_least_float32(sum_sq)
    W = torch.where(mask, energy, 0).clamp_min(0).cumsum(-1)
    B = masked_sum(r * W, mask, -2) / (masked_sum(W, mask, -2) + 1e-8)
    alone = mask.sum(-2, keepdim=True) < 2
    return torch.where(mask, r - torch.where(alone, 0, B), 0)
