"""Reward functions from outside: whatever they do, a number each comes back or one clear error, in bounded time."""

import asyncio
import os
import pickle
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dew.errors import ConfigError, RewardError
from dew.rewards.child import memory_of
from dew.rewards.own import PATIENCE, load_reward
from dew.rewards.returned import NO_NUMBER, as_rewards

FUNCTIONS = r"""
import os, sys, time, signal, threading
calls = []
def plain(completions, answer, **_): return [float(c == a) for c, a in zip(completions, answer)]
def hangs(completions, **_): time.sleep(1e6)
def busy(completions, **_):
    while True:
        try:
            while True: pass
        except BaseException: pass
def in_c(completions, **_): return [float(max(range(10 ** 13)))]   # days in C, holding the interpreter's lock
def deaf(completions, **_):
    for n in range(1, 64):
        try: signal.signal(n, signal.SIG_IGN)
        except (OSError, ValueError): pass
    time.sleep(1e6)
def leaks(completions, **_):
    calls.append(bytearray(os.urandom(1 << 20)) * 64)
    return [0.0] * len(completions)
def hoards(completions, **_):
    while True: calls.append(bytearray(os.urandom(1 << 20)) * 16)
def raises(completions, **_): raise KeyError("gone")
def exits(completions, **_): sys.exit(0)
def vanishes(completions, **_): os._exit(3)
def segfaults(completions, **_): os.kill(os.getpid(), signal.SIGSEGV)
def forks(completions, **_):
    calls.append(1)
    os.fork()
    return [float(len(calls))] * len(completions)
def starts(completions, **_):
    import subprocess
    children = subprocess.Popen(["sleep", "1000"])
    return [float(children.pid)]
def prints(completions, **_):
    print("I was here")
    for i in range(20_000): print("noise" * 20)
    sys.stderr.write("\x1b[31mred\n")
    return [1.0] * len(completions)
async def awaited(completions, **_): return [2.0] * len(completions)
def once_slow(completions, **_):
    calls.append(1)
    if not os.path.exists("slept"):
        open("slept", "w").close()
        time.sleep(1e6)
    return [1.0] * len(completions)
def tells(completions, log_extra, log_metric, trainer_state, **_):
    log_extra("length", [len(c) for c in completions])
    log_metric("mean", 1.5)
    return [float(trainer_state.global_step)] * len(completions)
def clears(completions, **_):
    completions.clear()
    return []
def lucky(completions, **_):
    import random
    return [random.random() for _ in completions]
def counts(completions, **_):
    calls.append(1)
    return [float(len(calls))] * len(completions)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    made = []

    def load(name: str, **settings):
        made.append(load_reward(f"mine.py:{name}", **settings))
        return made[-1]

    yield load
    for reward in made:
        if reward._child is not None:
            reward._child.end()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def dies(pid: int) -> bool:
    """A killed process is gone when the kernel has got round to it."""
    end = time.monotonic() + 30
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


# What comes back


def test_a_number_each(own):
    reward = own("plain")
    assert reward(["1", "2"], prompts=["a", "b"], answer=["1", "1"]) == [1.0, 0.0]
    assert reward.required == ["completions", "answer"]


NESTED = ([[1.0], [2.0]], np.ones((2, 1)), torch.ones(2, 1))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 0.5], [1.0, 0.5]),
        ([True, False], [1.0, 0.0]),
        ((None, 2), [None, 2.0]),
        (np.array([1.0, 0.5]), [1.0, 0.5]),
        (np.array([True, False]), [1.0, 0.0]),
        (torch.tensor([1.0, 0.5]), [1.0, 0.5]),
        ((x for x in (3, 4)), [3.0, 4.0]),
    ],
)
def test_whatever_holds_numbers_is_taken(values, expected):
    assert as_rewards("r", values, 2) == expected


class Rude:
    def __float__(self):
        raise LookupError

    def __repr__(self):
        raise LookupError


@pytest.mark.parametrize(
    "values",
    [None, 3, 0.5, "12", b"12", {0: 1, 1: 1}, {1, 2}, [1], [1, 2, 3],
     ["1", "2"], [1, "x"], [1, [2]], *NESTED, [1, 2j], [1, 10**400], [1, Rude()], Rude(), iter(int, 1), [1, object()],
     torch.tensor(1.0), np.array(1.0)],
)  # fmt: skip
def test_everything_else_is_one_error_that_names_the_function(values):
    with pytest.raises(RewardError, match="reward mine returned"):
        as_rewards("mine", values, 2)


def test_an_infinity_or_a_nan_is_told_apart_from_none():
    nan, inf = float("nan"), float("inf")
    assert as_rewards("mine", [nan, 1, -inf, None], 4) == [NO_NUMBER, 1.0, NO_NUMBER, None]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    ),
    st.integers(0, 3),
)
def test_no_value_is_anything_but_rewards_or_an_error(values, n):
    try:
        found = as_rewards("r", values, n)
    except RewardError:
        return
    assert len(found) == n and all(x is None or isinstance(x, float) for x in found)


# Time


@pytest.mark.parametrize("name", ["hangs", "busy", "in_c", "deaf"])
def test_a_hang_is_ended_and_left_out_and_the_third_in_a_row_ends_the_run(own, name, caplog):
    reward = own(name, timeout=0.3)
    for turn in range(1, PATIENCE):
        assert reward(["a", "b"], prompts=["why?", "how?"]) == [None, None]
        assert f"({turn} of {PATIENCE} in a row)" in caplog.text and "'why?'" in caplog.text
    with pytest.raises(
        RewardError, match=rf"{name}: its process has not answered for 0.3 s.*'why\?'.*3 batches in a row"
    ):
        reward(["a", "b"], prompts=["why?", "how?"])


def test_one_slow_batch_costs_one_batch(own):
    reward = own("once_slow", timeout=2.0)
    assert reward(["a"]) == [None]
    assert reward(["a"]) == [1.0] and reward._failures == 0


# Memory


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell how much a process holds")
@pytest.mark.parametrize("name", ["leaks", "hoards"])
def test_a_leak_is_ended_where_it_would_take_too_much(own, name, caplog):
    reward = own(name, memory=400 * 2**20)
    for _ in range(20):
        if reward(["a"]) == [None]:
            break
    assert "GiB, more than the 0.39 GiB that it may" in caplog.text
    assert memory_of(os.getpid()) > 0


# Endings


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"reward raises failed: KeyError: 'gone' \(mine.py, line \d+\).*'why\?'"),
        ("exits", "reward exits failed: SystemExit: 0"),
        ("clears", "returned 0 rewards for 1"),
    ],
)
def test_mistakes_are_told_at_once(own, name, message):
    with pytest.raises(RewardError, match=message):
        own(name)(["a"], prompts=["why?"])


@pytest.mark.parametrize(("name", "how"), [("vanishes", "exit code 3"), ("segfaults", "killed by SIGSEGV")])
def test_a_process_that_dies_is_started_again(own, name, how, caplog):
    reward = own(name)
    assert reward(["a"]) == [None] and how in caplog.text
    assert reward(["a"]) == [None]
    with pytest.raises(RewardError, match=how):
        reward(["a"])


def test_a_function_that_forks_answers_once(own):
    reward = own("forks")  # a second answer to one batch would be taken for the answer to the next
    assert [reward(["a", "b"]) for _ in range(3)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_what_the_function_started_ends_with_it(own):
    reward = own("starts")
    (pid,) = reward(["a"])
    assert alive(int(pid))
    reward._child.end()
    assert dies(int(pid))
    assert reward(["a"]) == [None]  # that batch is lost
    assert alive(int(reward(["a"])[0]))


def test_printing_goes_to_standard_error_and_not_for_ever(own, capsys):
    assert own("prints")(["a"]) == [1.0]
    time.sleep(0.5)
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("I was here\n")
    assert shown.err.count("\n") < 300 and "\x1b" not in shown.err


def test_async_functions_are_awaited(own):
    assert own("awaited")(["a"]) == [2.0]


def test_what_it_logs_arrives(own):
    class State:
        global_step = 7

    state = State()
    state.global_step = 7
    logged = []
    rewards = own("tells")(
        ["ab"], log_extra=lambda *x: logged.append(x), log_metric=lambda *x: logged.append(x), trainer_state=state
    )
    assert rewards == [7.0] and logged == [("length", [2]), ("mean", 1.5)]


def test_its_dice_are_seeded_and_its_memory_lasts(own):
    assert own("lucky", seed=3)(["a", "b"]) == own("lucky", seed=3)(["a", "b"]) != own("lucky", seed=4)(["a", "b"])
    reward = own("counts")
    assert [reward(["a"]) for _ in range(3)] == [[1.0], [2.0], [3.0]]


def test_it_can_be_sent_to_another_process(own):
    again = pickle.loads(pickle.dumps(own("plain", timeout=7)))
    assert again(["1"], answer=["1"]) == [1.0] and again.timeout == 7


def test_a_column_that_cannot_be_sent_is_named(own):
    with pytest.raises(RewardError, match="object is not text, a number"):
        own("plain")(["1"], answer=[object()])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(4)", "exit code 4"),
        ("1/0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("g = 1", "has no function 'f'"),
    ],
)
def test_a_file_that_does_not_load_says_so(tmp_path, code, message):
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(ConfigError, match=message):
        load_reward(f"{tmp_path}/bad.py:f")


def test_nothing_is_left_when_the_asking_process_is_killed(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    script = textwrap.dedent("""
        import os
        from dew.rewards.own import load_reward
        reward = load_reward("mine.py:hangs", timeout=1.0)
        print(reward._child._process.pid, flush=True)
        reward(["a"])
    """)
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as asking:
        pid = int(asking.stdout.readline())
        time.sleep(0.5)
        asking.kill()
    assert dies(pid)


# In this process: functions that Python hands over


def scored(function, timeout=0.3, **columns):
    from dew.engines.trl.rewards import checked

    return checked(function, timeout)(completions=["a", "b"], prompts=["why?", "how?"], **columns)


def stubborn(completions, **_):
    while True:
        with suppress(Exception):
            time.sleep(1e6)


@pytest.mark.parametrize("function", [lambda completions, **_: time.sleep(1e6), stubborn])
def test_a_hang_here_is_interrupted(function):
    with pytest.raises(RewardError, match=r"has not returned for 0.3 s"):
        scored(function)


def test_an_endless_generator_here_is_interrupted():
    def waits(completions, **_):
        yield 1.0
        time.sleep(1e6)

    with pytest.raises(RewardError, match="has not returned"):
        scored(waits)


def test_sys_exit_here_is_an_error():
    with pytest.raises(RewardError, match=r"raised SystemExit: 0.*'why\?'"):
        scored(lambda completions, **_: sys.exit(0))


def test_a_list_that_is_emptied_here_still_counts():
    with pytest.raises(RewardError, match="0 rewards for 2"):
        scored(lambda completions, **_: completions.clear() or [])


def test_an_async_hang_here_is_ended():
    async def waits(completions, **_):
        await asyncio.sleep(1e6)

    with pytest.raises(RewardError, match=r"has not returned for 0.3 s"):
        asyncio.run(scored(waits))


BACKSTOP = """
import os, sys, time
from dew.rewards import watchdog
watchdog.GRACE = 0.5
def in_c(): return max(range(10 ** 13))
def forks(): os.fork()
with watchdog.bounded(sys.argv[1], 0.3):
    globals()[sys.argv[1]]()
print("went on")
"""


def backstop(name: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", BACKSTOP, name]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_what_cannot_be_interrupted_ends_the_process_and_shows_where():
    done = backstop("in_c")
    assert done.returncode == 1 and "Timeout" in done.stderr and "in in_c" in done.stderr


def test_a_fork_here_does_not_train_twice():
    done = backstop("forks")
    assert done.returncode == 0 and done.stdout == "went on\n"
