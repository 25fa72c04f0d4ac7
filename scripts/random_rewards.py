"""A rule of the benchmark (scripts/benchmark.py): what training gains without a verifier."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dew.algorithms import DAPO
from dew.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class RandomRewards(DAPO):
    """DAPO with coins for rewards: what training gains without a verifier. Metrics and evaluations are the task's."""

    name: ClassVar[str] = "random_rewards"
    needs_logp: ClassVar[bool] = True

    def signal(self, rollouts: Rollouts) -> torch.Tensor:
        return super().signal(self._tossed(rollouts))

    def advantages(self, rollouts: Rollouts) -> torch.Tensor:
        return super().advantages(self._tossed(rollouts))

    def _tossed(self, rollouts: Rollouts) -> Rollouts:
        """A coin for each answer: the parity of a late digit of its log-probability."""
        assert rollouts.logp is not None
        digits = torch.where(rollouts.mask, rollouts.logp, 0).double().sum(-1).mul(1e4).floor()
        return replace(rollouts, reward=(digits % 2).to(rollouts.reward.dtype))
