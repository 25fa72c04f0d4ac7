"""What a user's reward function returned, held against what a reward is: one number per answer, or None."""

import math
from collections.abc import Mapping, Set
from itertools import islice
from typing import Any

from dew.errors import RewardError

Rewards = list[float | None]

NO_NUMBER = math.inf
"""Stands for every infinity and NaN that a function returned. NaN itself stands for None in TRL."""


def as_rewards(name: str, values: Any, n: int) -> Rewards:
    """`values` as n numbers; None where the function has nothing to say. What is no number at all is a RewardError."""
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__iter__"):
        raise RewardError(
            f"The reward {name} returned {shown(values)}: return a list, one number per completion, or None where it "
            "does not apply."
        )
    try:
        found = list(islice(values, n + 1))  # a generator may have no end
    except Exception as error:
        raise RewardError(f"The reward {name} returned {shown(values)}, which fails: {told(error)}.") from None
    if len(found) != n:
        many = f"more than {n}" if len(found) > n else str(len(found))
        many = str(len(values)) if hasattr(values, "__len__") else many
        raise RewardError(f"The reward {name} returned {many} rewards for {n} completions: one each, in their order.")
    return [_number(name, value, i) for i, value in enumerate(found)]


def _number(name: str, value: Any, i: int) -> float | None:
    if value is None:
        return None
    scalar = not isinstance(value, str | bytes) and getattr(value, "ndim", 0) == 0
    try:
        number = float(value) if scalar else None
    except Exception:  # whatever a stranger's __float__ raises
        number = None
    if number is None:
        raise RewardError(
            f"The reward {name} returned {shown(value)} for completion {i}: return a number, or None where it cannot "
            "judge."
        )
    return number if math.isfinite(number) else NO_NUMBER


def shown(value: Any) -> str:
    """Type and beginning of a value, whatever its repr does."""
    try:
        text = repr(value)
    except Exception:
        text = "..."
    return f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"


def told(error: BaseException) -> str:
    """An exception in one short line."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}"
