"""The algorithms by name. Adding one is a class with a name of its own and a line in `register_algorithm`."""

import difflib
from dataclasses import fields
from typing import Any

from dew.algorithms.base import Algorithm
from dew.algorithms.baselines import DAPO, GRPO, GSPO, DrGRPO
from dew.algorithms.entropy_peers import EntropyAdvantage, ForkingTokens
from dew.algorithms.entropy_weighted import GRPOS, GTPO
from dew.errors import ConfigError

__all__ = [
    "DAPO",
    "DEFAULT_ALGORITHM",
    "GRPO",
    "GRPOS",
    "GSPO",
    "GTPO",
    "Algorithm",
    "DrGRPO",
    "EntropyAdvantage",
    "ForkingTokens",
    "algorithm_classes",
    "get_algorithm",
    "list_algorithms",
    "register_algorithm",
]

DEFAULT_ALGORITHM = "gtpo"
"""What a configuration that names no algorithm trains with."""

_BY_NAME: dict[str, type[Algorithm]] = {}


def register_algorithm(cls: type[Algorithm]) -> type[Algorithm]:
    """Make an algorithm known by its name. Usable as a decorator on a class of your own."""
    _BY_NAME[_key(cls.name)] = cls
    return cls


def list_algorithms() -> list[str]:
    """The names that `get_algorithm` knows."""
    return [cls.name for cls in _BY_NAME.values()]


def algorithm_classes() -> dict[str, type[Algorithm]]:
    """Every registered algorithm by its name."""
    return {cls.name: cls for cls in _BY_NAME.values()}


def get_algorithm(name: str, **settings: Any) -> Algorithm:
    """`get_algorithm("gtpo", alpha2=0.2)`: the paper's settings, and what you say beyond them."""
    cls = _BY_NAME.get(_key(name))
    if cls is None:
        raise ConfigError(f"algorithm={name!r} is not known.{_nearest(name, list_algorithms())}")
    known = [f.name for f in fields(cls)]
    unknown = [f"{cls.name} has no setting {s!r}.{_nearest(s, known)}" for s in settings if s not in known]
    if unknown:
        raise ConfigError("\n".join(unknown))
    if isinstance(settings.get("entropy_clip"), list):  # files have lists where Python has tuples
        settings["entropy_clip"] = tuple(settings["entropy_clip"])
    return cls(**settings)


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return f"{guess} Known: {', '.join(known)}."


for _cls in (GTPO, GRPOS, GRPO, DAPO, DrGRPO, GSPO, ForkingTokens, EntropyAdvantage):
    register_algorithm(_cls)
