"""Format rewards, rewards by name, and users' functions by path."""

import sys

import pytest

from dew.errors import ConfigError, RewardError
from dew.rewards import load_reward, reward, verifier
from dew.rewards.calls import NOT_FINITE
from dew.rewards.format import boxed_format, think_answer_format, think_format

# Golden


@pytest.mark.parametrize(
    ("text", "thinks", "answers"),
    [
        ("<think>\nreason\n</think>\nThe answer.", 1, 0),
        ("<think></think>\nThe answer.", 1, 0),
        ("<think>a</think><answer>4</answer>", 1, 1),
        ("<think>a</think>\n<answer>\n4\n</answer>\n", 1, 1),
        ("<think>a</think><answer> </answer>", 1, 0),
        ("<think>a</think><answer>4</answer> bye", 1, 0),
        ("<think>a</think>", 0, 0),
        ("<think>a", 0, 0),
        ("a</think> b", 0, 0),
        ("hm <think>a</think> b", 0, 0),
        ("<think>a<think>b</think></think> c", 0, 0),
        ("<think>a</think> b <think>c</think> d", 0, 0),
        ("<answer>4</answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_formats(text: str, thinks: float, answers: float):
    assert think_format([text]) == [thinks]
    assert think_answer_format([[{"role": "assistant", "content": text}]]) == [answers]


def test_boxed_format():
    assert boxed_format([r"so \boxed{4}", r"\boxed{}", r"\boxed{4", "4", r"<think>\boxed{4}</think> 4"]) == [
        1,
        0,
        0,
        0,
        0,
    ]


# User functions

MINE = """
from beside import FACTOR
def length(completions, **columns):
    return [FACTOR * len(c) for c in completions]
def short(completions, **_): return [1.0]
def number(completions, **_): return 3
def nan(completions, **_): return [float("nan"), 1.0]
def nothing(completions, **_): return [None] * len(completions)
def fails(completions, answer, **_): raise KeyError("oh")
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "my_rewards.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("FACTOR = 2\n")
    return tmp_path / "my_rewards.py"


def test_by_file(mine):
    own = load_reward(f"{mine}:length")
    assert own(completions=["ab", "c"], prompts=["", ""], answer=["1", "2"]) == [4.0, 2.0]
    assert own.__name__ == "length" and str(mine.parent) not in sys.path
    assert load_reward(f"{mine}:nothing")(["a"]) == [None]


def test_nan_is_returned_as_not_finite(mine):
    assert load_reward(f"{mine}:nan")(["a", "b"]) == [NOT_FINITE, 1.0]


def test_by_module(mine, monkeypatch):
    monkeypatch.syspath_prepend(mine.parent)
    assert load_reward("my_rewards:length")(["ab"]) == [4.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "1 rewards for 2"),
        ("number", "returned int 3"),
        ("fails", "KeyError: 'oh'"),
    ],
)
def test_return_values_are_checked(mine, name: str, message: str):
    with pytest.raises(RewardError, match=message):
        load_reward(f"{mine}:{name}")(["a", "b"], answer=["1", "2"])


def test_rewards_by_name():
    assert reward("math") is verifier("math") and reward("think_format") is think_format


# Edges


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reward("maths"), "Did you mean 'math'"),
        (lambda: reward("zzz"), "module:function"),
        (lambda: load_reward("nowhere.py:f"), "no such file"),
        (lambda: load_reward("no_such_module:f"), "'no_such_module' cannot be imported: ModuleNotFoundError"),
        (lambda: load_reward("json:dump_it"), "has no function 'dump_it'.*Did you mean 'dump'"),
        (lambda: load_reward("json:"), "Write module:function"),
        (lambda: load_reward("rewards.py"), "Write module:function or file.py:function"),
    ],
)
def test_invalid_settings_are_rejected(call, message: str):
    with pytest.raises(ConfigError, match=message):
        call()
