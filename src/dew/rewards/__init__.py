"""Reward functions and verifiers. A verifier is a reward function that also reports a status for each answer."""

try:
    from dew.rewards.user_function import UserFunction as load_reward
except ModuleNotFoundError as error:  # the report, comparisons and the lab also start here
    raise ModuleNotFoundError(f"{error.name} is missing. Run: pip install 'dew-rl[cli]'.", name=error.name) from None
from dew.rewards.verifiers import Verdict, Verifier, reward, verifier

__all__ = ["Verdict", "Verifier", "load_reward", "reward", "verifier"]
