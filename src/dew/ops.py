"""Masked reductions, the building blocks of every credit function.

A mask is True on values that count. Values under a False mask are never read and may be NaN.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

STD_EPS = 1e-4
"""The same constant as in TRL. A smaller one would turn float32 rounding into advantages."""

Dims = int | tuple[int, ...]


def at_least_float32(x: Tensor) -> Tensor:
    """The same values, detached from the graph, in float32 or wider: half precision is for storage only."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def masked_sum(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: Dims) -> Float[Tensor, "..."]:
    """Σ x over the True entries of `mask`; `dim` stays, with one entry."""
    return torch.where(mask, x, 0).sum(dim, keepdim=True)


def masked_mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: Dims) -> Float[Tensor, "..."]:
    """Mean of x over the True entries of `mask`, 0 where there are none; `dim` stays, with one entry."""
    return masked_sum(x, mask, dim) / mask.sum(dim, keepdim=True).clamp_min(1)


def masked_mean_by(
    x: Float[Tensor, "*P G T"], mask: Bool[Tensor, "*P G T"], label: Int[Tensor, "*P G T"]
) -> Float[Tensor, "*P G T"]:
    """At every entry, the mean of x over the True entries of its group (last two axes) that have its label.

    Labels are 0 to T − 1. Summed in float64, where the order in which a GPU adds does not show.
    """
    key = label.flatten(-2)

    def total(values: Tensor) -> Tensor:
        sums = torch.zeros(*key.shape[:-1], x.shape[-1], dtype=torch.float64, device=x.device)
        return sums.scatter_add(-1, key, torch.where(mask, values, 0).double().flatten(-2))

    mean = total(x) / total(torch.ones_like(x)).clamp_min(1)
    return mean.gather(-1, key).view_as(x).to(x.dtype)


def turn_numbers(mask: Bool[Tensor, "*P G T"]) -> Int[Tensor, "*P G T"]:
    """0, 1, 2, ...: the turn of each token. A turn is a run of True entries, which tool output (False) ends."""
    first = mask & ~torch.nn.functional.pad(mask, (1, 0))[..., :-1]
    return (first.cumsum(-1) - 1).clamp_min(0)


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
