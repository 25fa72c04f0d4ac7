"""Reward functions that fail loudly: an exception, a NaN, a hang or a missing column is told by name, at once."""

import asyncio
import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from dew.errors import ConfigError, RewardError
from dew.rewards.deadline import time_limit
from dew.rewards.user_function import TIMEOUT, UserFunction, required_columns
from dew.rewards.values import NOT_FINITE, Rewards, as_rewards, describe

logger = logging.getLogger("dew")

GIVEN_BY_TRL = frozenset(
    ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
)


def checked(reward: Any, timeout: float = TIMEOUT) -> Any:
    """The same reward function, whose failures are a RewardError and which may take `timeout` seconds for a batch.

    Models and names of models pass unchanged. Verifiers and functions given by path have limits of their own.
    """
    if isinstance(reward, str | nn.Module) or not callable(reward):
        return reward
    name = reward_name(reward)
    limited = hasattr(reward, "verdicts") or isinstance(reward, UserFunction)
    if hasattr(reward, "verdicts"):
        reward = telling(reward)
    call = reward if inspect.isroutine(reward) or isinstance(reward, functools.partial) else reward.__call__
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call):
        scored = _awaiting(reward, name, timeout)
    else:
        scored = _calling(reward, name, None if limited else timeout)
    scored.__name__ = name
    scored.__wrapped__ = reward  # type: ignore[attr-defined]
    return scored


def _calling(reward: Any, name: str, timeout: float | None) -> Callable[..., Rewards]:
    def scored(**kwargs: Any) -> Rewards:
        n = len(kwargs["completions"])  # before the function can change the list
        try:
            with nullcontext() if timeout is None else time_limit(name, timeout):
                found = as_rewards(name, reward(**kwargs), n)
        except (Exception, SystemExit) as error:
            raise _raised(name, error, kwargs) from error
        return _warned(name, found, kwargs["completions"])

    return scored


def _awaiting(reward: Any, name: str, timeout: float) -> Callable[..., Any]:
    async def scored(**kwargs: Any) -> Rewards:
        n = len(kwargs["completions"])
        try:
            values = await asyncio.wait_for(reward(**kwargs), timeout)
        except TimeoutError as error:
            late = RewardError(f"The reward {name} has not returned for {timeout:g} s; reward_timeout says how long.")
            raise _raised(name, late, kwargs) from error
        except (Exception, SystemExit) as error:
            raise _raised(name, error, kwargs) from error
        return _warned(name, as_rewards(name, values, n), kwargs["completions"])

    return scored


def _warned(name: str, found: Rewards, completions: Sequence[Any]) -> Rewards:
    if NOT_FINITE in found:
        first = completions[found.index(NOT_FINITE)]
        logger.warning(
            "The reward %s returned an infinity or a NaN for the completion %.200r. The step is skipped: return None "
            "where it cannot judge, and only that answer is left out.",
            name,
            first,
        )
    return found


def telling(verifier: Any) -> Callable[..., list[float]]:
    """A `dew.rewards.Verifier` that also tells its findings: to the completions table, to records, to the alarms."""

    def reward(
        completions: Sequence[Any], log_extra: Any = None, log_metric: Any = None, **columns: Any
    ) -> list[float]:
        rows = [{c: columns[c][i] for c in verifier.columns} for i in range(len(completions))]
        verdicts = verifier.verdicts(completions, rows)
        statuses = [verdict.status for verdict in verdicts]
        if log_extra is not None:
            log_extra(f"{verifier.name}/verdict", statuses)
            log_extra(f"{verifier.name}/extracted", [verdict.extracted for verdict in verdicts])
        if log_metric is not None:
            log_metric("verifier/failed_share", statuses.count("timeout") / len(statuses))
            log_metric("verifier/unparsable_share", statuses.count("unparsable") / len(statuses))
        return [verdict.reward for verdict in verdicts]

    return reward


def reward_name(reward: Any) -> str:
    """The name that TRL gives it: a function's own, a callable's class, the last part of a model's path."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    if isinstance(reward, nn.Module):
        reward = getattr(reward.config, "_name_or_path", "")
    return reward.split("/")[-1] if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)


def outcome_index(names: Sequence[str], wanted: str | None) -> int:
    """Which reward function decides whether an answer is correct."""
    if wanted is None:
        if len(names) == 1:
            return 0
        if not names:
            raise ConfigError("no reward function: pass reward_funcs=[...], one of which tells right from wrong.")
        raise ConfigError(
            f"{len(names)} reward functions ({', '.join(names)}): say which one decides that an answer is correct, "
            f"e.g. outcome_reward={names[0]!r}. The others are added to its reward and never decide."
        )
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"outcome_reward={wanted!r} is none of the reward functions: {', '.join(names)}.{guess}")
    return list(names).index(wanted)


def check_weights(names: Sequence[str], weights: Sequence[float] | None, outcome: int) -> None:
    if weights is None or outcome >= len(weights) or weights[outcome] == 1:  # an environment's own reward weighs 1
        return
    if weights[outcome] <= 0:
        raise ConfigError(f"reward_weights={list(weights)}: the outcome reward {names[outcome]!r} needs weight 1.")
    relative = [round(w / weights[outcome], 6) for w in weights]
    raise ConfigError(
        f"reward_weights={list(weights)}: the outcome reward {names[outcome]!r} has weight 1 and the others count "
        f"relative to it. Write reward_weights={relative}."
    )


def missing_columns(dataset: Any, rewards: Sequence[Any]) -> list[str]:
    """What the data set lacks: the prompt, or something that a reward function asks for by name."""
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list):
        return []
    problems = []
    if "prompt" not in columns:
        problems.append(_no_column("the trainer", "prompt", columns))
    for reward in rewards:
        if isinstance(reward, str | nn.Module) or not callable(reward):
            continue
        problems += [
            _no_column(f"reward function {reward_name(reward)!r}", wanted, columns)
            for wanted in _required(reward)
            if wanted not in columns and wanted not in GIVEN_BY_TRL
        ]
    return problems


def _required(reward: Any) -> list[str]:
    if hasattr(reward, "verdicts"):
        return list(reward.columns)
    if isinstance(reward, UserFunction):
        return reward.required
    return required_columns(reward)


def _no_column(who: str, wanted: str, columns: list[str]) -> str:
    near = difflib.get_close_matches(wanted, columns, n=1)
    guess = f" Rename {near[0]!r} to it?" if near else ""
    return f"{who} needs the column {wanted!r}, and the data set has {', '.join(columns) or 'none'}.{guess}"


def _raised(name: str, error: BaseException, given: dict[str, Any]) -> RewardError:
    completions, prompts = given["completions"], given.get("prompts") or []
    first = f", the first of them {completions[0]!r:.200}" if completions else ""
    prompt = f" to the prompt {prompts[0]!r:.120}" if prompts else ""
    asked = f"It was judging {len(completions)} completions{first}{prompt}."
    if isinstance(error, RewardError):
        return RewardError(f"{error} {asked}")
    advice = "Catch what can go wrong and return None where it cannot judge."
    return RewardError(f"The reward {name} raised {describe(error)}. {asked} {advice}")
