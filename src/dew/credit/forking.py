"""Forking tokens, the 80/20 rule: Wang et al. 2025, arXiv:2506.01939."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_live_entropy
from dew.errors import ConfigError


def forking_mask(
    entropy: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, keep: float = 0.2
) -> Bool[Tensor, "*shape"]:
    """True on the live tokens whose entropy is at least the ⌈keep · N⌉-th largest of the batch's N live tokens.

    Ties with that token stay. The batch is everything that is passed: the threshold is one number.
    """
    mask = check_live_entropy(entropy, mask)
    if not 0 < keep <= 1:
        raise ConfigError(f"keep={keep}: the share of tokens to train on. Give 0 < keep <= 1; the paper uses 0.2.")
    live = entropy.detach()[mask]
    if live.numel() == 0:
        return torch.zeros_like(mask)
    kept = math.ceil(keep * live.numel() - 1e-9)  # 0.1 * 30 is a hair above 3 in floating point
    threshold = live.kthvalue(live.numel() - kept + 1).values
    return mask & (entropy.detach() >= threshold)
