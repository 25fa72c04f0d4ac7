"""Ratios, surrogates and reductions: the losses of all algorithms. w is the ratio πθ / π_old of a token."""

from math import inf
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_by_token, check_choice, check_tensors, unmet
from dew.errors import ConfigError, ShapeError
from dew.ops import masked_mean

Ratio = Literal["token", "sequence_mean", "sequence_geometric"]
Reduce = Literal["tokens", "sequences"]
BT = Float[Tensor, "*B T"]
MaskBT = Bool[Tensor, "*B T"]
"""(B, T): B answers, T tokens."""
Surrogate = Literal["clip", "cispo", "sapo", "geo_mean", "dppo_tv", "dppo_kl"]
UNBOUNDED = {"clip": 0.0, "geo_mean": 0.0, "dppo_tv": inf, "dppo_kl": inf}
"""Surrogates that do not bound the ratio from above if the advantage is below this."""

MAX_LOG_RATIO = 20.0
"""|log w| is clamped to this, so that a single bad token cannot make the loss inf or NaN."""

ROUNDING = torch.finfo(torch.bfloat16).eps
"""|log w| up to this, 0.0078, has no penalty. Two passes with the same weights differ by rounding, and the gradient of
|log w| is ±1 however small it is: on-policy, where it should be 0, rounding would give full-size gradients."""


def policy_loss(
    logp: BT, old_logp: BT, advantages: BT | Float[Tensor, "*B"], mask: MaskBT, *, ratio: Ratio = "token",
    reduce: Reduce = "tokens", clip_low: float = 0.2, clip_high: float = 0.28, surrogate: Surrogate = "clip",
    tau_pos: float = 1.0, tau_neg: float = 1.05, count: float | Tensor | None = None, ref_logp: BT | None = None,
    kl_coef: float = 0.0, weight: Float[Tensor, "*B #T"] | None = None, penalty: BT | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:  # fmt: skip
    """The loss to minimise, and statistics of the step.

        token                ŵᵢₜ = wᵢₜ                       GRPO, DAPO, Dr. GRPO, GTPO
        sequence_mean        ŵᵢₜ = meanₜ wᵢₜ                 GRPO-S: the arithmetic mean
        sequence_geometric   ŵᵢₜ = exp(meanₜ log wᵢₜ)        GSPO

        clip    sᵢₜ = min(ŵᵢₜ Aᵢₜ, clip(ŵᵢₜ, 1−ε_low, 1+ε_high) Aᵢₜ)      PPO, arXiv:1707.06347
        cispo   sᵢₜ = sg[clip(ŵᵢₜ, 1−ε_low, 1+ε_high)] Aᵢₜ log πθ          no token loses its gradient, 2506.13585
        sapo    sᵢₜ = 4/τ · σ(τ (ŵᵢₜ − 1)) Aᵢₜ                             a soft gate: τ₊ if A > 0, else τ₋, 2511.20347
        geo_mean  sᵢₜ = exp(meanₜ mᵢₜ) Aᵢₜ         m = min(log w, ε_high) if A > 0, else max(log w, −ε_low), 2507.20673
        dppo_tv   sᵢₜ = sg[ŵᵢₜ] Aᵢₜ log πθ       0 if A > 0 and πθ − π_old > ε_high, or if A ≤ 0 and π_old − πθ > ε_low
        dppo_kl   the same, by KL((π_old, 1 − π_old) ‖ (πθ, 1 − πθ)) instead of |πθ − π_old|                  2602.04879

        ℓᵢₜ = −sᵢₜ + penaltyᵢₜ · |log wᵢₜ| + β · k3(πθ ‖ π_ref)ᵢₜ

        tokens       Σᵢₜ ℓᵢₜ / number of live tokens         every token has the same weight
        sequences    Σᵢ meanₜ ℓᵢₜ / number of sequences      every answer has the same weight

    Args:
        advantages: one per token, or one per answer for all of its tokens.
        mask: True on the tokens that train. Values elsewhere are never read. Only `logp` gets a gradient.
        count: the divisor of the whole batch (tokens or sequences, depending on `reduce`), so that the losses of
            its micro-batches sum to the loss of the batch. Default: the number in this call.
        ref_logp: adds a KL term towards a reference policy, kl_coef · k3 with k3 = e^d − d − 1 and
            d = log π_ref − log πθ.
        weight: factor of surrogate and penalty, but not of the KL term, that corrects for a sampler that differs
            slightly from π_old. Per token, or (B, 1) for one factor per answer.
        penalty: coefficient of |log w| per token, keeping tokens near π_old (KL-Cov); ignored if |log w| ≤ ROUNDING.

    Returns:
        The loss, and detached statistics over the live tokens: `ratio/mean`, `ratio/max`, `ratio/abs_log` (mean
        |log w|), `clip/low` and `clip/high` (share of tokens clipped on each side), `kl/approx` (k3 of π_old
        against πθ) and, with `ref_logp`, `kl/ref`.
    """
    given = {name: x for name, x in (("ref_logp", ref_logp), ("penalty", penalty)) if x is not None}
    mask = check_by_token(mask, logp=logp, old_logp=old_logp, **given)
    if weight is not None and weight.shape not in (mask.shape, (*mask.shape[:-1], 1)):
        expected = f"one per token {tuple(mask.shape)} or one per answer {(*mask.shape[:-1], 1)}"
        raise ShapeError(f"weight has shape {tuple(weight.shape)}, expected {expected}.")
    for name, value, kind in (("ratio", ratio, Ratio), ("reduce", reduce, Reduce), ("surrogate", surrogate, Surrogate)):
        check_choice(name, value, get_args(kind))
    bounds = f"clip_low={clip_low}, clip_high={clip_high}: give 0 <= clip_low <= 1 and clip_high >= 0."
    gates = f"tau_pos={tau_pos}, tau_neg={tau_neg}: the gate's temperatures must be above 0."
    no_ref = f"kl_coef={kl_coef} without ref_logp: give the reference policy's log-probabilities, or kl_coef=0."
    needed = (0 <= clip_low <= 1 and clip_high >= 0, bounds), (tau_pos > 0 and tau_neg > 0, gates)
    if wrong := unmet(*needed, (ref_logp is not None or not kl_coef, no_ref)):
        raise ConfigError(wrong)

    A = _by_token(advantages, mask)
    logp = torch.where(mask, logp.to(torch.promote_types(logp.dtype, torch.float32)), 0)
    old_logp = torch.where(mask, old_logp.detach(), 0)
    log_w = (logp - old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    w = _ratio(log_w, mask, ratio)

    clips, taus = (clip_low, clip_high), (tau_pos, tau_neg)
    token_loss, w, low, high = _surrogate(surrogate, A, logp, old_logp, log_w, w, mask, clips, taus)
    if penalty is not None:
        moved = mask & (log_w.detach().abs() > ROUNDING)
        token_loss = token_loss + torch.where(moved, penalty.detach(), 0) * log_w.abs()
    if weight is not None:
        token_loss = token_loss * torch.where(mask, weight.detach(), 0)
    stats = _statistics(w.detach(), log_w.detach(), A, mask, low, high)
    if ref_logp is not None:
        k3 = _k3(torch.where(mask, ref_logp.detach(), 0) - logp)
        token_loss = token_loss + kl_coef * k3
        stats["kl/ref"] = _mean(k3.detach(), mask)
    return _reduce(token_loss, mask, reduce, count), stats


def _ratio(log_w: Tensor, mask: Tensor, ratio: Ratio) -> Tensor:
    """ŵ (B, T): a sequence's ratio is repeated for each of its tokens."""
    if ratio == "token":
        return log_w.exp()
    if ratio == "sequence_mean":
        return masked_mean(log_w.exp(), mask, -1).expand_as(log_w)
    return masked_mean(log_w, mask, -1).exp().expand_as(log_w)


def _surrogate(
    surrogate: Surrogate, A: Tensor, logp: Tensor, old_logp: Tensor, log_w: Tensor, w: Tensor, mask: Tensor,
    clips: tuple[float, float], taus: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """−s, ŵ, and masks of the tokens clipped if A < 0 (low) and if A > 0 (high), each (B, T)."""
    clip_low, clip_high = clips
    low, high = w < 1 - clip_low, w > 1 + clip_high
    if surrogate in ("clip", "cispo"):
        clipped = w.clamp(1 - clip_low, 1 + clip_high)
        loss = -torch.minimum(w * A, clipped * A) if surrogate == "clip" else -clipped.detach() * A * logp
        return loss, w, low, high
    if surrogate == "sapo":
        tau = torch.where(A > 0, *taus)
        return -4 / tau * torch.sigmoid(tau * (w - 1)) * A, w, torch.zeros_like(low), torch.zeros_like(low)
    if surrogate == "geo_mean":
        m = torch.where(A > 0, log_w.clamp_max(clip_high), log_w.clamp_min(-clip_low))
        w = masked_mean(m, mask, -1).exp().expand_as(m)
        return -w * A, w, log_w < -clip_low, log_w > clip_high
    p, p_old = logp.detach().exp(), old_logp.exp()
    d = (p - p_old).abs() if surrogate == "dppo_tv" else _binary_kl(p_old, p, -log_w.detach())
    low, high = (d > clip_low) & (p < p_old), (d > clip_high) & (p > p_old)
    return -torch.where(torch.where(A > 0, high, low), 0, w.detach() * A * logp), w, low, high


def _binary_kl(p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
    """KL((p, 1 − p) ‖ (q, 1 − q)), the sampled token against all others, with log_ratio = log p/q."""
    rest = [(1 - x).clamp_min(0) + 1e-8 for x in (p, q)]  # rounding may put a probability above 1
    return p * log_ratio + (1 - p) * (rest[0] / rest[1]).log()


def _k3(d: Tensor) -> Tensor:
    """Schulman's k3 estimator of a KL divergence from a log-ratio: never negative, low variance."""
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d.exp() - d - 1


def _reduce(token_loss: Tensor, mask: Tensor, reduce: Reduce, count: float | Tensor | None) -> Tensor:
    if reduce == "tokens":
        total, own = torch.where(mask, token_loss, 0).sum(), mask.sum()
    else:
        total, own = masked_mean(token_loss, mask, -1).sum(), mask.any(-1).sum()
    return total / (own.clamp_min(1) if count is None else count)


def _statistics(w: Tensor, log_w: Tensor, A: Tensor, mask: Tensor, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    return {
        "ratio/mean": _mean(w, mask),
        "ratio/max": torch.where(mask, w, 0).amax() if w.numel() else w.new_zeros(()),
        "ratio/abs_log": _mean(log_w.abs(), mask),
        "clip/low": _mean((low & (A < 0)).to(w.dtype), mask),
        "clip/high": _mean((high & (A > 0)).to(w.dtype), mask),
        "kl/approx": _mean(_k3(log_w), mask),
    }


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum() / mask.sum().clamp_min(1)


def _by_token(advantages: Tensor, mask: Tensor) -> Tensor:
    check_tensors(advantages=advantages)
    if advantages.shape == mask.shape[:-1]:
        advantages = advantages.unsqueeze(-1).expand_as(mask)
    if advantages.shape != mask.shape:
        expected = f"one per token {tuple(mask.shape)} or one per answer {tuple(mask.shape[:-1])}"
        raise ShapeError(f"advantages have shape {tuple(advantages.shape)}, expected {expected}.")
    return torch.where(mask, advantages.detach(), 0)
