"""Baselines that give every token of an answer the same credit: GRPO, DAPO, Dr. GRPO, GSPO."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dew.algorithms.base import Algorithm, spread
from dew.credit import grpo_advantages
from dew.errors import ConfigError
from dew.losses import Ratio, Reduce
from dew.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class GRPO(Algorithm):
    """Advantage relative to the group mean; every answer has the same weight. arXiv:2402.03300."""

    name: ClassVar[str] = "grpo"
    verl_estimator: ClassVar[str | None] = "grpo"
    reduce: ClassVar[Reduce] = "sequences"

    clip_high: float = 0.2
    """ε on both sides, as in PPO."""

    def advantages(self, rollouts: Rollouts) -> Tensor:
        reward = rollouts.reward + self.extra(rollouts)
        return spread(grpo_advantages(reward, rollouts.present, scale=self.scale), rollouts)


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """GRPO's advantage with clip-higher, a token-level loss and dynamic sampling. arXiv:2503.14476."""

    name: ClassVar[str] = "dapo"
    verl_estimator: ClassVar[str | None] = "grpo"
    reduce: ClassVar[Reduce] = "tokens"

    clip_high: float = 0.28
    """Clip-higher: lets unlikely tokens of correct answers grow."""

    dynamic_sampling: bool = True
    """Part of DAPO: groups without signal are replaced by new prompts."""


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """GRPO without its two biases: no division by the std, none by the answer's length. arXiv:2503.20783."""

    name: ClassVar[str] = "dr_grpo"
    verl_estimator: ClassVar[str | None] = "grpo"
    reduce: ClassVar[Reduce] = "tokens"
    scale: ClassVar[bool] = False
    fixed_divisor: ClassVar[bool] = True

    def divisor(self, tokens: int, sequences: int) -> float:
        if self.max_tokens is None:
            raise ConfigError("dr_grpo: the loss is divided by the generation budget. Set max_tokens.")
        return float(self.max_tokens * sequences)


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GRPO with one geometric ratio per answer. arXiv:2507.18071."""

    name: ClassVar[str] = "gspo"
    verl_estimator: ClassVar[str | None] = "grpo"
    ratio: ClassVar[Ratio] = "sequence_geometric"

    clip_low: float = 3e-4
    """A sequence's ratio moves far less than a token's."""

    clip_high: float = 4e-4
    """A sequence's ratio moves far less than a token's."""
