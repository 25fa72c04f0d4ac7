"""Format and length rewards, rewards by name, and several rewards with weights."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.errors import ConfigError, RewardError
from dew.rewards import load_reward
from dew.rewards.compose import reward, reward_parts
from dew.rewards.format import Overlong, boxed_format, think_answer_format, think_format
from dew.rewards.values import NOT_FINITE

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


def test_overlong_grows_over_the_buffer():
    # limit 100, buffer 20:  L = 80 -> 0,  90 -> (80 - 90)/20 = -0.5,  100 -> -1,  101 -> -1
    lengths = [0, 80, 90, 100, 101, 5000]
    penalties = Overlong(100, 20)(["?"] * 6, completion_ids=[[1] * n for n in lengths])
    assert penalties == [0.0, 0.0, -0.5, -1.0, -1.0, -1.0]


# Properties


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_the_penalty_never_shrinks_with_length(a: int, b: int):
    overlong = Overlong(4096, 1024)
    short, long = sorted((a, b))
    assert -1 <= overlong.penalty(long) <= overlong.penalty(short) <= 0


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


def test_parts_with_weights(mine):
    parts = reward_parts({"math": 1.0, "think_format": 0.1, "overlong:4096:1024": 1, f"{mine}:length": -0.5})
    assert [(p.name, p.weight) for p in parts] == [
        ("math", 1.0),
        ("think_format", 0.1),
        ("overlong", 1.0),
        ("length", -0.5),
    ]
    assert [p.function.__name__ for p in parts] == ["math", "think_format", "overlong", "length"]


# Edges


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reward("maths"), "Did you mean 'math'"),
        (lambda: reward("zzz"), "module:function"),
        (lambda: reward("overlong:5"), "overlong:LIMIT:BUFFER"),
        (lambda: Overlong(100, 0), "0 < buffer"),
        (lambda: reward_parts({}), "at least one"),
        (lambda: reward_parts({"math": float("nan")}), "finite number"),
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


def test_overlong_needs_token_ids():
    with pytest.raises(RewardError, match="completion_ids"):
        Overlong(100, 20)(["?"])
