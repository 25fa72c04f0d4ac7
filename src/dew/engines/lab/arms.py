"""Parse the arms of a study (`dapo`, `gtpo(alpha2=0.5)@3e-5`, `my_module:MyRule`, `rules.py:MyRule(keep=0.1)`), and
compute credit and loss of their runs: runs with the same algorithm share a call if that does not change the result."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dew.algorithms import Algorithm, get_algorithm, source_digest
from dew.algorithms.base import Part
from dew.algorithms.credit import DIVISION, give_credit
from dew.engines.lab.tasks import generator
from dew.errors import ConfigError, DewError, Problem, ShapeError
from dew.rollouts import Rollouts

RATE = re.compile(r"@([^@:/\\]*)$")
"""The learning rate of an arm; `me@work/rules.py:MyRule` has none."""
TRAINED = ("advantages", "penalty")
"""Fields of `Credit` that the loss reads."""


@dataclass(frozen=True)
class Arm:
    """An algorithm with its settings, at one learning rate."""

    label: str
    """The algorithm's name and its settings that differ from the defaults, in canonical form."""
    algorithm: Algorithm
    learning_rate: float
    source: str = ""
    """Digest of the file that defines a user's rule. If it changes, the runs are trained again."""
    control: str | None = None
    """Label of the same arm without token weights."""
    placebo: str | None = None
    """Label of the same arm with the token weights of each answer permuted."""


def parse_arms(texts: Sequence[str], learning_rates: Sequence[float], *, controls: bool = True) -> list[Arm]:
    """Every arm at each learning rate, or at its own (`@RATE`). `controls` adds a control and a placebo to arms that
    weight tokens."""
    arms: dict[tuple[str, float], Arm] = {}
    given: dict[tuple[str, float], str] = {}
    problems: list[Problem] = []
    for text in texts:
        try:
            rule, *own_rate = RATE.split(text)[:2]
            algorithm = get_algorithm(rule)
            rates = _check(algorithm, own_rate or learning_rates)
            source = source_digest(type(algorithm)) if ":" in rule else ""
            control = algorithm.control() if controls else None
            placebo = replace(algorithm, placebo=True) if controls and _weights_tokens(algorithm) else None
        except DewError as error:
            problems += [replace(problem, what=f"arm {text!r}: {problem.what}") for problem in error.problems]
            continue
        control = None if control == algorithm else control
        names = [x.label if x else None for x in (control, placebo)]
        for rate in dict.fromkeys(rates):
            if twice := given.get((algorithm.label, rate)):
                what = f"arm {text!r}: the same as {twice!r}."
                problems.append(Problem(what, remedy="Give each arm once. For more runs of each, use --seeds."))
            given[algorithm.label, rate] = text
            others = [x for x in (control, placebo) if x]
            made = [Arm(algorithm.label, algorithm, rate, source, *names)]
            made += [Arm(x.label, x, rate, source if type(x) is type(algorithm) else "") for x in others]
            for arm in made:
                same = arms.setdefault((arm.label, rate), arm)
                if type(same.algorithm) is not type(arm.algorithm):
                    what = f"arm {text!r}: another arm has the same name {arm.algorithm.name!r}."
                    problems.append(Problem(what, remedy="Give each class a name of its own."))
    if problems:
        raise ConfigError(problems)
    if not arms:
        raise ConfigError(Problem("no arms.", remedy="Name at least one rule, the baseline first: dapo gtpo@3e-5"))
    return list(arms.values())


def _weights_tokens(algorithm: Algorithm) -> bool:
    """Whether tokens of the same answer get different credit, on random rollouts."""
    algorithm = replace(algorithm, max_tokens=algorithm.max_tokens or max(16, algorithm.overlong_buffer or 0))
    for x in random_rollouts(8, 16):
        rollouts = Rollouts(**{name: x[name].flatten(0, 1)[1:4] for name in ("mask", "reward", *algorithm.signals)})
        try:
            A = give_credit(algorithm, rollouts).advantages
        except DewError:  # reported when the arm is trained
            return False
        highest = torch.where(rollouts.mask, A, -torch.inf).amax(-1)
        if (highest - torch.where(rollouts.mask, A, torch.inf).amin(-1) > 1e-6)[rollouts.live].any():
            return True
    return False


def _check(algorithm: Algorithm, rates: Sequence[float | str]) -> list[float]:
    """The learning rates as numbers."""
    if algorithm.engine_loss:
        why = "Its credit and loss are the engine's, which the lab does not have."
        raise ConfigError(Problem("cannot be trained.", why, "Name one of dew's algorithms, e.g. dapo."))
    if algorithm.kl_coef:
        why = "The lab keeps no reference policy."
        raise ConfigError(Problem(f"kl_coef={algorithm.kl_coef}.", why, "Leave kl_coef out."))
    try:
        found = [float(rate) for rate in rates]
    except ValueError:
        found = []
    if not found or not all(0 < rate < 1 for rate in found):
        what = f"learning rate {', '.join(map(str, rates))}."
        raise ConfigError(Problem(what, remedy="Give a number between 0 and 1, such as 3e-5."))
    return found


# ── credit and loss ─────────────────────────────────────────────────────────────────────────────────────────
class Team:
    """Neighbouring replicas with the same algorithm, whose credit and loss are computed in one call if possible.

    Credit: if, on random rollouts, one call for the groups of two runs gives the same as a call for each. Loss: if
    `vmap` gives the same on the first batch. Otherwise the algorithm is called once per replica.
    """

    def __init__(self, algorithm: Algorithm, rows: slice, group_size: int, tokens: int) -> None:
        self.algorithm, self.rows = algorithm, rows
        self.vectorised: bool | None = None  # not tried yet
        self.stacked = all(self._same_apart(two) for two in random_rollouts(group_size, tokens))

    def _same_apart(self, two: dict[str, Tensor]) -> bool:
        together, alone = (self.credit(two, stacked) for stacked in (True, False))
        names = [name for name in TRAINED if name in alone]
        return all(torch.allclose(together[name], alone[name], rtol=1e-4, atol=1e-5) for name in names)

    def credit(self, given: dict[str, Tensor], stacked: bool | None = None) -> dict[str, Tensor]:
        """The groups that train as "signal", (r, P), and (r, P, G, T) fields of `Credit`, which are 0 in the others.

        Groups without signal train if the rule gives them credit and does not have dynamic sampling, which would drop
        them. `given`: the fields of `Rollouts` with a leading axis of r replicas. `stacked`: all runs in one call, or
        each in its own (default: as was found to be right).
        """
        given = {name: given[name] for name in ("mask", "reward", *self.algorithm.signals)}  # as in an engine
        runs, mask = given["mask"].shape[:2], given["mask"].flatten(0, 1)
        given = {name: x.flatten(0, 1) for name, x in given.items()}
        signal = self.algorithm.signal(Rollouts(**given))
        allowed = signal | (not self.algorithm.dynamic_sampling)
        parts: list[Any] = [slice(None)]
        if not (self.stacked if stacked is None else stacked):  # as in an engine, which passes the groups of one run
            every = torch.arange(len(mask), device=mask.device).view(runs)
            parts = [groups[keep] for groups, keep in zip(every, allowed.view(runs), strict=True) if keep.any()]
        names = ["advantages", "flipped", *["penalty"] * self.algorithm.penalises]
        found = {name: torch.zeros(mask.shape, device=mask.device) for name in names}
        for part in parts:
            credit = give_credit(self.algorithm, Rollouts(**{name: x[part] for name, x in given.items()}))
            for name, x in found.items():
                x[part] = getattr(credit, name).to(torch.float32)
        found = {name: torch.where(allowed[:, None, None], x, 0) for name, x in found.items()}
        signal = signal | found["advantages"].flatten(1).any(1)
        if not all(found[name].isfinite().all() for name in TRAINED if name in found):
            what = f"{self.algorithm.name}: some advantages or penalties are NaN or infinite."
            raise ShapeError(Problem(what, remedy=DIVISION))
        return {name: x.unflatten(0, runs) for name, x in (found | {"signal": signal}).items()}

    def loss(self, logp: Tensor, given: dict[str, Tensor], advantages: Tensor, count: Tensor) -> Tensor:
        """(r,) losses of (r, b, T) rows. `given`: the fields of `Part`."""

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
            except Exception:  # the rule does something that vmap does not support
                self.vectorised = False
        return losses


def teams(algorithms: Sequence[Algorithm], group_size: int, tokens: int) -> list[Team]:
    """Team up runs with the same algorithm, which must be neighbours. Like an engine, fill in the generation budget."""
    found: list[Team] = []
    for algorithm, runs in groupby(algorithms):
        start = found[-1].rows.stop if found else 0
        filled = replace(algorithm, max_tokens=tokens) if algorithm.max_tokens is None else algorithm
        found.append(Team(filled, slice(start, start + len(list(runs))), group_size, tokens))
    return found


def random_rollouts(G: int, T: int) -> list[dict[str, torch.Tensor]]:
    """Fields of `Rollouts` for two replicas with four groups each, the first of them without signal: with high entropy,
    and with a low one that differs between the replicas, because some rules weight tokens only at one of them."""
    random = generator("rollouts", 0)
    mask = torch.arange(T) < torch.randint(1, T + 1, (2, 4, G, 1), generator=random)
    reward = (torch.rand(2, 4, G, generator=random) < 0.5).float()
    reward[:, 0], reward[:, 1:, 0], reward[:, 1:, 1] = 0, 0, 1
    scale = torch.tensor([-6.0, 2.0, 1.0]).view(3, 1, 1, 1, 1)
    logp, entropy, sum_sq = torch.rand(3, 2, 4, G, T, generator=random) * scale
    tokens = torch.randint(0, 4, mask.shape, generator=random)
    found = {"mask": mask, "reward": reward, "logp": logp, "entropy": entropy, "sum_sq": sum_sq, "tokens": tokens}
    lower = torch.tensor([1.0, 0.1]).view(2, 1, 1, 1)
    return [found, found | {"entropy": entropy / 10 * lower, "logp": logp * lower}]
