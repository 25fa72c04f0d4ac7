"""Dynamic Entropy Weighting: GTPO per token, GRPO-S per answer. Tan et al. 2025, arXiv:2508.04349."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dew.algorithms.base import Algorithm, Whose, recorded, spread
from dew.checks import unmet
from dew.credit import group_relative, grpo_s_advantages, grpo_s_rewards, gtpo_advantages, gtpo_rewards
from dew.credit.gtpo import Compare, clip_problems, weight_problems
from dew.losses import Ratio, Reduce
from dew.rollouts import Rollouts

FLOOR = (0.01, 100.0)
"""An entropy_clip that is only a floor: the entropy over a vocabulary of 150,000 tokens is at most 12 nats."""
UNBOUNDED = (
    "without entropy_clip: one token's weight can reach 10,000 and break learning. Set entropy_clip, e.g. (0.01, 5)."
)


@dataclass(frozen=True, kw_only=True)
class EntropyWeighted(Algorithm):
    """What GTPO and GRPO-S have in common. arXiv:2508.04349."""

    needs_entropy: ClassVar[Whose] = "old"
    weight_names: ClassVar[tuple[str, str]]
    """Names of the two weight settings: of the plain outcome, and of the part that is distributed by entropy."""
    paper: ClassVar[Mapping[str, str] | None] = {
        "title": "GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy",
        "id": "2508.04349",
        "citation": "@article{tan2025gtpo, title = {GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with "
        "Policy Entropy}, author = {Tan and others}, year = 2025, eprint = {arXiv:2508.04349}}",
    }

    average: Literal["arithmetic", "geometric"] = "arithmetic"
    """The kind of mean that a value is divided by. "geometric" is the paper's alternative (v6, Appendix C)."""
    scope: Literal["group", "batch"] = "group"
    """Compare and normalise within a group (the equations) or across the batch (the paper's discussion)."""
    pool: Literal["group", "joint", "sign", "outcome"] = "group"
    """What mean and std are taken over. "outcome" multiplies the answer's GRPO advantage by the weight instead: no sign
    can flip, and graded rewards can be used. "sign" takes them over one polarity only, which unlearns the task; for
    comparison only."""
    spread: Literal["both", "correct", "wrong"] = "both"
    """The side whose credit is distributed by entropy; on the other side every weight is 1."""
    entropy_clip: tuple[float, float] | None = None
    """Clamp H to (low, high), in nats, before anything else. Off in the equations."""

    @property
    def _weights(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.weight_names}

    def problems(self) -> list[str]:
        weights = self._weights
        found = super().problems() + clip_problems(self.entropy_clip) + weight_problems(**weights)
        return found + unmet((any(weights.values()), f"{' and '.join(weights)} are 0: every advantage would be 0."))

    @property
    def uses_threshold(self) -> bool:
        return self.pool != "outcome" or self.overlong == "group"

    def warnings(self) -> list[str]:
        return unmet((self.average != "geometric" or self.entropy_clip is not None, f"average='geometric' {UNBOUNDED}"))

    def control(self) -> "EntropyWeighted":
        outcome, by_entropy = self.weight_names
        changed: Any = {outcome: sum(self._weights.values()), by_entropy: 0.0}
        return replace(self, **changed)

    def signal(self, rollouts: Rollouts) -> Tensor:
        """(P,) with pool="outcome", True on groups with different outcome rewards, even if no answer is correct."""
        if self.pool != "outcome":
            return super().signal(rollouts)
        return (group_relative(rollouts.reward, rollouts.live) != 0).any(-1)

    def rewards(self, rollouts: Rollouts) -> Tensor:
        scoped = self._scoped(rollouts)
        return self._to_tokens(self._shaped(scoped), scoped).reshape(rollouts.mask.shape)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """(P, G, T) credit, 0 in groups without signal: shaping those would train on entropy noise."""
        scoped = self._scoped(rollouts)
        shaped = self._shaped(scoped)
        if self.pool == "outcome":
            weight = self._to_tokens(shaped, scoped).abs() / sum(self._weights.values())  # |r̃| / (α₁ + α₂)
            return scoped.reward.unsqueeze(-1).mul(weight).reshape(rollouts.mask.shape)
        advantages = self._to_tokens(self._standardised(shaped, scoped), scoped)
        return torch.where(self.signal(rollouts)[:, None, None], advantages.reshape(rollouts.mask.shape), 0)

    def _scoped(self, rollouts: Rollouts) -> Rollouts:
        """The groups, or the batch as one group. Penalties and advantages of pool="outcome" are always per group.

        With pool="outcome", an answer's reward becomes its advantage, whose sign is the polarity. Answers at the group
        mean have no polarity and are masked out.
        """
        if self.pool == "outcome":
            relative = group_relative(rollouts.reward + self.extra(rollouts), rollouts.present)
            scoped = replace(rollouts, reward=relative, extra=None, mask=rollouts.mask & (relative != 0).unsqueeze(-1))
        else:
            scoped = replace(rollouts, extra=self.extra(rollouts))
        return scoped if self.scope == "group" else scoped.as_one_group()

    def _arguments(self, rollouts: Rollouts) -> dict[str, Any]:
        """The arguments that `gtpo_rewards` and `grpo_s_rewards` have in common; `correct` is the positive polarity."""
        correct = rollouts.correct(0.0) if self.pool == "outcome" else self.correct(rollouts)
        tensors = {"correct": correct, "entropy": recorded(self, rollouts, "entropy"), "mask": rollouts.mask}
        names = ("average", "spread", "entropy_clip")
        return {**tensors, **self._weights, **{x: getattr(self, x) for x in names}, "extra": rollouts.extra}

    def _shaped(self, rollouts: Rollouts) -> Tensor:
        raise NotImplementedError

    def _standardised(self, rewards: Tensor, rollouts: Rollouts) -> Tensor:
        raise NotImplementedError

    def _to_tokens(self, x: Tensor, rollouts: Rollouts) -> Tensor:
        return x


@dataclass(frozen=True, kw_only=True)
class GTPO(EntropyWeighted):
    """Token-level entropy weighting: in correct answers, high-entropy tokens get more reward; in wrong answers,
    low-entropy tokens get more penalty. arXiv:2508.04349 (not the GTPO of arXiv:2508.03772)."""

    name: ClassVar[str] = "gtpo"
    weight_names: ClassVar[tuple[str, str]] = ("alpha1", "alpha2")
    alpha1: float = 1.0
    """α₁: weight of the plain outcome."""
    alpha2: float = 0.1
    """α₂: weight of the part that is distributed by entropy. 0 keeps only the outcome."""
    compare: Compare = "column"
    """What a token is compared with: the same position across answers ("column", as published), its own answer ("row"),
    its group ("matrix"), the same turn ("turn", for tools and agents) or tenth ("relative") of each answer."""
    floored: ClassVar[tuple[Compare, ...]] = ("turn", "relative")
    """Values of `compare` for which entropy_clip defaults to FLOOR. A column has at most one token of an answer; in an
    answer of 4,096, one token at 1e-6 nats among others at 0.3 would have the weight 4,041 and, in `dew`, 49% of the
    blame. GTPO's row and matrix follow the paper and only warn."""

    def __post_init__(self) -> None:
        if self.entropy_clip is None and self.compare in self.floored:
            object.__setattr__(self, "entropy_clip", FLOOR)  # labels and records show it
        super().__post_init__()

    def warnings(self) -> list[str]:
        bounded = self.compare == "column" or self.entropy_clip is not None
        return super().warnings() + unmet((bounded, f"compare={self.compare!r} {UNBOUNDED}"))

    def _shaped(self, rollouts: Rollouts) -> Tensor:
        return gtpo_rewards(compare=self.compare, **self._arguments(rollouts))

    def _standardised(self, rewards: Tensor, rollouts: Rollouts) -> Tensor:
        assert self.pool != "outcome"
        return gtpo_advantages(rewards, rollouts.mask, pool=self.pool, correct=self.correct(rollouts))


@dataclass(frozen=True, kw_only=True)
class DEW(GTPO):
    """DAPO's advantage, half of it distributed over the tokens by entropy: in correct answers in proportion to it, in
    wrong answers to its inverse. Not a published algorithm: docs/papers.md describes how it differs from GTPO
    (arXiv:2508.04349), docs/study.md where it helps."""

    name: ClassVar[str] = "dew"
    floored: ClassVar[tuple[Compare, ...]] = ("row", "matrix", *GTPO.floored)
    alpha1: float = 0.5
    """α₁: weight of the plain outcome."""
    alpha2: float = 0.5
    """α₂: weight of the part that is distributed by entropy. 0 is DAPO."""
    pool: Literal["group", "joint", "sign", "outcome"] = "outcome"
    """The answer's DAPO advantage times the weight: no sign can flip, and graded rewards can be used."""
    dynamic_sampling: bool = True
    """As in DAPO: groups without signal are replaced by new prompts."""


@dataclass(frozen=True, kw_only=True)
class GRPOS(EntropyWeighted):
    """Sequence-level entropy weighting with an arithmetic sequence ratio. arXiv:2508.04349."""

    name: ClassVar[str] = "grpo_s"
    weight_names: ClassVar[tuple[str, str]] = ("beta1", "beta2")
    reduce: ClassVar[Reduce] = "sequences"
    beta1: float = 1.0
    """β₁: weight of the plain outcome."""
    beta2: float = 0.1
    """β₂: weight of the part that depends on entropy. 0 keeps only the outcome."""

    @property
    def ratio(self) -> Ratio:  # type: ignore[override]
        """ŵᵢ is the arithmetic mean of the token ratios, or their geometric mean with average="geometric"."""
        return "sequence_mean" if self.average == "arithmetic" else "sequence_geometric"

    def _shaped(self, rollouts: Rollouts) -> Tensor:
        return grpo_s_rewards(**self._arguments(rollouts))

    def _standardised(self, rewards: Tensor, rollouts: Rollouts) -> Tensor:
        assert self.pool != "outcome"
        return grpo_s_advantages(rewards, rollouts.live, pool=self.pool, correct=self.correct(rollouts))

    def _to_tokens(self, x: Tensor, rollouts: Rollouts) -> Tensor:
        return spread(x, rollouts)
