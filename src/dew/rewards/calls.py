"""One call of a reward function: its time limit, its failure as one RewardError, its return values checked.

`time_limit` is for a callable that was passed from Python, which runs in this process: at the limit an alarm interrupts
it. If it cannot be interrupted, because it holds the interpreter's lock in C code or swallows every exception, the
process exits GRACE seconds later with a traceback of every thread. A function given by path has its own process
(user_function.py).
"""

import faulthandler
import functools
import inspect
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from reprlib import repr as short_repr
from traceback import format_exception_only
from typing import Any

from dew.errors import Problem, RewardError, user_line

Rewards = list[float | None]

NOT_FINITE = math.inf
"""Replaces every infinity and NaN that a function returned, because NaN stands for None in TRL."""
GRACE = 30.0
"""Seconds between the alarm and the end of the process."""


def reward_name(reward: Any) -> str:
    """The name that TRL gives it: a function's own, a callable's class, the last part of a model's path."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    path = reward if isinstance(reward, str) else getattr(getattr(reward, "config", None), "_name_or_path", None)
    return str(getattr(reward, "__name__", type(reward).__name__)) if path is None else path.split("/")[-1]


class _Expired(BaseException):
    """Not an Exception, so that `except Exception` in the function does not swallow it."""


def _expire(*_: Any) -> None:
    raise _Expired


@contextmanager
def time_limit(name: str, seconds: float) -> Iterator[None]:
    """Limit the block to `seconds`. If it forks, the copy exits at the end of the block."""
    pid = os.getpid()
    with ExitStack() as stack:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=2)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        alarm_is_free = signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN)
        if alarm_is_free and threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, _expire))
            stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # repeated, in case the first one is swallowed
        try:
            yield
        except _Expired:
            raise too_late(name, seconds) from None
        finally:
            if os.getpid() != pid:
                os._exit(1)


def too_late(name: str, seconds: float) -> RewardError:
    remedy = "Return None for answers it cannot score in time, or raise reward_timeout."
    return RewardError(Problem(f"The reward {name} did not return within {seconds:g} s.", remedy=remedy))


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
            import asyncio

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
