"""Masked reductions, the building blocks of every credit function.

A mask is True on values that count. Values under a False mask are never read and may be NaN.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

STD_EPS = 1e-4
"""Added to the standard deviation, as in TRL. A smaller value would turn float32 rounding into advantages."""
H_FLOOR = 1e-6
"""Minimum entropy in nats. Below it, 1/H explodes and a single confident token gets all the penalty."""

Dims = int | tuple[int, ...]
Values = Float[Tensor, "*shape"]
Mask = Bool[Tensor, "*shape"]
Labels = Int[Tensor, "*shape"]
PG = Float[Tensor, "*P G"]
PGT = Float[Tensor, "*P G T"]
MaskPG = Bool[Tensor, "*P G"]
MaskPGT = Bool[Tensor, "*P G T"]
Ids = Int[Tensor, "*P G T"]
"""Tensor types by shape, for signatures: P problems, G answers to each, T tokens; or any shape."""


def at_least_float32(x: Tensor) -> Tensor:
    """The same values, detached from the graph, in float32 or wider: half precision is for storage only."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def masked_sum(x: Values, mask: Mask, over: Dims | Labels) -> Float[Tensor, "..."]:
    """Σ x over the True entries of `mask`, along dims (kept with size 1) or by the labels of `same_labels`.

    By label, each entry gets the sum of all entries with its label, in float64, so that the order in which a GPU adds
    does not matter.
    """
    x = torch.where(mask, x, 0)
    if not isinstance(over, Tensor):
        return x.sum(over, keepdim=True)
    sums = torch.zeros(over.numel(), dtype=torch.float64, device=x.device)
    return sums.index_add_(0, over.flatten(), x.double().flatten())[over]


def masked_mean(x: Values, mask: Mask, over: Dims | Labels) -> Float[Tensor, "..."]:
    """Mean of x over the True entries of `mask`, along dims or by label as in `masked_sum`; 0 if there are none."""
    if isinstance(over, Tensor):
        return (masked_sum(x, mask, over) / masked_sum(torch.ones_like(x), mask, over).clamp_min(1)).to(x.dtype)
    return masked_sum(x, mask, over) / mask.sum(over, keepdim=True).clamp_min(1)


def same_labels(key: Ids) -> Ids:
    """Labels 0, 1, 2, ...: equal exactly where the keys are equal within a group (the last two axes)."""
    group = torch.arange(key.shape[:-2].numel(), device=key.device).view(*key.shape[:-2], 1, 1)
    values, number = key.unique(return_inverse=True)
    return (group * len(values) + number).unique(return_inverse=True)[1]


def turn_numbers(mask: MaskPGT) -> Ids:
    """The turn of each token: 0, 1, 2, ... A turn is a run of True entries, ended by tool output (False)."""
    first = mask & ~torch.nn.functional.pad(mask, (1, 0))[..., :-1]
    return (first.cumsum(-1) - 1).clamp_min(0)


def standardize(x: Values, mask: Mask, dim: Dims, *, scale: bool = True) -> Values:
    """(x − mean) / (std + 1e-4) with the sample standard deviation, both over the True entries of `mask`.

    0 under a False mask. A lone entry has no spread and becomes 0. With `scale=False` only the mean is subtracted.
    """
    centred = torch.where(mask, x - masked_mean(x, mask, dim), 0)
    if not scale:
        return centred
    freedom = (mask.sum(dim, keepdim=True) - 1).clamp_min(1)
    std = (centred.square().sum(dim, keepdim=True) / freedom).sqrt()
    return centred / (std + STD_EPS)
