"""Wrap reward functions so that failures (an exception, a NaN, a hang, a missing column) are reported by name."""

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from dew.errors import ConfigError, Problem, RewardError, did_you_mean
from dew.rewards.user_function import TIMEOUT, Rewards, as_rewards, call_reward, reported, required_columns, reward_name
from dew.rewards.verifiers import has_verifier
from dew.run.config import loadable_model

GIVEN_BY_TRL = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}


# ── calling a reward function ───────────────────────────────────────────────────────────────────────────────
def checked(reward: Any, timeout: float = TIMEOUT) -> Any:
    """Wrap a reward function: failures become a RewardError, and a coroutine is cancelled after `timeout` seconds.

    Models and their names are returned unchanged. Verifiers and functions given by path have their own time limits.
    """
    if isinstance(reward, str):
        if has_verifier(reward):
            raise ConfigError(f"reward_funcs={reward!r}: write dew.rewards.reward({reward!r}).")
        loadable_model(reward, "reward_funcs")
    if _is_model(reward):
        return reward
    name = reward_name(reward)

    def scored(completions: Sequence[Any], **columns: Any) -> Rewards:
        return call_reward(name, reward, completions, **columns)

    async def scored_async(**kwargs: Any) -> Rewards:
        n = len(kwargs["completions"])  # before the function can change the list
        with reported(name, kwargs["completions"], kwargs.get("prompts")):
            try:
                return as_rewards(name, await asyncio.wait_for(reward(**kwargs), timeout), n)
            except TimeoutError:
                remedy = "Return None for answers that cannot be scored in time, or raise reward_timeout."
                problem = Problem(f"The reward {name} did not return within {timeout:g} s.", remedy=remedy)
                raise RewardError(problem) from None

    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)
    wrapper: Any = scored_async if is_async else scored
    wrapper.__name__, wrapper.__wrapped__ = name, reward
    return wrapper


def _is_model(reward: Any) -> bool:
    return isinstance(reward, str | nn.Module) or not callable(reward)


# ── before training ─────────────────────────────────────────────────────────────────────────────────────────
def outcome_index(names: Sequence[str], args: Any) -> int:
    """Return the index of the reward that decides correctness; by default the first, if training does not use it."""
    wanted, weights, required = args.outcome_reward, args.reward_weights, not args.build_algorithm().engine_loss
    if not names:
        raise ConfigError(Problem("no reward function.", remedy="Pass reward_funcs=[...]."))
    if wanted is None and len(names) > 1 and required:
        what = f"{len(names)} reward functions ({', '.join(names)}): which one decides that an answer is correct?"
        why = "The others are only added to its reward."
        raise ConfigError(Problem(what, why, f"Write e.g. outcome_reward={names[0]!r}."))
    outcome = index_of(wanted, names)
    weight = 1 if weights is None or outcome >= len(weights) else weights[outcome]  # an environment's reward: 1
    if required and weight != 1:
        why = f"The outcome reward {names[outcome]!r} must have weight 1; the others are relative to it."
        remedy = "Set outcome_reward to another."
        if weight > 0:
            remedy = f"Write reward_weights={[round(w / weight, 6) for w in weights]}."
        raise ConfigError(Problem(f"reward_weights={list(weights)}.", why, remedy))
    return outcome


def index_of(outcome_reward: str | None, names: Sequence[str]) -> int:
    """Return the index of the reward of this name, or of the first. Raise an error if none or several have it."""
    if outcome_reward is None:
        return 0
    if outcome_reward not in names:
        what = f"outcome_reward={outcome_reward!r} is not one of the reward functions: {', '.join(names)}."
        raise ConfigError(Problem(what, remedy=did_you_mean(str(outcome_reward), names)))
    if (count := list(names).count(outcome_reward)) > 1:
        what = f"outcome_reward={outcome_reward!r}: {count} reward functions have this name."
        raise ConfigError(Problem(what, remedy="Give each a name of its own: define it with `def`, or set __name__."))
    return list(names).index(outcome_reward)


def add_environments(trainer: Any, given: int) -> int:
    """Wrap the rewards that TRL took from environments, after the `given` ones, and return the outcome's index."""
    names, functions, args = trainer.reward_func_names, trainer.reward_funcs, trainer.args
    for i in range(given, len(names)):
        functions[i].__name__ = names[i]
        functions[i] = checked(functions[i], args.reward_timeout)
    return outcome_index(names if given or args.outcome_reward else names[:1], args)


def outcome_columns(trainer: Any) -> list[int]:
    """Return the columns of the outcome rewards: all that environments own if it is one of these, since each of them
    scores only the answers of its environment."""
    names, pools = trainer.reward_func_names, getattr(trainer, "_environment_pool", {}).values()
    own = {type(instance).__name__ for pool in pools for instance in pool}
    of_environments = [i for i, name in enumerate(names) if name in own]
    return of_environments if trainer.outcome_index in of_environments else [trainer.outcome_index]


def check_rewards(rewards: Sequence[Any], args: Any, data: Any) -> int:
    """Return the index of the outcome reward. Raise an error if it is unclear, or if a reward's column is missing."""
    columns, names, weights = getattr(data, "column_names", None), list(map(reward_name, rewards)), args.reward_weights
    if weights is not None and len(weights) != len(names):
        what = f"reward_weights={list(weights)}: {len(weights)} for {len(names)} rewards, {', '.join(names) or 'none'}."
        raise ConfigError(Problem(what, remedy="Give one weight per reward, in this order."))
    if isinstance(columns, list) and (missing := missing_columns(columns, rewards)):
        raise ConfigError(missing)
    return outcome_index(names, args)


def missing_columns(columns: Sequence[str], rewards: Sequence[Any]) -> list[str]:
    """Return an error message for each column that is missing (the prompt, or one that a reward function takes by
    name) or that TRL passes to reward functions itself."""
    wanted = [("the trainer", "prompt")]
    for reward in rewards:
        if not _is_model(reward):
            who = f"reward function {reward_name(reward)!r}"
            wanted += [(who, column) for column in required_columns(reward) if column not in GIVEN_BY_TRL]
    clash = {"prompt", "completions"} <= {*columns} or {"prompt", "prompts"} <= {*columns}
    if clash and not all(map(_is_model, rewards)):
        return ["TRL passes `prompts` and `completions` to reward functions: rename the column of that name."]
    return [
        f"{who} needs the column {column!r}, but the data set has {', '.join(columns) or 'none'}. "
        f"{did_you_mean(column, columns) or f'Rename one to {column!r}; with `task`, task_settings keep: [{column}].'}"
        for who, column in wanted
        if column not in columns
    ]
