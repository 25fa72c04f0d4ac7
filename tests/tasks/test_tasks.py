"""The generated games and files with ready-made prompts: solvable, reproducible, and split without leakage."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.errors import ConfigError
from dew.rewards import verifier
from dew.tasks import Countdown, Sums, task
from dew.tasks.datasets import split_of

EASY = Countdown(numbers=3, largest=9)
TASKS = [Countdown(), Sums(), EASY]


# ── Golden ────────────────────────────────────────────────────────────────────────────────────────────────
def test_problems_never_change():
    # A change here invalidates every score ever measured on the held-out problems.
    row = {"prompt": "13,4,8,4>21:", "answer": "21", "numbers": [13, 4, 8, 4], "solution": "13-4=9;8+4=12;12+9=21"}
    assert Countdown().rows(1, split="held_out") == [row]


# ── Oracle ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("a_task", TASKS, ids=repr)
def test_every_solution_is_correct_for_the_verifier(a_task):
    rows = a_task.rows(300) + a_task.rows(30, split="held_out")
    verdicts = verifier(a_task.name).verdicts([row["solution"] for row in rows], rows)
    assert {verdict.status for verdict in verdicts} == {"correct"}


# ── Properties ────────────────────────────────────────────────────────────────────────────────────────────
@settings(max_examples=20)
@given(st.integers(0, 5), st.integers(0, 5))
def test_training_and_held_out_problems_are_disjoint(seed: int, other: int):
    trained = {tuple(sorted(row["numbers"])) for row in EASY.rows(150, seed=seed)}
    assert not trained & {tuple(sorted(row["numbers"])) for row in EASY.rows(30, split="held_out", seed=other)}


@settings(max_examples=20)
@given(st.sampled_from(TASKS), st.integers(0, 99), st.integers(0, 20), st.integers(2, 20))
def test_rows_are_distinct_and_reproducible_and_fewer_are_a_prefix(a_task, seed: int, n: int, more: int):
    rows = a_task.rows(n + more, seed=seed)
    assert rows[:n] == a_task.rows(n, seed=seed) and rows != a_task.rows(n + more, seed=seed + 1)
    assert len({str(row["prompt"]) for row in rows}) == n + more


def test_one_problem_in_eight_is_held_out():
    assert abs(sum(split_of(i) == "held_out" for i in range(8000)) / 8000 - 1 / 8) < 0.015


@settings(max_examples=20)
@given(st.integers(2, 5), st.integers(5, 20), st.integers(20, 300))
def test_countdown_respects_its_settings(numbers: int, largest: int, ceiling: int):
    for row in Countdown(numbers, largest, ceiling).rows(5):
        assert len(row["numbers"]) == numbers and max(row["numbers"]) <= largest
        assert row["prompt"] == ",".join(map(str, row["numbers"])) + ">" + row["answer"] + ":"
        results = [int(step.split("=")[1]) for step in row["solution"].split(";")]
        assert len(results) == numbers - 1 and min(results) > 0 and max(results) <= ceiling


def test_countdown_returns_all_problems_if_there_are_fewer():
    assert len(Countdown(numbers=2, largest=3).rows(99)) == 14


def test_sums_for_tuning_leave_the_test_problems_out():
    tested = {row["solution"] for row in Sums().rows(9999, split="held_out")}
    parts = [{row["solution"] for row in Sums(tuning=True).rows(9999, split=x)} for x in ("train", "held_out")]
    assert not parts[0] & parts[1] and not tested & (parts[0] | parts[1])
    assert len(tested) + sum(map(len, parts)) == 99**2
    assert [m["content"] for m in Sums(example=True).rows(1)[0]["prompt"]][:2] == ["What is 23 + 45?", "23 + 45 = 68"]
    assert {row["solution"] for x in ("train", "held_out") for row in Sums(numbers=3, largest=2).rows(9, split=x)} == {
        f"{a} + {b} + {c} = {a + b + c}" for a in (1, 2) for b in (1, 2) for c in (1, 2)
    }
    with pytest.raises(ConfigError, match="more than 2,000,000 problems"):
        Sums(numbers=4).rows(1)


def test_rows_become_a_data_set(problems):
    datasets = pytest.importorskip("datasets")
    for a_task in (*TASKS, task(str(problems), problem="question", answer="gold", keep="gold")):
        rows = a_task.rows(3)
        assert datasets.Dataset.from_list(rows).to_list() == rows


# ── Files with ready-made prompts ─────────────────────────────────────────────────────────────────────────
@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}+1?", "gold": i + 1}) + "\n" for i in range(200)))
    return path


def test_prompts_may_be_chats_and_keep_every_column(tmp_path):
    chats = [[{"role": "user", "content": f"What is {i}?"}] for i in range(40)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": c, "answer": ["a", "b"], "level": 3}) + "\n" for c in chats))
    rows = task(str(path)).rows(100) + task(str(path)).rows(100, split="held_out")
    assert sorted(row["prompt"][0]["content"] for row in rows) == sorted(c[0]["content"] for c in chats)
    assert all(row["answer"] == ["a", "b"] and row["level"] == 3 for row in rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "", "answer": "b"}', "bad.jsonl:1: no prompt"),
        ('{"prompt": "a", "answer": null}', "bad.jsonl:1: no answer"),
        ('{"prompt": 3, "answer": "b"}', "bad.jsonl:1: the prompt is neither text nor a list of chat messages"),
        ('{"prompt": "a", "answer": "b"}\n\n{"prompt": "a", "answer": "c"}', "bad.jsonl:3: conflicting answers"),
        ('{"prompt": "a", "gold": "b"}', "names the columns. Data without gold answers: task_settings {answer: ''}"),
        ("\n\n", "bad.jsonl: no rows."),
    ],
)
def test_bad_lines_are_reported_by_number(tmp_path, content: str, message: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:  # no other row is left
        task(str(path)).rows(1)
    assert message in str(error.value)


def test_byte_order_mark_and_other_line_separators(tmp_path):
    rows = [{"prompt": "one\u2028two\x85three", "answer": "1"}, {"prompt": "four", "answer": "4"}]
    path = tmp_path / "windows.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    path.write_bytes(text.encode("utf-8-sig"))
    found = [row for split in ("train", "held_out") for row in task(str(path)).problems(split)]
    assert sorted(row["prompt"] for row in found) == sorted(row["prompt"] for row in rows)


# ── Edges ─────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: task("cuntdown"), "Did you mean 'countdown'"),
        (lambda: task("sudoku"), "Choose one of: countdown, sums, gsm8k"),
        (lambda: task("countdown", number=3), "Did you mean 'numbers'"),
        (lambda: task("countdown", colour=3), "Choose one of: numbers, largest, ceiling"),
        (lambda: task("countdown", numbers=1), "a step takes two numbers"),
        (lambda: task("countdown", largest=200), "largest ≤ ceiling"),
        (lambda: task("countdown", numbers="three"), "countdown numbers='three' is not a whole number"),
        (lambda: task("gsm8k", template=5), "Task gsm8k: {'template': 5} cannot be used"),
        (lambda: Countdown(numbers=2, largest=3).rows(9, split="held_out"), "no held-out problems exist"),
        (lambda: Countdown().rows(1, split="test"), "'train' and 'held_out'"),
    ],
)
def test_invalid_settings(call, message: str):
    with pytest.raises(ConfigError, match=message):
        call()
