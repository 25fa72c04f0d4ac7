"""Masked reductions, the building blocks of every credit function.

A mask is True on values that count. Values under a False mask are never read and may be NaN.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

STD_EPS = 1e-4
"""The same constant as in TRL. A smaller one would turn float32 rounding into advantages."""

Dims = int | tuple[int, ...]


def at_least_float32(x: Tensor) -> Tensor:
    """The same values, detached from the graph, in float32 or wider: half precision is for storage only."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def masked_sum(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: Dims, keepdim: bool = True
) -> Float[Tensor, "..."]:
    """Σ x over the True entries of `mask`."""
    return torch.where(mask, x, 0).sum(dim, keepdim=keepdim)


def masked_mean(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: Dims, keepdim: bool = True
) -> Float[Tensor, "..."]:
    """Mean of x over the True entries of `mask`; 0 where there are none."""
    count = mask.sum(dim, keepdim=keepdim).clamp_min(1)
    return masked_sum(x, mask, dim, keepdim) / count


def standardize(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: Dims, *, scale: bool = True
) -> Float[Tensor, "*shape"]:
    """(x − mean) / (std + 1e-4) with the sample standard deviation, both over the True entries of `mask`.

    0 under a False mask. A lone entry has no spread and becomes 0. With `scale=False` only the mean is subtracted.
    """
    centred = torch.where(mask, x - masked_mean(x, mask, dim), 0)
    if not scale:
        return centred
    freedom = (mask.sum(dim, keepdim=True) - 1).clamp_min(1)
    std = (centred.square().sum(dim, keepdim=True) / freedom).sqrt()
    return centred / (std + STD_EPS)
