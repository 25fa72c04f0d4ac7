"""Algorithms that give every token of an answer the same credit: the baselines, other group credits, other losses
and TRL's own.

    group credit    grpo, maxrl, qae, w_reinforce, reinforce_pp       the setting `credit`
    loss            clip, cispo, sapo, geo_mean, dppo_tv, dppo_kl     the setting `surrogate`

Every class here and those derived from them have both settings, so that any two can be combined. MaxRL, QAE, CISPO, ...
are each a name for one choice.
"""

from dataclasses import dataclass, fields
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dew.algorithms.base import Algorithm, recorded, spread
from dew.checks import unmet
from dew.credit import entropy_bands, grpo
from dew.errors import ConfigError, Problem
from dew.losses import Ratio, Reduce, Surrogate
from dew.rollouts import Rollouts

GroupCredit = Literal["grpo", "maxrl", "qae", "w_reinforce", "reinforce_pp"]


@dataclass(frozen=True, kw_only=True)
class GRPO(Algorithm):
    """Advantage relative to the group mean; every answer has the same weight. arXiv:2402.03300."""

    name: ClassVar[str] = "grpo"
    verl_estimator: ClassVar[str | None] = "grpo"
    reduce: ClassVar[Reduce] = "sequences"
    clip_high: float = 0.2
    """ε on both sides, as in PPO."""
    credit: GroupCredit = "grpo"
    """How the rewards of a group become advantages: relative to their mean and std ("grpo"), divided by the mean
    outcome ("maxrl"), relative to a quantile ("qae"), ±1 with a weight ("w_reinforce"), or normalised over the batch
    ("reinforce_pp")."""
    quantile: float = 0.4
    """QAE: the quantile used as baseline."""
    positive: float = 0.1
    """W-REINFORCE: the advantage of correct answers; that of wrong ones is −1."""

    def problems(self) -> list[str]:
        return super().problems() + unmet(
            (0 < self.quantile < 1, f"quantile={self.quantile}: give 0 < quantile < 1, e.g. 0.4."),
            (0 <= self.positive < inf, f"positive={self.positive}: penalises correct answers. Give >= 0, e.g. 0.1."),
        )

    @property
    def uses_threshold(self) -> bool:
        return super().uses_threshold or self.credit == "w_reinforce"

    def graded(self, outcomes: Tensor) -> Problem | None:
        if self.credit == "maxrl" and (outcomes < 0).any():
            why = "MaxRL divides by the mean outcome, the success rate. With -1 and 1, a half-solved group has 0."
            remedy = "Return 0 for wrong answers, or choose another algorithm, e.g. `algorithm: dapo`."
            return Problem("The outcome reward is negative for some answers.", why, remedy)
        return super().graded(outcomes)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """(P, G, T) credit, the same for all tokens of an answer."""
        extra, present = self.extra(rollouts), rollouts.present
        reward = rollouts.reward + extra
        if self.credit == "reinforce_pp":
            return grpo.reinforce_pp_advantages(reward, rollouts.mask, present)
        if self.credit == "maxrl":
            credit = grpo.maxrl_advantages(rollouts.reward, present, extra=extra)
        elif self.credit == "qae":
            credit = grpo.qae_advantages(reward, present, quantile=self.quantile)
        elif self.credit == "w_reinforce":
            correct = self.correct(rollouts)
            credit = grpo.w_reinforce_advantages(correct, present, positive=self.positive)
            credit = credit + extra * torch.where(correct, self.positive, 1.0)
        else:
            credit = grpo.grpo_advantages(reward, present, scale=self.scale)
        return spread(credit, rollouts)


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """GRPO's advantage with clip-higher, a token-level loss and dynamic sampling. arXiv:2503.14476."""

    name: ClassVar[str] = "dapo"
    reduce: ClassVar[Reduce] = "tokens"
    clip_high: float = 0.28
    """Clip-higher: lets unlikely tokens of correct answers become more likely."""
    dynamic_sampling: bool = True
    """Part of DAPO: groups without signal are replaced by new prompts."""


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """GRPO without its two biases: divides neither by the std nor by the answer's length. arXiv:2503.20783."""

    name: ClassVar[str] = "dr_grpo"
    reduce: ClassVar[Reduce] = "tokens"
    scale: ClassVar[bool] = False
    fixed_divisor: ClassVar[bool] = True

    def divisor(self, tokens: int, sequences: int) -> float:
        if self.max_tokens is None:
            raise ConfigError(f"{self.name}: the loss is divided by the generation budget. Set max_tokens.")
        return float(self.max_tokens * sequences)


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GRPO with one geometric ratio per answer. arXiv:2507.18071."""

    name: ClassVar[str] = "gspo"
    ratio: ClassVar[Ratio] = "sequence_geometric"
    clip_low: float = 3e-4
    """A sequence's ratio moves far less than a token's."""
    clip_high: float = 4e-4
    """A sequence's ratio moves far less than a token's."""


@dataclass(frozen=True, kw_only=True)
class MaxRL(DAPO):
    """Advantage divided by the mean reward, so that hard problems count more. arXiv:2602.02710."""

    name: ClassVar[str] = "maxrl"
    credit: GroupCredit = "maxrl"
    """Part of MaxRL."""


@dataclass(frozen=True, kw_only=True)
class QAE(DAPO):
    """DAPO with a quantile of the group as baseline. arXiv:2509.22611."""

    name: ClassVar[str] = "qae"
    credit: GroupCredit = "qae"
    """Part of QAE."""


@dataclass(frozen=True, kw_only=True)
class WReinforce(DAPO):
    """−1 for wrong answers and a small weight for correct ones, without a baseline. arXiv:2506.01347."""

    name: ClassVar[str] = "w_reinforce"
    credit: GroupCredit = "w_reinforce"
    """Part of W-REINFORCE."""
    dynamic_sampling: bool = False
    """Groups with a single outcome train too, because answers are not compared."""


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(DAPO):
    """Advantages normalised over the whole batch instead of the group (with baseline). arXiv:2501.03262."""

    name: ClassVar[str] = "reinforce_pp"
    credit: GroupCredit = "reinforce_pp"
    """Part of REINFORCE++."""
    clip_high: float = 0.2
    """ε on both sides, as in PPO."""
    dynamic_sampling: bool = False
    """Not part of REINFORCE++."""


@dataclass(frozen=True, kw_only=True)
class CISPO(DAPO):
    """Clips the weight of a token's gradient and drops no token. arXiv:2506.13585; bounds of ScaleRL, 2510.13786."""

    name: ClassVar[str] = "cispo"
    surrogate: Surrogate = "cispo"
    """Part of CISPO."""
    clip_low: float = 1.0
    """No lower bound on the ratio."""
    clip_high: float = 4.0
    """The ratio is at most 5."""


@dataclass(frozen=True, kw_only=True)
class SAPO(GRPO):
    """A soft gate on the ratio instead of a clip. arXiv:2511.20347."""

    name: ClassVar[str] = "sapo"
    surrogate: Surrogate = "sapo"
    """Part of SAPO."""


@dataclass(frozen=True, kw_only=True)
class GMPO(GRPO):
    """The geometric mean of an answer's clipped token ratios. arXiv:2507.20673."""

    name: ClassVar[str] = "gmpo"
    surrogate: Surrogate = "geo_mean"
    """Part of GMPO."""
    clip_low: float = 0.4
    """A token's log-ratio is at least −0.4."""
    clip_high: float = 0.4
    """A token's log-ratio is at most 0.4."""


@dataclass(frozen=True, kw_only=True)
class DPPO(DrGRPO):
    """Dr. GRPO that drops tokens by the change of their probability instead of the ratio. arXiv:2602.04879."""

    name: ClassVar[str] = "dppo"
    surrogate: Surrogate = "dppo_tv"
    """Part of DPPO; with "dppo_kl" the authors set clip_low and clip_high to 0.05."""
    clip_low: float = 0.15
    """Tokens of wrong answers are dropped once their probability has fallen by more than this."""
    clip_high: float = 0.15
    """Tokens of correct answers are dropped once their probability has risen by more than this."""


@dataclass(frozen=True, kw_only=True)
class GEPO(GRPO):
    """Smaller positive advantages in groups of low entropy, smaller negative ones in groups of high entropy.
    arXiv:2607.16850, with thresholds from the batch alone."""

    name: ClassVar[str] = "gepo"
    needs_logp: ClassVar[bool] = True
    low_weight: float = 0.5
    """Weight of positive advantages in groups of low entropy."""
    high_weight: float = 0.2
    """Weight of negative advantages in groups of high entropy."""
    low_band: float = 0.2
    """An entropy is low if it is more than this many standard deviations below the mean of the batch's groups ..."""
    high_band: float = 0.3
    """... and high if it is more than this many above."""

    def problems(self) -> list[str]:
        low, high, bands = self.low_weight, self.high_weight, f"low_band={self.low_band}, high_band={self.high_band}"
        apart = self.low_band >= 0 and self.high_band >= 0
        return super().problems() + unmet(
            (0 <= low <= 1, f"low_weight={low}: advantages are attenuated. Give 0 to 1; the paper uses 0.5."),
            (0 <= high <= 1, f"high_weight={high}: advantages are attenuated. Give 0 to 1; the paper uses 0.2."),
            (apart, f"{bands}: a group would have low and high entropy at once. Give numbers >= 0."),
        )

    def advantages(self, rollouts: Rollouts) -> Tensor:
        A, logp = super().advantages(rollouts), recorded(self, rollouts, "logp")
        low, high = entropy_bands(logp, rollouts.mask, low=self.low_band, high=self.high_band)
        A = torch.where((A > 0) & low[:, None, None], self.low_weight * A, A)
        return torch.where((A < 0) & high[:, None, None], self.high_weight * A, A)


@dataclass(frozen=True, kw_only=True)
class TRL(GRPO):
    """TRL's own GRPOTrainer: its advantages and loss, with every setting of GRPOConfig. By default that is GRPO's
    advantage, a loss divided by the number of all tokens (`loss_type: dapo`), clip 0.2 on both sides, no dynamic
    sampling and no KL term."""

    name: ClassVar[str] = "trl"
    engine_loss: ClassVar[bool] = True
    reduce: ClassVar[Reduce] = "tokens"

    def problems(self) -> list[str]:
        own = {"threshold", "clip_low", "clip_high", "kl_coef", "max_tokens", "tau_pos", "tau_neg"}
        changed = [f.name for f in fields(self) if f.name not in own and getattr(self, f.name) != f.default]
        return super().problems() + [f"{name} is not part of TRL's loss. Choose another algorithm." for name in changed]
