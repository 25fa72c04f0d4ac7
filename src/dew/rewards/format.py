"""Rewards for how an answer is written, each a part of its own beside correctness.

Each is a reward function for TRL, `(completions, **columns) -> list[float]`. Group filters and credit look at
correctness alone, so a part here can be weighted without changing which groups carry signal.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dew.errors import ConfigError, RewardError
from dew.rewards.answers import after_thinking, last_boxed
from dew.rewards.verdict import Completion, text_of


def think_format(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 for `<think>...</think>` at the start, once, and something after it."""
    return [float(_thinks_first(text_of(c))) for c in completions]


def think_answer_format(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 for `<think>...</think><answer>...</answer>` and nothing else, as in DeepSeek-R1."""
    return [float(_thinks_first(text_of(c)) and _one_answer(text_of(c))) for c in completions]


def boxed_format(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 if the last box after the thinking is closed and has something in it."""
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
    """A growing penalty for the last stretch before the length limit (DAPO, Eq. 13).

    L = tokens of the answer
        0                          L ≤ limit − buffer
        (limit − buffer − L) / buffer     in between
        −1                         L > limit
    """

    limit: int
    """Tokens at which an answer is cut off."""
    buffer: int
    """Tokens before the limit over which the penalty grows from 0 to −1."""

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            raise ConfigError(
                f"overlong limit={self.limit}, buffer={self.buffer}: the penalty grows over the last `buffer` tokens "
                "before `limit`, so 0 < buffer ≤ limit. DAPO has limit=20480, buffer=4096."
            )

    @property
    def __name__(self) -> str:  # what TRL calls the reward in its logs
        return "overlong"

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> list[float]:
        if "completion_ids" not in columns:
            raise RewardError("overlong: counts tokens, and needs the column completion_ids that TRL hands over.")
        return [self.penalty(len(ids)) for ids in columns["completion_ids"]]

    def penalty(self, length: int) -> float:
        if length > self.limit:
            return -1.0
        return min(0.0, (self.limit - self.buffer - length) / self.buffer)
