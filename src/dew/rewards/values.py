"""Checks what a reward function returned: one number or None per completion."""

import math
from collections.abc import Mapping, Set
from itertools import islice
from reprlib import repr as short_repr
from traceback import format_exception_only
from typing import Any

from dew.errors import Problem, RewardError

Rewards = list[float | None]

NOT_FINITE = math.inf
"""Replaces every infinity and NaN that a function returned, because NaN stands for None in TRL."""


def as_rewards(name: str, values: Any, n: int) -> Rewards:
    """`values` as n rewards; None where the function gives no reward. Raises RewardError for anything else."""
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__iter__"):
        raise _returned(name, values, "", "Return a list with one number per completion, or None for no reward.")
    try:
        found = list(islice(values, n + 1))  # a generator may be endless
    except Exception as error:
        raise _returned(name, values, f", which fails: {describe(error)}", "") from None
    if len(found) != n:
        count = len(values) if hasattr(values, "__len__") else f"more than {n}" if len(found) > n else len(found)
        problem = f"The reward {name} returned {count} rewards for {n} completions."
        raise RewardError(Problem(problem, remedy="Return one for each, in the same order."))
    return [_number(name, value, i) for i, value in enumerate(found)]


def _number(name: str, value: Any, i: int) -> float | None:
    if value is None:
        return None
    try:
        scalar = not isinstance(value, str | bytes) and getattr(value, "ndim", 0) == 0
        number = float(value) if scalar else None
    except Exception:  # __float__ is the user's and may raise anything
        number = None
    if number is None:
        raise _returned(name, value, f" for completion {i}", "Return a number, or None for no reward.")
    return number if math.isfinite(number) else NOT_FINITE


def _returned(name: str, value: Any, where: str, remedy: str) -> RewardError:
    problem = f"The reward {name} returned {type(value).__name__} {short_repr(value)}{where}."
    return RewardError(Problem(problem, remedy=remedy))


def describe(error: BaseException) -> str:
    """An exception as one short line."""
    return " ".join("".join(format_exception_only(error)).split())[:300]
