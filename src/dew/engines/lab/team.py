"""Credit and loss of runs with the same algorithm, for all of them in one call where that gives the same."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.algorithms.base import Part
from dew.algorithms.credit import give_credit
from dew.engines.lab.tasks import generator
from dew.errors import Problem, ShapeError
from dew.rollouts import Rollouts

TRAINED = ("advantages", "penalty")
"""Fields of `Credit` that the loss reads."""


class Team:
    """Neighbouring replicas with the same algorithm, whose credit and loss are computed in one call where possible.

    Credit: if, on random rollouts, a call with the groups of two runs gives what a call for each gives. Loss: if, on
    the first batch, `vmap` gives the same. Else the algorithm is called for each replica.
    """

    def __init__(self, algorithm: Algorithm, rows: slice, group_size: int, tokens: int) -> None:
        self.algorithm, self.rows = algorithm, rows
        self.vectorised: bool | None = None  # not tried yet
        self.stacked = all(self._same_apart(two) for two in random_rollouts(group_size, tokens))

    def _same_apart(self, two: dict[str, Tensor]) -> bool:
        self.stacked = True
        together = self.credit(two)
        self.stacked = False
        alone = {name: x for name, x in self.credit(two).items() if name in TRAINED}
        return all(torch.allclose(together[name], x, rtol=1e-4, atol=1e-5) for name, x in alone.items())

    def credit(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """(r, P) signal and (r, P, G, T) fields of `Credit`, 0 in groups without signal, which do not train.

        `given` are the fields of `Rollouts` with a leading axis of r replicas.
        """
        given = {name: given[name] for name in ("mask", "reward", *self.algorithm.signals)}  # as in an engine
        runs, mask = given["mask"].shape[:2], given["mask"].flatten(0, 1)
        given = {name: x.flatten(0, 1) for name, x in given.items()}
        signal = self.algorithm.signal(Rollouts(**given))
        parts: list[Any] = [slice(None)]
        if not self.stacked:  # as in an engine, which has only the groups with signal of one run
            every = torch.arange(len(mask), device=mask.device).view(runs)
            parts = [groups[keep] for groups, keep in zip(every, signal.view(runs), strict=True) if keep.any()]
        names = ["advantages", "flipped", *["penalty"] * self.algorithm.penalises]
        found = {name: torch.zeros(mask.shape, device=mask.device) for name in names}
        for part in parts:
            credit = give_credit(self.algorithm, Rollouts(**{name: x[part] for name, x in given.items()}))
            for name, x in found.items():
                x[part] = getattr(credit, name).to(torch.float32)
        found = {name: torch.where(signal[:, None, None], x, 0) for name, x in found.items()}
        if not all(found[name].isfinite().all() for name in TRAINED if name in found):
            what = f"{self.algorithm.name}: some advantages or penalties are NaN or infinite."
            remedy = "Look for a division by 0, e.g. by the standard deviation of a group without differences."
            raise ShapeError(Problem(what, remedy=remedy))
        return {name: x.unflatten(0, runs) for name, x in (found | {"signal": signal}).items()}

    def loss(self, logp: Tensor, given: dict[str, Tensor], advantages: Tensor, count: Tensor) -> Tensor:
        """(r,) losses of (r, b, T) rows; `given` are the fields of `Part`."""

        def one(logp: Tensor, advantages: Tensor, count: Tensor, given: dict[str, Tensor]) -> Tensor:
            found = self.algorithm.loss(logp, Part(**given), advantages, count=count)
            if not (isinstance(found, tuple) and found[0].ndim == 0):
                what = f"{self.algorithm.name}: loss(...) did not return a single number and statistics."
                raise ShapeError(Problem(what, remedy="Return a pair such as (loss, {}), with a loss of shape ()."))
            return found[0]

        if self.vectorised:
            return torch.func.vmap(one)(logp, advantages, count, given)
        rows = [{name: x[i] for name, x in given.items()} for i in range(len(logp))]
        losses = torch.stack(list(map(one, logp, advantages, count, rows)))
        if self.vectorised is None:
            try:
                together = torch.func.vmap(one)(logp, advantages, count, given)
                self.vectorised = torch.allclose(together, losses, rtol=1e-4, atol=1e-6)
            except Exception:  # whatever a rule does that vmap cannot
                self.vectorised = False
        return losses


def teams(algorithms: Sequence[Algorithm], group_size: int, tokens: int) -> list[Team]:
    """Of the algorithm of each run; the same ones must be neighbours. Engines fill in the generation budget; so does
    the lab."""
    found: list[Team] = []
    for algorithm, runs in groupby(algorithms):
        start = found[-1].rows.stop if found else 0
        filled = replace(algorithm, max_tokens=tokens) if algorithm.max_tokens is None else algorithm
        found.append(Team(filled, slice(start, start + len(list(runs))), group_size, tokens))
    return found


def random_rollouts(G: int, T: int) -> list[dict[str, torch.Tensor]]:
    """Of two replicas with four groups each, the first without signal; once with high and once with low entropy,
    because some rules weight tokens only there."""
    random = generator("rollouts", 0)
    mask = torch.arange(T) < torch.randint(1, T + 1, (2, 4, G, 1), generator=random)
    reward = (torch.rand(2, 4, G, generator=random) < 0.5).float()
    reward[:, 0], reward[:, 1:, 0], reward[:, 1:, 1] = 0, 0, 1
    scale = torch.tensor([-6.0, 2.0, 1.0]).view(3, 1, 1, 1, 1)
    logp, entropy, sum_sq = torch.rand(3, 2, 4, G, T, generator=random) * scale
    tokens = torch.randint(0, 4, mask.shape, generator=random)
    found = {"mask": mask, "reward": reward, "logp": logp, "entropy": entropy, "sum_sq": sum_sq, "tokens": tokens}
    return [found, found | {"entropy": entropy / 10}]
