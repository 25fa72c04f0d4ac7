"""The arms of a study, from text: `dapo`, `gtpo(alpha2=0.5)@3e-5`, `my_module:MyRule`, `rules.py:MyRule(keep=0.1)`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dew.algorithms import Algorithm, parse_algorithm, source_digest
from dew.errors import ConfigError, DewError, Problem


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


def parse_arms(texts: Sequence[str], learning_rates: Sequence[float], *, controls: bool = True) -> list[Arm]:
    """Every arm at each of the learning rates, or at its own; each arm that weights tokens followed by its control."""
    arms: dict[tuple[str, float], Arm] = {}
    problems: list[Problem] = []
    for text in texts:
        try:
            rule, _, own_rate = text.partition("@")
            algorithm = parse_algorithm(rule)
            rates = _check(algorithm, [own_rate] if own_rate else learning_rates)
            source = source_digest(type(algorithm)) if ":" in rule else ""
        except DewError as error:
            problems += [replace(problem, what=f"arm {text!r}: {problem.what}") for problem in error.problems]
            continue
        control = algorithm.control() if controls else None
        control = None if control == algorithm else control
        for rate in rates:
            made = [Arm(algorithm.label, algorithm, rate, source, control.label if control else None)]
            if control:
                made.append(Arm(control.label, control, rate, source if type(control) is type(algorithm) else ""))
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
