"""An algorithm as a user registers it in a module of their own: DAPO that trains the first tokens of an answer only."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dew.algorithms import DAPO, register_algorithm


@register_algorithm
@dataclass(frozen=True, kw_only=True)
class FirstTokens(DAPO):
    name: ClassVar[str] = "first_tokens"

    first: int = 2
    """Tokens of an answer that train."""

    factor: float = 1.0
    """Multiplies the loss."""

    def advantages(self, rollouts):
        early = torch.arange(rollouts.mask.shape[-1]) < self.first
        return torch.where(early, super().advantages(rollouts), 0)

    def loss(self, logp, part, advantages, *, count=None):
        value, stats = super().loss(logp, part, advantages, count=count)
        return self.factor * value, {**stats, "own/factor": torch.tensor(self.factor)}
