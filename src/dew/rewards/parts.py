"""A reward made of parts, each with its weight: `{"math": 1.0, "think_format": 0.1, "rewards.py:brevity": 0.2}`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any

from dew.errors import ConfigError
from dew.rewards import format as formats
from dew.rewards.own import load_reward
from dew.rewards.registry import VERIFIERS, verifier

FORMATS = ("think_format", "think_answer_format", "boxed_format")


@dataclass(frozen=True)
class Part:
    """TRL takes the functions as `reward_funcs` and the weights as `reward_weights`."""

    name: str
    function: Callable[..., Any]
    weight: float


def reward(name: str) -> Callable[..., Any]:
    """The reward function of that name: a verifier, a format, `overlong:LIMIT:BUFFER`, or a path to one's own."""
    if name in VERIFIERS:
        return verifier(name)
    if name in FORMATS:
        return getattr(formats, name)
    kind, *numbers = name.split(":")
    if kind == "overlong":
        if len(numbers) != 2 or not all(n.isdecimal() for n in numbers):
            raise ConfigError(f"reward {name!r}: write overlong:LIMIT:BUFFER in tokens, as in overlong:20480:4096.")
        return formats.Overlong(*map(int, numbers))
    if is_path(name):
        return load_reward(name)
    known = (*VERIFIERS, *FORMATS)
    near = get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(known)}, overlong:LIMIT:BUFFER,"
    raise ConfigError(f"No reward is called {name!r}. {hint} For your own write module:function or file.py:function.")


def own_path(name: str) -> str:
    """TRL's `module.function` as `module:function`."""
    return ":".join(name.rsplit(".", 1)) if "." in name and ":" not in name else name


def is_path(name: str) -> bool:
    """True for code by its path, `module:function` or `file.py:function`: code that does not come with dew."""
    return ":" in name and name.partition(":")[0] != "overlong"


def reward_parts(weights: Mapping[str, float]) -> list[Part]:
    """One part for each name and weight."""
    wrong = [f"{name}: {w!r}" for name, w in weights.items() if not isinstance(w, int | float) or not isfinite(w)]
    if wrong or not weights:
        raise ConfigError(f"reward weights {{{', '.join(wrong)}}}: name one part or more, each with a finite number.")
    return [Part(_short(name), reward(name), float(weight)) for name, weight in weights.items()]


def _short(name: str) -> str:
    return "overlong" if name.startswith("overlong:") else name.rpartition(":")[2]
