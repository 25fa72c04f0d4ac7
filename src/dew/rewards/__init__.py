"""Reward functions and verifiers. A verifier is a reward function that also reports a status for each answer."""

from dew.rewards.user_function import UserFunction as load_reward
from dew.rewards.verifiers import Verdict, Verifier, reward, verifier

__all__ = ["Verdict", "Verifier", "load_reward", "reward", "verifier"]
