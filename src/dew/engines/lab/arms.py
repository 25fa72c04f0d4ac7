"""The arms of a study, from text: `dapo`, `gtpo(alpha2=0.5)@3e-5`, `my_module:MyRule`, `rules.py:MyRule(keep=0.1)`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dew.algorithms import Algorithm, parse_algorithm, source_digest
from dew.algorithms.credit import give_credit
from dew.engines.lab.team import random_rollouts
from dew.errors import ConfigError, DewError, Problem
from dew.rollouts import Rollouts


@dataclass(frozen=True)
class Arm:
    """An algorithm with its settings, at one learning rate."""

    label: str
    """The rule and the settings that are not its defaults, always spelled the same."""
    algorithm: Algorithm
    learning_rate: float
    source: str = ""
    """Digest of the file of a user's rule: after a change its runs are new runs."""
    control: str | None = None
    """The label of the same arm without weights on tokens."""
    placebo: str | None = None
    """The label of the same arm with the weights of each answer permuted."""


def parse_arms(texts: Sequence[str], learning_rates: Sequence[float], *, controls: bool = True) -> list[Arm]:
    """Every arm at each of the learning rates, or at its own; each that weights tokens with its control and placebo."""
    arms: dict[tuple[str, float], Arm] = {}
    problems: list[Problem] = []
    for text in texts:
        try:
            rule, _, own_rate = text.partition("@")
            algorithm = parse_algorithm(rule)
            rates = _check(algorithm, [own_rate] if own_rate else learning_rates)
            source = source_digest(type(algorithm)) if ":" in rule else ""
            control = algorithm.control() if controls else None
            placebo = replace(algorithm, placebo=True) if controls and _weights_tokens(algorithm) else None
        except DewError as error:
            problems += [replace(problem, what=f"arm {text!r}: {problem.what}") for problem in error.problems]
            continue
        control = None if control == algorithm else control
        names = [x.label if x else None for x in (control, placebo)]
        for rate in rates:
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
    algorithm = replace(algorithm, max_tokens=algorithm.max_tokens or 16)
    for x in random_rollouts(8, 16):
        rollouts = Rollouts(**{name: x[name].flatten(0, 1)[1:4] for name in ("mask", "reward", *algorithm.signals)})
        try:
            A = give_credit(algorithm, rollouts).advantages
        except DewError:  # reported when it trains
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
