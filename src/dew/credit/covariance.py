"""Clip-Cov and KL-Cov: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning", arXiv:2505.22617.

    covᵢₜ = (Aᵢₜ − mean A) (log πᵢₜ − mean log π)          means over all live tokens of the batch

The few tokens with a large covariance account for most of the loss of entropy. π is the policy that sampled; the batch
is everything that is passed.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_by_token
from dew.errors import ConfigError
from dew.ops import at_least_float32


def covariance(
    advantages: Float[Tensor, "*shape"], logp: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, " N"]:
    """covᵢₜ of the N live tokens, bit for bit the same however wide the padding is."""
    mask = check_by_token(mask, advantages=advantages, logp=logp)
    A, log_pi = (at_least_float32(x[mask]) for x in (advantages, logp))
    return (A - A.mean()) * (log_pi - log_pi.mean())


def clip_cov_mask(
    advantages: Float[Tensor, "*shape"],
    logp: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Bool[Tensor, "*shape"]:
    """Clip-Cov: True on max(1, ⌊share · N⌋) of the N live tokens, drawn from those with low < cov < high.

    The draw depends on the batch alone, so that every process of a run makes the same one.
    """
    _check_share(share)
    if not low < high:
        raise ConfigError(f"cov_low={low}, cov_high={high}: expected low < high, e.g. 1 and 5.")
    cov = covariance(advantages, logp, mask)
    candidates = ((cov > low) & (cov < high)).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(1_000_003 * len(cov) + len(candidates))
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    return _only(candidates[order[: _count(share, cov)]], mask)


def kl_cov_mask(
    advantages: Float[Tensor, "*shape"],
    logp: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    share: float = 2e-4,
) -> Bool[Tensor, "*shape"]:
    """KL-Cov: True on the max(1, ⌊share · N⌋) of the N live tokens that have the largest covariance."""
    _check_share(share)
    cov = covariance(advantages, logp, mask)
    return _only(cov.topk(_count(share, cov)).indices, mask)


def _count(share: float, cov: Tensor) -> int:
    return min(len(cov), max(1, int(share * len(cov) + 1e-9)))


def _only(chosen: Tensor, mask: Tensor) -> Tensor:
    """True on these of the live tokens."""
    out = torch.zeros_like(mask)
    out.view(-1)[mask.flatten().nonzero()[chosen, 0]] = True
    return out


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ConfigError(f"cov_share={share}: the share of tokens to hold back. Give 0 < share <= 1, e.g. 2e-4.")
