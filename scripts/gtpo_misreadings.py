"""Two misreadings of GTPO as rules of their own, to compare with the right one: docs/study-details.md, step 4."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dew.algorithms.entropy_weighted import GTPO
from dew.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class MicroBatches(GTPO):
    """Entropies compared, and rewards normalised, within micro-batches of a group instead of the whole group."""

    name: ClassVar[str] = "micro_batches"
    size: int = 4

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """Each part of `size` answers as a group of its own; a part with one outcome gets no credit."""
        P, G, T = rollouts.mask.shape

        def cut(x: Tensor) -> Tensor:
            return x.reshape(P * G // self.size, self.size, *x.shape[2:])

        given = {"mask": rollouts.mask, "reward": rollouts.reward, "entropy": rollouts.entropy, "logp": rollouts.logp}
        parts = Rollouts(**{name: cut(x) for name, x in given.items() if x is not None})
        return super().advantages(parts).reshape(P, G, T)


@dataclass(frozen=True, kw_only=True)
class EveryGroup(GTPO):
    """Groups without signal are shaped too: all answers have the same reward, and only their entropy differs."""

    name: ClassVar[str] = "every_group"

    def signal(self, rollouts: Rollouts) -> Tensor:
        return rollouts.live.any(-1)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        plain = replace(rollouts, extra=None)
        return self._standardised(self._shaped(plain), plain) * torch.ones_like(rollouts.mask)
