"""The arms of a study, from text: `dapo`, `gtpo(alpha2=0.5)@3e-5`, `my_module:MyRule`, `rules.py:MyRule(keep=0.1)`."""

import ast
import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from dew.algorithms import Algorithm, algorithm_classes, get_algorithm, register_algorithm
from dew.errors import ConfigError, DewError, Problem, did_you_mean

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
    """The label of the same arm without entropy weighting."""


def parse_arms(texts: Sequence[str], learning_rates: Sequence[float], *, controls: bool = True) -> list[Arm]:
    """Every arm at each of the learning rates, or at its own; each entropy-weighted arm followed by its control."""
    arms: dict[tuple[str, float], Arm] = {}
    problems: list[Problem] = []
    for text in texts:
        try:
            rule, settings, rate = _split(text)
            name, source = _find(rule)
            algorithm = get_algorithm(name, **settings)
        except DewError as error:
            what = f"arm {text!r}: "
            problems += [replace(problem, what=what + problem.what) for problem in error.problems]
            continue
        if algorithm.kl_coef:
            why = "The lab keeps no reference policy."
            problems.append(Problem(f"arm {text!r}: kl_coef={algorithm.kl_coef}.", why, "Leave kl_coef out."))
        plain = algorithm.control() if controls else None
        plain = None if plain == algorithm else plain
        for each in (rate,) if rate is not None else learning_rates:
            made = [Arm(_label(algorithm), algorithm, each, source, _label(plain) if plain else None)]
            made += [Arm(_label(plain), plain, each, source)] if plain else []
            for arm in made:
                arms.setdefault((arm.label, each), arm)
    if problems:
        raise ConfigError(problems)
    if not arms:
        raise ConfigError(Problem("no arms.", remedy=f"Name at least one rule, the baseline first. {FORMS}"))
    return list(arms.values())


def _label(algorithm: Algorithm) -> str:
    """`gtpo(alpha2=0.5,pool=joint)`: the settings that differ from the defaults, in the order of the fields."""
    changed = [
        f"{f.name}={str(getattr(algorithm, f.name)).replace(' ', '')}"
        for f in fields(algorithm)
        if f.default is MISSING or getattr(algorithm, f.name) != f.default
    ]
    return f"{algorithm.name}({','.join(changed)})" if changed else algorithm.name


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
        assert isinstance(call, ast.Call) and not call.args
        return {str(k.arg): k.value.id if isinstance(k.value, ast.Name) else _literal(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise ConfigError(Problem(f"settings ({text}) cannot be read.", remedy=FORMS)) from None


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(node)


def _find(rule: str) -> tuple[str, str]:
    """The registered name of a rule, and the digest of its file if it is a user's."""
    if ":" not in rule:
        return rule, ""
    where, _, name = rule.rpartition(":")
    module = _load(where)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        rules = [n for n, x in vars(module).items() if isinstance(x, type) and issubclass(x, Algorithm)]
        own = [n for n in rules if getattr(module, n).__module__ == module.__name__]
        remedy = f"{did_you_mean(name, own)} {'It has: ' + ', '.join(own) if own else 'It has none'}.".lstrip()
        raise ConfigError(Problem(f"{where} has no class {name!r} derived from dew.Algorithm.", remedy=remedy))
    known = algorithm_classes().get(getattr(found, "name", ""))
    if not isinstance(vars(found).get("name"), str) or (known and known.__module__ != found.__module__):
        why = f"It has the name {known.name!r}, which is taken." if known else "It has no name."
        raise ConfigError(
            Problem(f"{rule}: class {name}.", why, 'Give it one of its own: name: ClassVar[str] = "mine".')
        )
    register_algorithm(found)
    file = getattr(module, "__file__", None)
    return found.name, hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else ""


def _load(where: str) -> ModuleType:
    """A module by name, looked up in the working folder too, or a file."""
    try:
        if not where.endswith(".py"):
            if str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            return import_module(where)
        name = f"dew_lab_{Path(where).stem}"
        spec = spec_from_file_location(name, where)
        assert spec and spec.loader
        module = sys.modules[name] = module_from_spec(spec)  # data classes look their module up
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        raise ConfigError(Problem(f"{where} cannot be imported ({reason}).", remedy="Check the path.")) from None
