"""The slow lines that define the operator. Every other implementation is measured against these.

z = softcap · tanh((h Wᵀ + b) / softcap) / T    logp = z_y − log Σ_v e^{z_v}    H = −Σ_v p_v log p_v    Σ_v p_v²
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dew.kernels.head import Head

IGNORE = -100
"""Marks rows without a target: output 0, no gradient."""


def logits(hidden: Float[Tensor, "N D"], head: Head) -> Float[Tensor, "N V"]:
    """All scores, in float32 or wider."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    z = hidden.to(wide) @ head.weight.to(wide).T
    if head.bias is not None:
        z = z + head.bias.to(wide)
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z / head.temperature


def logprob_entropy(
    hidden: Float[Tensor, "N D"], head: Head, targets: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target; entropy and sum of squares of each row's distribution."""
    live = targets != IGNORE
    logq = torch.log_softmax(logits(hidden, head), -1)
    logp = logq.gather(-1, torch.where(live, targets, 0)[:, None]).squeeze(-1)
    p = logq.exp()
    entropy = -(p * logq.masked_fill(p == 0, 0)).sum(-1)  # 0 · log 0 = 0
    squares = p.square().sum(-1)
    return torch.where(live, logp, 0), torch.where(live, entropy, 0), torch.where(live, squares, 0)
