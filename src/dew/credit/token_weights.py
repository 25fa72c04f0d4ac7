"""Weights, penalties, bonuses and baselines for single tokens: Clip-Cov, KL-Cov, forking tokens, the entropy-shaped
advantage, STEER, OTB, GEPO, FIPO.

The batch is everything passed to a call. π is the sampling policy, unless a docstring says otherwise.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_by_token, check_live_entropy, check_present, check_shape, check_start, check_tensors
from dew.errors import ConfigError
from dew.ops import PG, PGT, Mask, MaskPGT, Values, at_least_float32, masked_mean, masked_sum, standardize

LEAST_LOGP = math.log(1e-8)
"""STEER: minimum of log π, as in the authors' code. Otherwise a single token at −40 would determine k for the batch."""
LEAST = 0.02
"""STEER: if the largest |Ω| is below this, weights stay closer to 1; the constant of the authors' code."""
IGNORED = 10.0
"""FIPO: tokens with a ratio above this do not affect the tokens before them, as in the authors' runs."""
UNSAFE = 4.0
"""FIPO: a token with a negative advantage and a ratio above this gets no weight above 1."""


def forking_mask(entropy: Values, mask: Mask, *, keep: float = 0.2) -> Mask:
    """The 80/20 rule, Wang et al. 2025, arXiv:2506.01939: train only on high-entropy tokens.

    True if the entropy is at least the ⌈keep · N⌉-th largest of the batch's N live tokens; ties are kept.
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


def entropy_advantages(
    advantages: PG | PGT, entropy: PGT, mask: MaskPGT, *, alpha: float = 0.4, kappa: float = 2.0
) -> PGT:
    """Aᵢₜ + min(α · Hᵢₜ, |Aᵢₜ| / κ), with a bonus that never flips a sign: Cheng et al. 2025, arXiv:2506.14758.

    `advantages` has one value per answer or one per token. H is the current policy's entropy, without gradient.
    0 where `mask` is False.
    """
    mask = check_live_entropy(entropy, mask)
    check_tensors(advantages=advantages)
    if not (alpha >= 0 and kappa > 1):
        raise ConfigError(f"alpha={alpha}, kappa={kappa}: give alpha >= 0 and kappa > 1; the paper uses 0.4 and 2.")
    A = at_least_float32(advantages)
    if A.shape == entropy.shape[:-1]:
        A = A.unsqueeze(-1).expand(entropy.shape)
    check_shape("advantages", A, entropy.shape, "answer (*P, G) or token (*P, G, T)")
    return torch.where(mask, A + entropy_bonus(A, entropy, alpha=alpha, kappa=kappa), 0)


def entropy_bonus(advantages: PGT, entropy: PGT, *, alpha: float, kappa: float) -> PGT:
    """The bonus of `entropy_advantages` alone. It checks nothing, since a loss should not wait for the GPU."""
    return torch.minimum(alpha * at_least_float32(entropy).clamp_min(0), advantages.abs() / kappa)


def covariance(advantages: Values, logp: Values, mask: Mask) -> Float[Tensor, " N"]:
    """Covariance of advantage and log-probability at the N live tokens: Cui et al. 2025, arXiv:2505.22617.

        covᵢₜ = (Aᵢₜ − mean A) (log πᵢₜ − mean log π)          means over all live tokens of the batch

    The few tokens with a large covariance cause most of the loss of entropy. The result does not depend on padding.
    """
    mask = check_by_token(mask, advantages=advantages, logp=logp)
    A, log_pi = (at_least_float32(x[mask]) for x in (advantages, logp))
    return (A - A.mean()) * (log_pi - log_pi.mean())


def clip_cov_mask(
    advantages: Values, logp: Values, mask: Mask, *, share: float = 2e-4, low: float = 1.0, high: float = 5.0
) -> Mask:
    """Clip-Cov: True on max(1, ⌊share · N⌋) of the N live tokens, drawn from those with low < cov < high.

    The draw depends only on the batch, and not on the order of its rows: all processes of a run draw the same tokens.
    """
    if not low < high:
        raise ConfigError(f"cov_low={low}, cov_high={high}: expected low < high, e.g. 1 and 5.")
    cov = covariance(advantages, logp, mask)
    order = cov.argsort()
    candidates = order[(cov[order] > low) & (cov[order] < high)]
    generator = torch.Generator().manual_seed(1_000_003 * len(cov) + len(candidates))
    drawn = torch.randperm(len(candidates), generator=generator).to(candidates.device)[: _count(share, cov)]
    return _only(candidates[drawn], mask)


def kl_cov_mask(advantages: Values, logp: Values, mask: Mask, *, share: float = 2e-4) -> Mask:
    """KL-Cov: True on the max(1, ⌊share · N⌋) of the N live tokens that have the largest covariance."""
    cov = covariance(advantages, logp, mask)
    return _only(cov.topk(_count(share, cov)).indices, mask)


def _count(share: float, cov: Tensor) -> int:
    if not 0 < share <= 1:
        raise ConfigError(f"cov_share={share}: the share of tokens to hold back. Give 0 < share <= 1, e.g. 2e-4.")
    return min(len(cov), max(1, int(share * len(cov) + 1e-9)))


def _only(chosen: Tensor, mask: Tensor) -> Tensor:
    """A mask that is True on the `chosen` live tokens, given by index."""
    out = torch.zeros(mask.shape, dtype=torch.bool, device=mask.device)
    out.view(-1)[mask.flatten().nonzero()[chosen, 0]] = True
    return out


def steer_weights(advantages: Values, logp: Values, entropy: Values, mask: Mask, *, least: float = 0.8) -> Values:
    """STEER, Hao et al. 2025, arXiv:2510.10150: smaller weights where the update would change the entropy more.

        Ωᵢₜ = Aᵢₜ (1 − πᵢₜ) (log πᵢₜ + Hᵢₜ)                    first-order change of the entropy, on-policy
        wᵢₜ = exp(−k |Ωᵢₜ|)    k = −log(least) / max(max |Ω|, 0.02)         π ≥ 1e-8

    max |Ω| is over the batch. 0 where `mask` is False.
    """
    mask = check_live_entropy(entropy, mask)
    mask = check_by_token(mask, advantages=advantages, logp=logp)
    if not 0 < least <= 1:
        raise ConfigError(f"least={least}: the smallest weight of a token. Give 0 < least <= 1; the authors use 0.8.")
    A, log_pi, H = (torch.where(mask, at_least_float32(x), 0) for x in (advantages, logp, entropy))
    change = (A * -log_pi.expm1() * (log_pi.clamp_min(LEAST_LOGP) + H)).abs()
    k = -math.log(least) / change.max().clamp_min(LEAST) if change.numel() else 0.0
    return torch.where(mask, (-k * change).exp(), 0)


def token_baseline_advantages(rewards: PG, logp: PGT, sum_sq: PGT, mask: MaskPGT) -> PGT:
    """OTB, arXiv:2602.07078: subtract a baseline that weights each answer by the energy of its gradient so far.

        Wᵢₜ = Σ_{j≤t} (1 − 2πᵢⱼ + Σ_v π_v²)      Σ ‖∂ log π / ∂z‖² of the tokens up to t; confident tokens add nothing
        Bₜ  = Σᵢ rᵢ Wᵢₜ / Σᵢ Wᵢₜ                 over the answers that are alive at t
        Aᵢₜ = rᵢ − Bₜ                            B is 0 where only one answer is alive

    0 where `mask` is False.
    """
    mask = check_by_token(mask, logp=logp, sum_sq=sum_sq)
    check_shape("rewards", rewards, mask.shape[:-1], "answer (*P, G)")
    check_present(rewards, mask.any(-1))
    check_start(mask)
    r = torch.where(mask, at_least_float32(rewards).unsqueeze(-1), 0)
    energy = 1 - 2 * at_least_float32(logp).exp() + at_least_float32(sum_sq)
    W = torch.where(mask, energy, 0).clamp_min(0).cumsum(-1)
    B = masked_sum(r * W, mask, -2) / (masked_sum(W, mask, -2) + 1e-8)
    alone = mask.sum(-2, keepdim=True) < 2
    return torch.where(mask, r - torch.where(alone, 0, B), 0)


def entropy_bands(
    logp: PGT, mask: MaskPGT, *, low: float = 0.2, high: float = 0.3
) -> tuple[Bool[Tensor, "*P"], Bool[Tensor, "*P"]]:
    """GEPO, Cheng et al. 2026, arXiv:2607.16850: (*P) masks of the groups with low and with high entropy.

        H_g = −Σᵢₜ log πᵢₜ / Σᵢ lenᵢ          the group's entropy, estimated from its own tokens (Eq. 4)
        low: H_g < μ − low · σ                high: H_g > μ + high · σ (Eq. 8)

    μ and σ are over the groups passed to this call. The paper smooths the thresholds over training (Eq. 9).
    """
    mask = check_by_token(mask, logp=logp)
    live = mask.flatten(-2).any(-1)
    H = -masked_mean(at_least_float32(logp), mask, (-2, -1))[..., 0, 0]
    centred = standardize(H, live, tuple(range(H.ndim)), scale=False)
    sigma = (centred.square().sum() / (live.sum() - 1).clamp_min(1)).sqrt()
    return live & (centred < -low * sigma), live & (centred > high * sigma)


def future_weights(
    log_w: Values, advantages: Values, mask: Mask, *, half_life: float = 32.0, low: float = 1.0, high: float = 1.2
) -> Values:
    """FIPO, Ma et al. 2026, arXiv:2603.19835: weights by how much more likely the tokens from t on have become.

        Fₜ = Σ_{k ≥ t} γ^(k − t) log wₖ      γ = 2^(−1 / half_life), over live tokens with wₖ ≤ 10
        fₜ = clip(exp Fₜ, low, high)         where A < 0 and wₜ > 4: then clipped to (0.8, 1)

    1 on-policy and where `mask` is False. No gradient flows through the weights.
    """
    mask = check_by_token(mask, log_w=log_w, advantages=advantages)
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
