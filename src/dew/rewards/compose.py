"""Several rewards with weights: `{"math": 1.0, "think_format": 0.1, "rewards.py:brevity": 0.2}`."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NamedTuple

from dew.errors import ConfigError, Problem, did_you_mean
from dew.rewards import format as formats
from dew.rewards.user_function import is_user_function, load_reward
from dew.rewards.verifiers import VERIFIERS, verifier

FORMATS = ("think_format", "think_answer_format", "boxed_format")


class Part(NamedTuple):
    """TRL takes the functions as `reward_funcs` and the weights as `reward_weights`."""

    name: str
    function: Callable[..., Any]
    weight: float


def reward(name: str) -> Callable[..., Any]:
    """The reward function with that name: a verifier, a format, `overlong:LIMIT:BUFFER`, or a user's function."""
    if name in VERIFIERS:
        return verifier(name)
    if name in FORMATS:
        return getattr(formats, name)
    kind, *numbers = name.split(":")
    if kind == "overlong":
        if len(numbers) != 2 or not all(n.isdecimal() for n in numbers):
            remedy = "Write overlong:LIMIT:BUFFER in tokens, as in overlong:20480:4096."
            raise ConfigError(Problem(f"reward {name!r}: not a limit and a buffer.", remedy=remedy))
        return formats.Overlong(*map(int, numbers))
    if is_user_function(name):
        return load_reward(name)
    known = (*VERIFIERS, *FORMATS)
    remedy = did_you_mean(name, known) or f"Available: {', '.join(known)}, overlong:LIMIT:BUFFER."
    remedy += " For your own function, write module:function or file.py:function."
    raise ConfigError(Problem(f"No reward is called {name!r}.", remedy=remedy))


def reward_parts(weights: Mapping[str, float]) -> list[Part]:
    """One part for each name and weight."""
    wrong = [f"{name}: {w!r}" for name, w in weights.items() if not isinstance(w, int | float) or not isfinite(w)]
    if wrong or not weights:
        remedy = "Name at least one reward, each with a finite number."
        raise ConfigError(Problem(f"reward weights {{{', '.join(wrong)}}}: cannot be used.", remedy=remedy))
    short = {name: name.replace(".", ":").rpartition(":")[2] for name in weights if is_user_function(name)}
    return [Part(short.get(name, name.partition(":")[0]), reward(name), float(w)) for name, w in weights.items()]
