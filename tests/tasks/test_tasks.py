"""The built-in tasks: solvable, reproducible, and split so that nothing leaks."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.errors import ConfigError
from dew.rewards import verifier
from dew.tasks import Chain, Countdown, Jsonl, demonstrations, read_jsonl, task
from dew.tasks.base import split_of

EASY = {"countdown": Countdown(numbers=3, largest=9), "chain": Chain(steps=(2, 5))}
TASKS = [Countdown(), Chain(), *EASY.values()]


# Golden


def test_the_same_problems_today_and_tomorrow():
    # Written down once: a change here moves every score that was ever measured on the held-out problems.
    assert Countdown().rows(1, split="held_out") == [
        {
            "prompt": "13,4,8,4>21:",
            "answer": "21",
            "numbers": [13, 4, 8, 4],
            "solution": "13-4=9;8+4=12;12+9=21",
        }
    ]
    (row,) = Chain().rows(1, split="held_out")
    assert row["prompt"] == "8;+50;-29;+3;*2;-6;+7;-29;+27;-20;+36;-54;*2;+44:"
    assert row["answer"] == "94"
    assert row["solution"].startswith("8+50=58;58-29=29;29+3=32;32*2=64;") and row["solution"].endswith("50+44=94")


# Oracle


@pytest.mark.parametrize("a_task", TASKS, ids=repr)
def test_every_solution_satisfies_the_verifier(a_task):
    rows = a_task.rows(300) + a_task.rows(30, split="held_out")
    verdicts = verifier(a_task.name).verdicts([row["solution"] for row in rows], rows)
    assert {verdict.status for verdict in verdicts} == {"correct"}


def test_the_default_chain_is_long():
    lengths = [len(row["solution"]) for row in Chain().rows(500)]
    assert min(lengths) >= 50 and max(lengths) <= 200


def test_countdown_prompts_say_what_the_row_says():
    for row in Countdown().rows(50):
        assert row["prompt"] == ",".join(map(str, row["numbers"])) + ">" + row["answer"] + ":"


# Properties


@settings(max_examples=20)
@given(st.sampled_from(sorted(EASY)), st.integers(0, 5), st.integers(0, 5))
def test_no_held_out_problem_is_ever_trained_on(name: str, seed: int, other: int):
    train = EASY[name].rows(150, seed=seed)
    held_out = EASY[name].rows(30, split="held_out", seed=other)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    if name == "countdown":
        met = {tuple(sorted(row["numbers"])) for row in train}
        assert not met & {tuple(sorted(row["numbers"])) for row in held_out}


@settings(max_examples=20)
@given(st.sampled_from(TASKS), st.integers(0, 99), st.integers(0, 20), st.integers(0, 20))
def test_a_seed_gives_the_same_rows_and_fewer_are_a_prefix(a_task, seed: int, n: int, more: int):
    assert a_task.rows(n + more, seed=seed)[:n] == a_task.rows(n, seed=seed)


@pytest.mark.parametrize("a_task", TASKS, ids=repr)
def test_problems_are_different_from_one_another(a_task):
    rows = a_task.rows(300)
    assert len({row["prompt"] for row in rows}) == 300
    assert a_task.rows(300, seed=1) != rows


def test_one_problem_in_eight_is_held_out():
    share = sum(split_of(i) == "held_out" for i in range(8000)) / 8000
    assert abs(share - 1 / 8) < 0.015


@settings(max_examples=20)
@given(st.integers(2, 5), st.integers(5, 20), st.integers(20, 300))
def test_countdown_keeps_to_its_settings(numbers: int, largest: int, ceiling: int):
    for row in Countdown(numbers, largest, ceiling).rows(5):
        assert len(row["numbers"]) == numbers and max(row["numbers"]) <= largest
        results = [int(step.split("=")[1]) for step in row["solution"].split(";")]
        assert len(results) == numbers - 1 and min(results) > 0 and max(results) <= ceiling


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(0, 6), st.integers(20, 300))
def test_chain_keeps_to_its_settings(fewest: int, more: int, ceiling: int):
    for row in Chain((fewest, fewest + more), ceiling).rows(5):
        results = [int(step.split("=")[1]) for step in row["solution"].split(";")]
        assert fewest <= len(results) <= fewest + more and min(results) >= 0 and max(results) <= ceiling


def test_demonstrations_come_from_the_training_problems():
    rows = Countdown().rows(5)
    assert demonstrations(Countdown(), 5) == [{"prompt": row["prompt"], "completion": row["solution"]} for row in rows]


def test_rows_become_a_data_set():
    datasets = pytest.importorskip("datasets")
    for a_task in TASKS:
        rows = a_task.rows(3)
        assert datasets.Dataset.from_list(rows).to_list() == rows


# A file of the user's own


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}+1?", "gold": str(i + 1)}) + "\n" for i in range(200)))
    return path


def test_a_file_is_a_task(problems):
    sums = task(str(problems), prompt="question", answer="gold")
    assert sums.name == "sums"
    train, held_out = sums.rows(150), sums.rows(10, split="held_out")
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert all(int(row["prompt"].split("+")[0]) + 1 == int(row["answer"]) for row in train)
    assert sums.rows(150, seed=1) != train


def test_a_file_is_read_whole_and_in_order(problems):
    rows = read_jsonl(problems, prompt="question", answer="gold")
    assert [row["answer"] for row in rows] == [str(i + 1) for i in range(200)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "answer": "b"}\n{"prompt": ', "bad.jsonl:2: not JSON"),
        ('{"prompt": "a"}', "bad.jsonl:1: no column 'answer'; there are prompt"),
        ("[1, 2]", "bad.jsonl:1: a list, not an object"),
        ("\n\n", "no rows"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content: str, message: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_jsonl(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_jsonl(tmp_path / "nowhere.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_jsonl(tmp_path / "bytes.jsonl")


def test_more_rows_than_the_file_has(problems):
    with pytest.raises(ConfigError, match="1000 asked for"):
        Jsonl(str(problems), "question", "gold").rows(1000)


# Edges


def test_a_list_from_a_config_file_is_the_same_task():
    assert task("chain", steps=[8, 16]) == Chain()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: task("cuntdown"), "Did you mean 'countdown'"),
        (lambda: task("sudoku"), "There are countdown, chain"),
        (lambda: task("countdown", number=3), "Did you mean 'numbers'"),
        (lambda: task("chain", colour=3), "It has: steps, ceiling"),
        (lambda: task("countdown", numbers=1), "a step takes two numbers"),
        (lambda: task("countdown", largest=200), "at most `ceiling`"),
        (lambda: task("chain", steps=(3, 2)), "fewest, most"),
        (lambda: task("chain", ceiling=1), "no room"),
        (lambda: Countdown(numbers=2, largest=3).rows(1000), "only [0-9]+ of 1000 different train problems"),
        (lambda: Countdown().rows(1, split="test"), "'train' and 'held_out'"),
    ],
)
def test_what_cannot_work_is_refused_with_advice(call, message: str):
    with pytest.raises(ConfigError, match=message):
        call()
