"""Rewards for the format of an answer, in addition to correctness.

Each is a reward function for TRL, `(completions, **columns) -> list[float]`. Group filters and credit use correctness
alone, so the weight of these rewards does not change which groups carry signal.
"""

import re
from collections.abc import Sequence
from typing import Any

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
