"""Text to verdict. A verifier is also a reward function for TRL."""

from dew.rewards.registry import verifier
from dew.rewards.verdict import Verdict, Verifier

__all__ = ["Verdict", "Verifier", "verifier"]
