"""Format rewards and rewards by name."""

import pytest

from dew.errors import ConfigError
from dew.rewards import load_reward, reward
from dew.rewards.verifiers import boxed_format, think_answer_format, think_format


# ── Golden ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "thinks", "answers"),
    [
        ("<think>\nreason\n</think>\nThe answer.", 1, 0),
        ("<think></think>\nThe answer.", 1, 0),
        ("<think>a</think><answer>4</answer>", 1, 1),
        ("<think>a</think>\n<answer>\n4\n</answer>\n", 1, 1),
        ("<think>a</think><answer> </answer>", 1, 0),
        ("<think>a</think><answer>4</answer> bye", 1, 0),
        *((text, 0, 0) for text in
          ("<think>a</think>", "<think>a", "a</think> b", "hm <think>a</think> b", "<answer>4</answer>", "",
           "<think>a<think>b</think></think> c", "<think>a</think> b <think>c</think> d")),
    ],
)  # fmt: skip
def test_formats(text: str, thinks: float, answers: float):
    assert think_format([text]) == [thinks]
    assert think_answer_format([[{"role": "assistant", "content": text}]]) == [answers]


def test_boxed_format():
    texts = [r"so \boxed{4}", r"\boxed{}", r"\boxed{4", "4", r"<think>\boxed{4}</think> 4"]
    assert boxed_format(texts) == [1, 0, 0, 0, 0]


# ── Edges ─────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reward("maths"), "Did you mean 'math'"),
        (lambda: reward("zzz"), "module:function"),
        (lambda: load_reward("nowhere.py:f"), "no such file"),
        (lambda: load_reward("json:"), "Write module:function"),
        (lambda: load_reward("rewards.py"), "Write module:function or file.py:function"),
    ],
)
def test_invalid_settings_are_rejected(call, message: str):
    with pytest.raises(ConfigError, match=message):
        call()
