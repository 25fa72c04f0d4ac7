"""The algorithms by name. To add one, define a class with a new name and pass it to `register_algorithm`."""

import ast
import re
from dataclasses import MISSING, fields
from typing import Any, get_args, get_origin, get_type_hints

from dew.algorithms.base import Algorithm
from dew.algorithms.baselines import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    QAE,
    SAPO,
    TRL,
    DrGRPO,
    MaxRL,
    ReinforcePP,
    WReinforce,
)
from dew.algorithms.entropy_peers import EntropyAdvantage, ForkingTokens
from dew.algorithms.entropy_weighted import DEW, GRPOS, GTPO
from dew.algorithms.own import own_class
from dew.algorithms.token_weighted import OTB, STEER, ClipCov, KLCov
from dew.errors import ConfigError, Problem, unknown

__all__ = [
    "CISPO",
    "DAPO",
    "DEFAULT_ALGORITHM",
    "DEW",
    "ENGINE_ALGORITHM",
    "GRPO",
    "GRPOS",
    "GSPO",
    "GTPO",
    "OTB",
    "QAE",
    "SAPO",
    "STEER",
    "TRL",
    "Algorithm",
    "ClipCov",
    "DrGRPO",
    "EntropyAdvantage",
    "ForkingTokens",
    "KLCov",
    "MaxRL",
    "ReinforcePP",
    "WReinforce",
    "algorithm_classes",
    "algorithms_for",
    "get_algorithm",
    "list_algorithms",
    "parse_algorithm",
    "register_algorithm",
]

DEFAULT_ALGORITHM = "gtpo"
"""Used if a configuration names no algorithm."""
ENGINE_ALGORITHM = TRL.name
"""The engine's own advantages and loss."""

_BY_NAME: dict[str, type[Algorithm]] = {}


def register_algorithm(cls: type[Algorithm]) -> type[Algorithm]:
    """Register an algorithm under its name. Also works as a class decorator."""
    _BY_NAME[_key(cls.name)] = cls
    return cls


def list_algorithms() -> list[str]:
    """Names of the registered algorithms."""
    return list(algorithm_classes())


def algorithms_for(setting: str) -> list[str]:
    """The names of the algorithms that do what a loss setting of another trainer asks for."""
    return [cls.name for cls in _BY_NAME.values() if setting in vars(cls).get("replaces", ())]


def algorithm_classes() -> dict[str, type[Algorithm]]:
    """Every registered algorithm by its name."""
    return {cls.name: cls for cls in _BY_NAME.values()}


def get_algorithm(name: str, **settings: Any) -> Algorithm:
    """The algorithm of this name with its paper's settings, except those given: `get_algorithm("gtpo", alpha2=0.2)`.

    `my_module:MyRule` and `my_rules.py:MyRule` name a class of your own.
    """
    cls = own_class(name) if ":" in name else _BY_NAME.get(_key(name))
    if cls is None:
        also = "For a class of your own, write file.py:Class."
        raise ConfigError(unknown(f"algorithm={name!r} is not known.", name, list_algorithms(), also))
    if ":" in name and (other := _BY_NAME.get(_key(cls.name))) and other.__module__ != cls.__module__:
        taken = Problem(f"{name}: its name {cls.name!r} is taken.", remedy="Give the class a name of its own.")
        raise ConfigError(taken)
    known = [f.name for f in fields(cls)]
    wrong = [unknown(f"{cls.name} has no setting {s!r}.", s, known) for s in settings if s not in known]
    unset = [f.name for f in fields(cls) if f.default is f.default_factory is MISSING and f.name not in settings]
    wrong += [Problem(f"{cls.name} needs the setting {s!r}.", remedy="Give it a default in the class.") for s in unset]
    if wrong:
        raise ConfigError(wrong)
    hints = get_type_hints(cls)
    lists = {s: value for s, value in settings.items() if isinstance(value, list)}
    tuples = {s: tuple(value) for s, value in lists.items() if _takes_tuple(hints[s])}  # files have lists
    return cls(**{**settings, **tuples})


def _takes_tuple(hint: Any) -> bool:
    return any(get_origin(kind) is tuple for kind in (hint, *get_args(hint)))


def parse_algorithm(text: str) -> Algorithm:
    """The algorithm that a text names: `gtpo`, `gtpo(alpha2=0.5,pool=outcome)` or `rules.py:MyRule(keep=0.1)`.

    `Algorithm.label` is such a text. Values are Python's literals, and words without quotes.
    """
    unreadable = Problem(f"{text!r} cannot be read.", remedy="Write NAME or NAME(setting=value,...).")
    found = re.fullmatch(r"\s*([^()]+?)\s*(\(.*\))?\s*", text, re.DOTALL)
    if found is None:
        raise ConfigError(unreadable)
    try:
        call = ast.parse(f"f{found[2] or '()'}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError
        pairs = [(str(k.arg), k.value) for k in call.keywords]
        settings = {name: x.id if isinstance(x, ast.Name) else ast.literal_eval(x) for name, x in pairs}
    except (SyntaxError, ValueError):
        raise ConfigError(unreadable) from None
    if len(settings) < len(pairs):
        raise ConfigError(Problem(f"{text!r} gives a setting twice.", remedy="Keep one of them."))
    return get_algorithm(found[1], **settings)


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


for _cls in (DEW, GTPO, GRPOS, GRPO, DAPO, DrGRPO, GSPO, ForkingTokens, EntropyAdvantage, CISPO, SAPO, MaxRL, QAE,
             WReinforce, ReinforcePP, ClipCov, KLCov, STEER, OTB, TRL):  # fmt: skip
    register_algorithm(_cls)
