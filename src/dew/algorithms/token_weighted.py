"""DAPO with a weight, a penalty, a bonus or a baseline for each token.

Statistics are over the whole batch or whole groups, under the sampling policy. Only the bonus of EntropyAdvantage uses
the current policy.
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from dew.algorithms.base import Count, Part, Stats, Whose, recorded
from dew.algorithms.baselines import DAPO
from dew.checks import unmet
from dew.credit import group_relative
from dew.credit import token_weights as weights
from dew.errors import ShapeError
from dew.ops import masked_mean
from dew.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class ForkingTokens(DAPO):
    """DAPO trained only on the tokens with the highest entropy, the 80/20 rule. arXiv:2506.01939."""

    name: ClassVar[str] = "forking_tokens"
    needs_entropy: ClassVar[Whose] = "old"
    keep: float = 0.2
    """Share of the batch's live tokens that train."""

    def problems(self) -> list[str]:
        return super().problems() + unmet((0 < self.keep <= 1, f"keep={self.keep}: give 0 < keep <= 1, e.g. 0.2."))

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """DAPO's advantages on the kept tokens, scaled so that the loss is divided by the number of kept tokens."""
        kept = weights.forking_mask(recorded(self, rollouts, "entropy"), rollouts.mask, keep=self.keep)
        scale = rollouts.mask.sum() / kept.sum().clamp_min(1)
        return torch.where(kept, super().advantages(rollouts) * scale, 0)


@dataclass(frozen=True, kw_only=True)
class EntropyAdvantage(DAPO):
    """DAPO with a bonus on the advantage for the entropy of the current policy. arXiv:2506.14758."""

    name: ClassVar[str] = "entropy_advantage"
    needs_entropy: ClassVar[Whose] = "current"
    alpha: float = 0.4
    """Weight of the entropy in the bonus."""
    kappa: float = 2.0
    """The bonus is at most |A| / κ, so it never flips the sign of an advantage."""

    def problems(self) -> list[str]:
        return super().problems() + unmet(
            (self.alpha >= 0, f"alpha={self.alpha}: entropy would be penalised. Give >= 0; the paper uses 0.4."),
            (self.kappa > 1, f"kappa={self.kappa}: the bonus could flip a sign. Give > 1; the paper uses 2."),
        )

    def loss(self, logp: Tensor, part: Part, advantages: Tensor, *, count: Count = None) -> tuple[Tensor, Stats]:
        if part.entropy is None:
            raise ShapeError("entropy_advantage needs the current policy's entropy of each token in its loss.")
        A = advantages if advantages.ndim == part.mask.ndim else advantages.unsqueeze(-1)
        bonus = weights.entropy_bonus(A, part.entropy, alpha=self.alpha, kappa=self.kappa)
        value, stats = super().loss(logp, part, A + bonus, count=count)
        total = torch.where(part.mask.bool(), bonus, 0).sum()
        return value, {**stats, "credit/bonus": total / part.mask.sum().clamp_min(1)}


@dataclass(frozen=True, kw_only=True)
class ClipCov(DAPO):
    """Removes a few tokens with a large covariance of advantage and log-probability from the loss. arXiv:2505.22617."""

    name: ClassVar[str] = "clip_cov"
    needs_logp: ClassVar[bool] = True
    clip_low: float = 1.0
    """No lower bound on the ratio, as in the authors' runs."""
    clip_high: float = 1.0
    """The ratio is at most 2, as in the authors' runs."""
    cov_share: float = 2e-4
    """Share of the batch's live tokens to remove; at least one token."""
    cov_low: float = 1.0
    """Tokens are drawn from those whose covariance is above this ..."""
    cov_high: float = 5.0
    """... and below this."""

    def problems(self) -> list[str]:
        low, high = self.cov_low, self.cov_high
        return super().problems() + unmet(
            _is_share(self.cov_share),
            (low < high, f"cov_low={low}, cov_high={high}: no token would be drawn. Give low < high."),
        )

    def advantages(self, rollouts: Rollouts) -> Tensor:
        A, logp = super().advantages(rollouts), recorded(self, rollouts, "logp")
        bounds = {"low": self.cov_low, "high": self.cov_high}
        return torch.where(weights.clip_cov_mask(A, logp, rollouts.mask, share=self.cov_share, **bounds), 0, A)


@dataclass(frozen=True, kw_only=True)
class KLCov(DAPO):
    """Keeps the tokens with the largest covariance near the sampling policy; clips nothing. arXiv:2505.22617."""

    name: ClassVar[str] = "kl_cov"
    needs_logp: ClassVar[bool] = True
    penalises: ClassVar[bool] = True
    clip_low: float = 1.0
    """No bound on the ratio."""
    clip_high: float = 1e6
    """No bound on the ratio."""
    cov_share: float = 2e-4
    """Share of the batch's live tokens that get the penalty; at least one token."""
    cov_coef: float = 1.0
    """Coefficient of the penalty |log w|."""

    def problems(self) -> list[str]:
        pulled = f"cov_coef={self.cov_coef}: tokens would be pushed away. Give >= 0, e.g. 1."
        return super().problems() + unmet(_is_share(self.cov_share), (0 <= self.cov_coef < inf, pulled))

    def penalties(self, rollouts: Rollouts, advantages: Tensor) -> Tensor:
        chosen = weights.kl_cov_mask(advantages, recorded(self, rollouts, "logp"), rollouts.mask, share=self.cov_share)
        return self.cov_coef * chosen.to(advantages.dtype)


@dataclass(frozen=True, kw_only=True)
class STEER(DAPO):
    """Smaller advantages where the update would change the entropy most. arXiv:2510.10150."""

    name: ClassVar[str] = "steer"
    needs_entropy: ClassVar[Whose] = "old"
    needs_logp: ClassVar[bool] = True
    least_weight: float = 0.8
    """Weight of the token where the entropy would change most; other weights are between this and 1."""

    def problems(self) -> list[str]:
        least = self.least_weight
        return super().problems() + unmet((0 < least <= 1, f"least_weight={least}: give 0 < least_weight <= 1."))

    def advantages(self, rollouts: Rollouts) -> Tensor:
        A, H = super().advantages(rollouts), recorded(self, rollouts, "entropy")
        return A * weights.steer_weights(A, recorded(self, rollouts, "logp"), H, rollouts.mask, least=self.least_weight)


@dataclass(frozen=True, kw_only=True)
class STARE(DAPO):
    """Larger advantages for the least likely tokens of correct answers while the entropy is low. arXiv:2606.19236."""

    name: ClassVar[str] = "stare"
    needs_entropy: ClassVar[Whose] = "old"
    needs_logp: ClassVar[bool] = True
    share: float = 0.1
    """Share of the tokens with a positive (or negative) advantage whose weight changes: the least likely ones."""
    positive_weight: float = 1.1
    """Their weight where the advantage is positive."""
    negative_weight: float = 1.0
    """Their weight where the advantage is negative. 0.9 is the paper's two-sided variant, C2."""
    target_entropy: float = 0.3
    """All weights are 1 while the batch's mean entropy is at least this, in nats."""

    def problems(self) -> list[str]:
        up, down = self.positive_weight, self.negative_weight
        both = f"positive_weight={up}, negative_weight={down}: the sign of an advantage must stay."
        return super().problems() + unmet(
            (0 < self.share <= 1, f"share={self.share}: give 0 < share <= 1; the paper uses 0.1."),
            (0 < up < inf and 0 < down < inf, f"{both} Give numbers > 0, e.g. 1.1 and 0.9."),
        )

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """ωᵢₜ Aᵢₜ, ω = the weight of the ⌈share · N⌉ tokens with the largest −log π among those of the same sign."""
        A, mask = super().advantages(rollouts), rollouts.mask
        H, surprisal = recorded(self, rollouts, "entropy"), -recorded(self, rollouts, "logp").clamp_max(0)
        if masked_mean(H, mask, (0, 1, 2)) >= self.target_entropy:
            return A
        for side, weight in ((A > 0, self.positive_weight), (A < 0, self.negative_weight)):
            A = torch.where(weights.forking_mask(surprisal, mask & side, keep=self.share), weight * A, A)
        return A


@dataclass(frozen=True, kw_only=True)
class FIPO(DAPO):
    """Larger advantages where the tokens that follow have become more likely. arXiv:2603.19835."""

    name: ClassVar[str] = "fipo"
    half_life: float = 32.0
    """A token this many tokens later counts half as much."""
    least_weight: float = 1.0
    """Smallest weight. 0.8 also weakens tokens whose future has become less likely."""
    most_weight: float = 1.2
    """Largest weight."""

    def problems(self) -> list[str]:
        least, most = self.least_weight, self.most_weight
        around = f"least_weight={least}, most_weight={most}: on-policy every weight is 1."
        return super().problems() + unmet(
            (self.half_life > 0, f"half_life={self.half_life}: give a number of tokens > 0; the authors use 32."),
            (0 < least <= 1 <= most, f"{around} Give 0 < least_weight <= 1 <= most_weight."),
        )

    def loss(self, logp: Tensor, part: Part, advantages: Tensor, *, count: Count = None) -> tuple[Tensor, Stats]:
        A = advantages if advantages.ndim == part.mask.ndim else advantages.unsqueeze(-1).expand_as(part.mask)
        bounds = {"half_life": self.half_life, "low": self.least_weight, "high": self.most_weight}
        f = weights.future_weights(logp - part.old_logp, A, part.mask, **bounds)
        return super().loss(logp, part, A * f, count=count)


@dataclass(frozen=True, kw_only=True)
class OTB(DAPO):
    """A baseline for each position of a group, chosen for minimum variance. arXiv:2602.07078."""

    name: ClassVar[str] = "otb"
    needs_logp: ClassVar[bool] = True
    needs_sum_sq: ClassVar[bool] = True

    def problems(self) -> list[str]:
        other = f"credit={self.credit!r}: the optimal token baseline is a credit of its own. Leave it out."
        return super().problems() + unmet((self.credit == "grpo", other))

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """(P, G, T) credit, 0 in groups with equal rewards: there, only the end of the longest answer would get any."""
        logp, sum_sq = recorded(self, rollouts, "logp"), recorded(self, rollouts, "sum_sq")
        reward, live = rollouts.reward + self.extra(rollouts), rollouts.live
        A = weights.token_baseline_advantages(torch.where(live, reward, 0), logp, sum_sq, rollouts.mask)
        return torch.where((group_relative(reward, live) != 0).any(-1)[:, None, None], A, 0)


def _is_share(share: float) -> tuple[bool, str]:
    return 0 < share <= 1, f"cov_share={share}: a share of tokens. Give 0 < cov_share <= 1, e.g. 2e-4."
