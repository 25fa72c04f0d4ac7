"""Rewards for the format and length of an answer, in addition to correctness.

Each is a reward function for TRL, `(completions, **columns) -> list[float]`. Group filters and credit use correctness
alone, so the weight of these rewards does not change which groups carry signal.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dew.errors import ConfigError, Problem, RewardError
from dew.rewards.extract import after_thinking, last_boxed
from dew.rewards.verifiers import Completion, text_of


def think_format(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 for `<think>...</think>` at the start, exactly once, followed by text."""
    return [float(_thinks_first(text_of(c))) for c in completions]


def think_answer_format(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 for `<think>...</think><answer>...</answer>` and nothing else, as in DeepSeek-R1."""
    return [float(_thinks_first(text_of(c)) and _one_answer(text_of(c))) for c in completions]


def boxed_format(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 if the last box after the thinking is closed and not empty."""
    return [float(bool(last_boxed(after_thinking(text_of(c))))) for c in completions]


def _thinks_first(text: str) -> bool:
    text = text.strip()
    once = text.count("<think>") == text.count("</think>") == 1
    return once and text.startswith("<think>") and bool(after_thinking(text).strip())


def _one_answer(text: str) -> bool:
    rest = after_thinking(text).strip()
    once = rest.count("<answer>") == rest.count("</answer>") == 1
    return once and bool(re.fullmatch(r"<answer>.*\S.*</answer>", rest, re.DOTALL))


@dataclass(frozen=True)
class Overlong:
    """DAPO's length penalty (Eq. 13): from 0 at `limit` − `buffer` tokens linearly to −1 at `limit` and beyond."""

    limit: int
    """Tokens at which an answer is cut off."""
    buffer: int
    """Tokens before the limit over which the penalty grows."""

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            problem = f"overlong limit={self.limit}, buffer={self.buffer}: needs 0 < buffer ≤ limit."
            raise ConfigError(Problem(problem, remedy="DAPO uses limit=20480, buffer=4096."))

    @property
    def __name__(self) -> str:  # the name under which TRL logs the reward
        return "overlong"

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> list[float]:
        if "completion_ids" not in columns:
            raise RewardError("overlong: counts tokens and needs completion_ids, which TRL passes to reward functions.")
        return [self.penalty(len(ids)) for ids in columns["completion_ids"]]

    def penalty(self, length: int) -> float:
        return min(0.0, max(-1.0, (self.limit - self.buffer - length) / self.buffer))
