"""The arms of a study, from text: `dapo`, `gtpo(alpha2=0.5)@3e-5`, `my_module:MyRule`, `rules.py:MyRule(keep=0.1)`."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dew.algorithms import Algorithm, get_algorithm, source_digest
from dew.errors import ConfigError, DewError, Problem

PATTERN = re.compile(r"(?P<rule>[^(@]+?)\s*(\((?P<settings>.*)\))?\s*(@\s*(?P<rate>[^@]+))?", re.DOTALL)
FORMS = "Write NAME, NAME(setting=value,...), module:Class or file.py:Class, with @RATE for a learning rate of its own."


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
            rule, settings, rate = _split(text)
            algorithm = get_algorithm(rule, **settings)
            rates = learning_rates if rate is None else [rate]
            _check(algorithm, rates)
            source = source_digest(type(algorithm)) if ":" in rule else ""
        except DewError as error:
            problems += [replace(problem, what=f"arm {text!r}: {problem.what}") for problem in error.problems]
            continue
        control = algorithm.control() if controls else None
        if control == algorithm:
            control = None
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
        raise ConfigError(Problem("no arms.", remedy=f"Name at least one rule, the baseline first. {FORMS}"))
    return list(arms.values())


def _check(algorithm: Algorithm, rates: Sequence[float]) -> None:
    if algorithm.engine_loss:
        why = "Its credit and loss are the engine's, which the lab does not have."
        raise ConfigError(Problem("cannot be trained.", why, "Name one of dew's algorithms, e.g. dapo."))
    if algorithm.kl_coef:
        why = "The lab keeps no reference policy."
        raise ConfigError(Problem(f"kl_coef={algorithm.kl_coef}.", why, "Leave kl_coef out."))
    for rate in rates:
        if not 0 < rate < 1:
            raise ConfigError(Problem(f"learning rate {rate:g}.", remedy="Give a number between 0 and 1, e.g. 1e-4."))


def _split(text: str) -> tuple[str, dict[str, Any], float | None]:
    """Rule, settings and learning rate of an arm's text."""
    found = PATTERN.fullmatch(text.strip())
    if not found:
        raise ConfigError(Problem("cannot be read.", remedy=FORMS))
    rate = None
    if found["rate"]:
        try:
            rate = float(found["rate"])
        except ValueError:
            remedy = "Write it like @3e-5."
            raise ConfigError(Problem(f"learning rate {found['rate']!r} is not a number.", remedy=remedy)) from None
    return found["rule"].strip(), _settings(found["settings"] or ""), rate


def _settings(text: str) -> dict[str, Any]:
    """`alpha2=0.5,pool=joint`: Python's literals, and words without quotes."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        values = [k.value.id if isinstance(k.value, ast.Name) else ast.literal_eval(k.value) for k in call.keywords]
    except (SyntaxError, ValueError):
        raise ConfigError(Problem(f"settings ({text}) cannot be read.", remedy=FORMS)) from None
    names = [str(k.arg) for k in call.keywords]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(Problem(f"{', '.join(twice)} given twice.", remedy="Keep one of them."))
    return dict(zip(names, values, strict=True))
