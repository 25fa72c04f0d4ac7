"""Other uses of entropy, for comparison: forking tokens and the entropy-shaped advantage."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dew.algorithms.base import Part, Stats, Whose, recorded
from dew.algorithms.baselines import DAPO
from dew.credit import entropy_advantages, forking_mask
from dew.errors import ShapeError
from dew.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class ForkingTokens(DAPO):
    """DAPO on only the tokens with the highest entropy, the 80/20 rule. arXiv:2506.01939."""

    name: ClassVar[str] = "forking_tokens"
    needs_entropy: ClassVar[Whose] = "old"
    replaces: ClassVar[tuple[str, ...]] = ("top_entropy_quantile",)

    keep: float = 0.2
    """Share of the batch's live tokens that train."""

    def problems(self) -> list[str]:
        wrong = [] if 0 < self.keep <= 1 else [f"keep={self.keep}: give 0 < keep <= 1; the paper uses 0.2."]
        return super().problems() + wrong

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """DAPO's on the kept tokens, scaled so that the loss is divided by the kept tokens instead of all tokens."""
        kept = forking_mask(recorded(self, rollouts, "entropy"), rollouts.mask, keep=self.keep)
        scale = rollouts.mask.sum() / kept.sum().clamp_min(1)
        return torch.where(kept, super().advantages(rollouts) * scale, 0)


@dataclass(frozen=True, kw_only=True)
class EntropyAdvantage(DAPO):
    """DAPO with a bonus on the advantage for the entropy of the current policy. arXiv:2506.14758."""

    name: ClassVar[str] = "entropy_advantage"
    needs_entropy: ClassVar[Whose] = "current"
    replaces: ClassVar[tuple[str, ...]] = ("entropy_coef", "use_adaptive_entropy")

    alpha: float = 0.4
    """Weight of the entropy in the bonus."""

    kappa: float = 2.0
    """The bonus is at most |A| / κ, so it never flips the sign of an advantage."""

    def problems(self) -> list[str]:
        found = super().problems()
        if not self.alpha >= 0:
            found.append(f"alpha={self.alpha}: entropy would be penalised. Give a number >= 0; the paper uses 0.4.")
        if not self.kappa > 1:
            found.append(f"kappa={self.kappa}: the bonus could flip the advantage's sign. The paper uses 2; give > 1.")
        return found

    def loss(
        self, logp: Tensor, part: Part, advantages: Tensor, *, count: float | Tensor | None = None
    ) -> tuple[Tensor, Stats]:
        if part.entropy is None:
            raise ShapeError("entropy_advantage needs the current policy's entropy of each token in its loss.")
        shaped = entropy_advantages(advantages, part.entropy, part.mask, alpha=self.alpha, kappa=self.kappa)
        value, stats = super().loss(logp, part, shaped, count=count)
        plain = advantages if advantages.ndim == shaped.ndim else advantages.unsqueeze(-1)
        bonus = torch.where(part.mask, shaped - plain, 0).sum() / part.mask.sum().clamp_min(1)
        return value, {**stats, "credit/bonus": bonus}
