"""Reward functions that fail loudly: an exception, a NaN or a missing column is told by name, at once."""

import difflib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dew.errors import ConfigError, RewardError

logger = logging.getLogger("dew")

NO_NUMBER = math.inf
"""Stands for every infinity and NaN that a function returned; TRL has NaN stand for None."""

GIVEN_BY_TRL = frozenset(
    ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
)


def checked(reward: Any) -> Any:
    """The same reward function, whose failures are a RewardError. Models and names of models pass unchanged."""
    if isinstance(reward, str | nn.Module) or not callable(reward):
        return reward
    name = reward_name(reward)
    if hasattr(reward, "verdicts"):
        reward = telling(reward)
    call = reward if inspect.isroutine(reward) or isinstance(reward, functools.partial) else reward.__call__
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call):

        async def scored(**kwargs: Any) -> list[float | None]:
            try:
                values = await reward(**kwargs)
            except Exception as error:
                raise _raised(name, error, kwargs["completions"]) from error
            return _values(name, values, kwargs["completions"])
    else:

        def scored(**kwargs: Any) -> list[float | None]:  # type: ignore[misc]
            try:
                values = reward(**kwargs)
            except Exception as error:
                raise _raised(name, error, kwargs["completions"]) from error
            return _values(name, values, kwargs["completions"])

    scored.__name__ = name
    scored.__wrapped__ = reward  # type: ignore[attr-defined]
    return scored


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
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


def _no_column(who: str, wanted: str, columns: list[str]) -> str:
    near = difflib.get_close_matches(wanted, columns, n=1)
    guess = f" Rename {near[0]!r} to it?" if near else ""
    return f"{who} needs the column {wanted!r}, and the data set has {', '.join(columns) or 'none'}.{guess}"


def _values(name: str, values: Any, completions: Sequence[Any]) -> list[float | None]:
    try:
        found = [None if value is None else float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward function {name!r} returned {type(values).__name__} {values!r:.80}, expected one number (or None "
            f"where it cannot judge) per completion: {error}."
        ) from None
    if len(found) != len(completions):
        raise RewardError(
            f"reward function {name!r} returned {len(found)} rewards for {len(completions)} completions: one each."
        )
    bad = [i for i, value in enumerate(found) if value is not None and not math.isfinite(value)]
    if bad:
        logger.warning(
            "reward function %r returned %s for the completion %.200r. The step is skipped: return None where it "
            "cannot judge, and only that answer is left out.",
            name,
            found[bad[0]],
            completions[bad[0]],
        )
    for i in bad:
        found[i] = NO_NUMBER
    return found


def _raised(name: str, error: Exception, completions: Sequence[Any]) -> RewardError:
    first = f"{completions[0]!r:.200}" if completions else "none"
    return RewardError(
        f"reward function {name!r} raised {type(error).__name__}: {error}. It was judging {len(completions)} "
        f"completions, the first of them {first}. Catch what can go wrong and return None where it cannot judge."
    )
