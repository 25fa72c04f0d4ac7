"""Users' reward functions: whatever they do, the result is rewards or one clear error, within the limits."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dew.engines.trl.rewards import checked
from dew.errors import ConfigError, RewardError
from dew.rewards import load_reward
from dew.rewards.process import memory_of
from dew.rewards.user_function import MAX_FAILURES, NOT_FINITE, as_rewards
from processes import alive, gone, wait_until_busy

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
def hoards(completions, **_):
    while True: calls.append(bytearray(os.urandom(1 << 20)) * 16)
def raises(completions, **_): raise KeyError("gone")
def exits(completions, **_): sys.exit(0)
def chats(completions, **_): return [float(len(c[0]["content"])) for c in completions]
def vanishes(completions, **_): os._exit(3)
def segfaults(completions, **_): os.kill(os.getpid(), signal.SIGSEGV)
def forks(completions, **_):
    calls.append(1); os.fork()
    return [float(len(calls))] * len(completions)
def starts(completions, **_):
    import subprocess
    children = subprocess.Popen(["sleep", "1000"])
    return [float(children.pid)]
def prints(completions, **_):
    print("I was here")
    sys.stderr.write("\x1b[31mred\n")
    return [1.0] * len(completions)
async def awaited(completions, **_): return [2.0] * len(completions)
def once_slow(completions, **_):
    calls.append(1)
    if not os.path.exists("slept"):
        open("slept", "w").close()
        time.sleep(1e6)
    return [1.0] * len(completions)
def interrupts(completions, **_):
    if completions == ["stop"]:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.1)
    return [float(len(c)) for c in completions]
def tells(completions, log_extra, log_metric, trainer_state, **_):
    log_extra("length", [len(c) for c in completions]); log_metric("mean", 1.5)
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
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    made = []

    def by_name(name: str, **settings):
        made.append(load_reward(f"mine.py:{name}", **settings))
        return made[-1]

    yield by_name
    for reward in made:
        if reward._process is not None:
            reward._process.kill()


# ── Return values ─────────────────────────────────────────────────────────────────────────────────────────
def test_rewards_are_returned(load):
    reward = load("plain")
    assert reward(["1", "2"], prompts=["a", "b"], answer=["1", "1"]) == [1.0, 0.0]
    assert reward.columns == ["completions", "answer"] and reward.__name__ == "plain"


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
def test_any_sequence_of_numbers_is_accepted(values, expected):
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
def test_anything_else_is_an_error_that_names_the_function(values):
    with pytest.raises(RewardError, match="reward mine returned"):
        as_rewards("mine", values, 2)


def test_not_finite_values_are_kept_apart_from_none():
    nan, inf = float("nan"), float("inf")
    assert as_rewards("mine", [nan, 1, -inf, None], 4) == [NOT_FINITE, 1.0, NOT_FINITE, None]


# ── Time limit ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["busy", "in_c", "deaf"])
def test_a_hang_of_any_kind_loses_the_batch(load, name, caplog):
    assert load(name, timeout=0.3)(["a", "b"]) == [None, None]
    assert f"The reward {name}: its process did not answer within 0.3 s and was killed" in caplog.text


def test_the_third_lost_batch_in_a_row_ends_the_run(load, caplog):
    reward = load("hangs", timeout=0.3)
    for turn in range(1, MAX_FAILURES):
        assert reward(["a", "b"], prompts=["why?", "how?"]) == [None, None]
        assert f"({turn} of {MAX_FAILURES} in a row)" in caplog.text and "'why?'" in caplog.text
    with pytest.raises(RewardError, match=r"did not answer within 0.3 s.*'why\?'.*3 failed batches in a row"):
        reward(["a", "b"], prompts=["why?", "how?"])


def test_a_slow_batch_loses_only_that_batch(load):
    reward = load("once_slow", timeout=2.0)
    assert reward(["a"]) == [None]
    reward.timeout = 60.0
    assert reward(["a"]) == [1.0] and reward._failures == 0


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_batch_does_not_answer_the_next_one(load):
    reward = load("interrupts")
    with pytest.raises(KeyboardInterrupt):
        reward(["stop"])
    time.sleep(0.2)
    assert reward(["a", "bc"]) == [1.0, 2.0]


# ── Memory limit ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_leak_is_killed_at_the_memory_limit(load, caplog):
    assert load("hoards", memory=400 * 2**20)(["a"]) == [None]
    assert "GiB of memory, more than its limit of 0.39 GiB" in caplog.text
    assert memory_of(os.getpid()) > 0


# ── Failures ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"reward raises failed: KeyError: 'gone' at mine.py, line \d+\..*'why\?'"),
        ("exits", "reward exits failed: SystemExit: 0"),
        ("chats", "It reads chat messages, but"),
        ("clears", "returned 0 rewards for 1"),
    ],
)
def test_bugs_are_errors_at_once(load, name, message):
    with pytest.raises(RewardError, match=message):
        load(name)(["a"], prompts=["why?"])


@pytest.mark.parametrize(("name", "how"), [("vanishes", "exited with code 3"), ("segfaults", "killed by SIGSEGV")])
def test_a_process_that_dies_is_restarted(load, name, how, caplog):
    reward = load(name)
    assert [reward(["a"]) for _ in range(2)] == [[None]] * 2 and caplog.text.count(how) == 2


def test_a_function_that_forks_replies_once(load):
    reward = load("forks")  # a second answer to one batch would be taken for the answer to the next
    assert [reward(["a", "b"]) for _ in range(3)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_child_processes_are_killed_with_the_function(load):
    reward = load("starts")
    (pid,) = reward(["a"])
    assert alive(int(pid))
    reward._process.popen.kill()
    reward._process.kill()
    assert gone(int(pid))
    assert reward(["a"]) == [None]  # that batch is lost
    assert alive(int(reward(["a"])[0]))


def test_output_goes_to_standard_error_without_control_characters(load, capsys):
    reward = load("prints")
    assert reward(["a"]) == [1.0]
    reward._process.kill()
    reward._process._output.join()  # the thread that prints it
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == "I was here\n·[31mred\n"


def test_logged_values_are_passed_on(load):
    logged = []
    log = {"log_extra": lambda *x: logged.append(x), "log_metric": lambda *x: logged.append(x)}
    assert load("tells")(["ab"], trainer_state=SimpleNamespace(global_step=7), **log) == [7.0]
    assert logged == [("length", [2]), ("mean", 1.5)]


def test_the_seed_is_set_and_state_is_kept(load):
    assert load("lucky", seed=3)(["a", "b"]) == load("lucky", seed=3)(["a", "b"]) != load("lucky", seed=4)(["a", "b"])
    reward = load("counts")
    assert [reward(["a"]) for _ in range(3)] == [[1.0], [2.0], [3.0]]


def test_async_functions_are_awaited_and_the_trainer_state_may_be_missing(load):
    assert load("awaited")(["a"], trainer_state=None) == [2.0]


def test_dates_and_decimals_are_sent_as_text(load):
    assert load("plain")(completions=["2026-11-15", "1.50"], answer=[date(2026, 11, 15), Decimal("1.50")]) == [1.0, 1.0]


def test_a_column_that_cannot_be_sent_is_named(load):
    with pytest.raises(RewardError, match="The column 'image' cannot be sent"):
        load("plain")(["1"], answer=["1"], image=[object()])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(4)", "exited with code 4"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_file_that_does_not_load_is_an_error(tmp_path, code, message):
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(ConfigError, match=message):
        load_reward(f"{tmp_path}/bad.py:f")


def test_no_process_outlives_a_parent_that_was_killed(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    script = textwrap.dedent("""
        import os
        from dew.rewards import load_reward
        reward = load_reward("mine.py:in_c")
        print(reward._process.popen.pid, flush=True)
        reward(["a"])
    """)
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as asking:
        pid = int(asking.stdout.readline())
        wait_until_busy(pid)
        asking.kill()
    assert gone(pid)


# ── Lookup ────────────────────────────────────────────────────────────────────────────────────────────────
def test_files_and_modules_are_found_in_the_working_folder_and_in_folders(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, value in ((here, 1), (there, 2)):
        folder.mkdir()
        (folder / "both.py").write_text(f"def f(completions, **_): return [{value}.0]")
    (there / "only.py").write_text("from beside import VALUE\ndef f(completions, **_): return [VALUE]")
    (there / "beside.py").write_text("VALUE = 3.0")
    (here / "sub").mkdir()
    (here / "sub" / "low.py").write_text("import both\ndef f(completions, **_): return both.f(completions)")
    (there / "package").mkdir()
    (there / "package" / "inner.py").write_text("def f(completions, **_): return [4.0]")
    monkeypatch.chdir(here)

    def value(path: str) -> float:
        return load_reward(path, folders=[there])(["a"])[0]

    assert [value(path) for path in ("both.py:f", "both:f", "both.f", "sub/low.py:f")] == [1.0] * 4
    assert [value(path) for path in ("only.py:f", "only:f", "only.f", f"{there}/only.py:f")] == [3.0] * 4
    assert [value(path) for path in ("package/inner.py:f", "package.inner:f", "package.inner.f")] == [4.0] * 3
    assert str(there) not in sys.path


@pytest.mark.parametrize(
    ("path", "meant"),
    [("mind.py:plain", "'mine.py'"), ("mind:plain", "'mine'"), ("mine.py:plan", "'plain'"), ("mine.plan", "'plain'")],
)
def test_a_misspelled_path_suggests_the_nearest(load, path, meant):
    with pytest.raises(ConfigError) as error:
        load_reward(path)
    assert error.value.problems[0].remedy == f"Did you mean {meant}?"


def test_a_forked_child_starts_its_own_process(load):
    reward = load("counts")
    assert reward(["a"]) == [1.0]
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(reward(["a"])).encode())
        os._exit(0)
    assert os.read(read, 100) == b"[1.0]" and os.waitpid(child, 0)[1] == 0
    assert reward(["a"]) == [2.0]


def test_threads_share_one_process(load):
    reward = load("counts")
    with ThreadPoolExecutor(4) as threads:
        assert sorted(r for (r,) in threads.map(lambda _: reward(["a"]), range(12))) == [float(i) for i in range(1, 13)]


# ── Callables, which run in this process ──────────────────────────────────────────────────────────────────
def test_an_async_hang_is_cancelled():
    async def waits(completions, **_):
        await asyncio.sleep(1e6)

    with pytest.raises(RewardError, match=r"reward waits .*return.* 0.3 s"):
        asyncio.run(checked(waits, 0.3)(completions=["a", "b"], prompts=["why?", "how?"]))
