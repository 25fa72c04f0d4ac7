"""Baselines that give every token of an answer the same credit: GRPO, DAPO, Dr. GRPO, GSPO, and TRL's own loss."""

from dataclasses import dataclass, fields
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
    replaces: ClassVar[tuple[str, ...]] = ("loss_type=grpo",)

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
    replaces: ClassVar[tuple[str, ...]] = ("loss_type=dr_grpo",)
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
    replaces: ClassVar[tuple[str, ...]] = ("importance_sampling_level=sequence",)
    verl_estimator: ClassVar[str | None] = "grpo"
    ratio: ClassVar[Ratio] = "sequence_geometric"

    clip_low: float = 3e-4
    """A sequence's ratio moves far less than a token's."""

    clip_high: float = 4e-4
    """A sequence's ratio moves far less than a token's."""


@dataclass(frozen=True, kw_only=True)
class TRL(GRPO):
    """The run of TRL's GRPOTrainer: its advantages and its loss, with every setting of GRPOConfig. By default that is
    GRPO's advantage, the loss divided by all tokens (`loss_type: dapo`), clip 0.2 on both sides, no dynamic sampling,
    no KL term."""

    name: ClassVar[str] = "trl"
    engine_loss: ClassVar[bool] = True
    reduce: ClassVar[Reduce] = "tokens"

    def problems(self) -> list[str]:
        own = {"threshold", "clip_low", "clip_high", "kl_coef", "max_tokens"}
        changed = [f.name for f in fields(self) if f.name not in own and getattr(self, f.name) != f.default]
        return super().problems() + [f"{name} is not part of TRL's loss. Choose another algorithm." for name in changed]
