"""Reward functions and verifiers. A verifier is a reward function that also reports a status for each answer."""

from typing import TYPE_CHECKING, Any

from dew.rewards.verifiers import Verdict, Verifier, verifier

if TYPE_CHECKING:
    from dew.rewards.user_function import load_reward

__all__ = ["Verdict", "Verifier", "load_reward", "verifier"]


def __getattr__(name: str) -> Any:
    """`load_reward` is imported on first use: the math workers import this package too and must start quickly."""
    if name != "load_reward":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dew.rewards.user_function import load_reward

    return load_reward
