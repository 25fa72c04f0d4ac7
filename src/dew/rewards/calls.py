"""One call of a reward function: its failure as one RewardError, its return values checked."""

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from reprlib import repr as short_repr
from traceback import format_exception_only
from typing import Any

from dew.errors import Problem, RewardError, user_line

Rewards = list[float | None]

NOT_FINITE = math.inf  # replaces every infinity and NaN that a function returned, because NaN stands for None in TRL


def reward_name(reward: Any) -> str:
    """The name that TRL gives it: a function's own, a callable's class, the last part of a model's path."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    path = reward if isinstance(reward, str) else getattr(getattr(reward, "config", None), "_name_or_path", None)
    return str(getattr(reward, "__name__", type(reward).__name__)) if path is None else path.split("/")[-1]


def describe_batch(completions: Sequence[Any], prompts: Sequence[Any] | None) -> str:
    first = f", the first {completions[0]!r:.200}" if completions else ""
    prompt = f" for the prompt {prompts[0]!r:.120}" if prompts else ""
    return f"It was scoring {len(completions)} answers{first}{prompt}."


@contextmanager
def reported(name: str, completions: Sequence[Any], prompts: Sequence[Any] | None) -> Iterator[None]:
    """Whatever the block raises becomes a RewardError with the function's name and the batch."""
    batch = describe_batch(completions, prompts)
    try:
        yield
    except RewardError as error:
        raise RewardError([replace(problem, why=problem.why or batch) for problem in error.problems]) from error
    except (Exception, SystemExit) as error:  # a reward function does not end a run
        what = f"The reward {name} failed: {describe(error)}{user_line(error)}."
        remedy = "Catch what can go wrong, and return None for an answer that cannot be scored."
        raise RewardError(Problem(what, batch, remedy)) from error


def call_reward(name: str, function: Callable[..., Any], completions: Sequence[Any], /, **columns: Any) -> Rewards:
    """The rewards that a function returns, called as TRL calls it; a coroutine is awaited."""
    n = len(completions)  # before the function can change the list
    with reported(name, completions, columns.get("prompts")):
        values = function(completions=completions, **columns)
        if inspect.iscoroutine(values):
            values = asyncio.run(values)
        return as_rewards(name, values, n)


def describe(error: BaseException) -> str:
    """An exception as one short line."""
    return " ".join("".join(format_exception_only(error)).split())[:300]


def as_rewards(name: str, values: Any, n: int) -> Rewards:
    """`values` as n rewards; None where the function gives no reward. Raises RewardError for anything else."""
    listed = hasattr(values, "__iter__") and not isinstance(values, str | bytes | Mapping | Set)
    if not listed or getattr(values, "ndim", 1) != 1:
        raise _returned(name, values)
    found = list(islice(values, n + 1))  # a generator may be endless
    if len(found) != n:
        count = f"more than {n}" if len(found) > n else len(found)
        problem = f"The reward {name} returned {count} rewards for {n} answers."
        raise RewardError(Problem(problem, remedy="Return one for each, in the same order."))
    return [None if value is None else _number(name, value) for value in found]


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes) or getattr(value, "ndim", 0) != 0:
            raise TypeError
        number = float(value)
    except Exception:  # __float__ is the user's and may raise anything
        raise _returned(name, value) from None
    return number if math.isfinite(number) else NOT_FINITE


def _returned(name: str, value: Any) -> RewardError:
    problem = f"The reward {name} returned {type(value).__name__} {short_repr(value)}."
    return RewardError(Problem(problem, remedy="Return one number per answer, or None for no reward."))
