"""Records: any content round-trips, and damaged files give a clear error."""

import gzip
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dew.errors import DewError, RecordError, ShapeError
from dew.run.folder import RunFolder
from dew.run.records import AnswerRecord, GroupRecord, read_records, record_path, write_records

FIELDS = {
    "tokens": ["4", "2"], "correct": True, "reward": 1.0, "truncated": False, "extracted": "42", "verdict": "correct",
    "live": [True, False], "entropy": [0.5, 1.25], "logp": [-0.5, -2.0], "shaped": [1.1, 1.0],
    "advantage": [0.75, 0.5], "grpo": [0.5, 0.5],
}  # fmt: skip
OF_GROUP = {"step": 120, "group": 3, "prompt": "6·7?", "gold": "42", "algorithm": "gtpo", "settings": {"alpha2": 0.1}}
GROUP = GroupRecord(**OF_GROUP, answers=[AnswerRecord(**FIELDS)])


# ── golden ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_format_of_a_group(tmp_path: Path) -> None:
    assert write_records(tmp_path, 120, [GROUP]) == 1
    path = tmp_path / "records" / "step-00000120.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).splitlines()
    answer = {**FIELDS, "extra": 0.0, "guided": False}
    assert [json.loads(line) for line in lines] == [{"schema": 1, **OF_GROUP, "answers": [answer]}]
    assert read_records(path) == [GROUP]


def test_numbers_keep_five_significant_digits(tmp_path: Path) -> None:
    entropy = [math.pi, 1e-6 / 3, 123456.7]
    write_records(tmp_path, 0, [GroupRecord(0, 0, "", [AnswerRecord(["a"] * 3, True, 1.0, entropy=entropy)])])
    (group,) = read_records(record_path(tmp_path, 0))
    assert group.answers[0].entropy == [3.1416, 3.3333e-7, 123460.0]


def test_minimal_record(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"answers": [{"tokens": ["a"], "reward": 1}]}\n\n{"answers": []}\n')
    first, second = read_records(path)
    assert first.answers[0].correct and first.step == 0 and first.prompt == ""
    assert (first.group, second.group) == (0, 2)


# ── properties ──────────────────────────────────────────────────────────────────────────────────────────────
any_text = st.text(st.characters(exclude_categories=()), max_size=20)  # every code point, lone surrogates too


@given(prompt=any_text, tokens=st.lists(any_text, max_size=5))
def test_any_text_round_trips(tmp_path_factory: pytest.TempPathFactory, prompt: str, tokens: list[str]) -> None:
    folder = tmp_path_factory.mktemp("run")
    group = GroupRecord(7, 0, prompt, [AnswerRecord(tokens, False, 0.0)])
    write_records(folder, 7, [group])
    assert read_records(record_path(folder, 7)) == [group]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats()), max_size=12))
def test_last_value_of_a_step_counts(tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[int, float]]) -> None:
    run = RunFolder(tmp_path_factory.mktemp("run"))
    for step, reward in lines:
        run.append_metrics({"step": step, "reward": reward})
    expected = {step: reward if math.isfinite(reward) else None for step, reward in lines}
    assert run.metrics() == [{"step": step, "reward": expected[step]} for step in sorted(expected)]


# ── edges ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_nonfinite_numbers_become_nan(tmp_path: Path) -> None:
    write_records(tmp_path, 0, [GroupRecord(0, 0, "", [AnswerRecord(["a"], True, math.inf, ratio=[math.nan])])])
    (group,) = read_records(record_path(tmp_path, 0))
    assert math.isnan(group.answers[0].reward) and math.isnan((group.answers[0].ratio or [0.0])[0])


def test_lists_of_another_length_raise() -> None:
    with pytest.raises(ShapeError, match="entropy has 1 entries for 2 tokens"):
        AnswerRecord(["a", "b"], True, 1.0, entropy=[0.1])
    with pytest.raises(ShapeError, match="Decode the ids"):
        AnswerRecord([17], True, 1.0)  # type: ignore[list-item]


def test_groups_beyond_the_limit_are_omitted(tmp_path: Path) -> None:
    def group(n: int, tokens: int) -> GroupRecord:
        return GroupRecord(1, n, "", [AnswerRecord(["x"] * tokens, True, 1.0)])

    assert write_records(tmp_path, 1, [group(0, 6), group(1, 5), group(2, 4)], max_tokens=10) == 2
    assert [g.group for g in read_records(record_path(tmp_path, 1))] == [0, 2]
    assert write_records(tmp_path, 1, [group(0, 11), group(1, 1)], max_tokens=10) == 1  # at least one
    assert write_records(tmp_path, 1, []) == 0 and not record_path(tmp_path, 1).exists()


WHOLE = gzip.compress(json.dumps({"answers": [{"tokens": ["a"] * 500, "reward": 1}]}).encode() + b"\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(WHOLE[:-9], "cannot be read", id="truncated gzip"),
        pytest.param(WHOLE[:10] + b"\xff" * 20, "cannot be read", id="damaged gzip"),
        pytest.param(gzip.decompress(WHOLE)[:-20], "line 1 is not a token record", id="truncated text"),
        pytest.param(b'{"schema": 2, "answers": []}', "records schema 2.*Upgrade dew", id="newer schema"),
        pytest.param(b"", "no groups", id="empty"),
        pytest.param(gzip.compress(b"\n"), "no groups", id="empty gzip"),
        pytest.param(b'{"step": 1}', "'answers' is missing", id="no answers"),
        pytest.param(b"[1, 2]", r"line 1 is not a token record \(not a JSON object\)", id="not an object"),
        pytest.param(b'{"answers": [{"tokens": ["a"], "entropy": ["x"]}]}', "could not convert", id="no number"),
        pytest.param(b'{"answers": [{"tokens": ["a"], "logp": []}]}', "0 entries for 1", id="short list"),
        pytest.param(b"[" * 100_000, "line 1 is not a token record", id="deeply nested"),
    ],
)
def test_damaged_records(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message) as caught:
        read_records(path)
    assert str(path) in str(caught.value) and isinstance(caught.value, DewError)


def test_write_run_updates_entries(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "deep" / "run")
    run.write_run({"name": "r", "status": "running"})
    run.write_run({"status": "done"})
    assert run.run() == {"schema": 1, "name": "r", "status": "done"}


def test_incomplete_line_of_a_killed_run_is_skipped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "rew')
    assert run.metrics() == [] and not run.skipped  # it may still be being written
    run.append_metrics({"step": 1, "reward": 0.1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "rew')
    assert [m["step"] for m in run.metrics()] == [1]
    run.append_metrics({"step": 2, "reward": 0.2})
    assert [m["step"] for m in run.metrics()] == [1, 2]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3}')  # whole, without its end
    run.append_metrics({"step": 4})
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4] and not run.skipped


def test_every_second_record_is_deleted_beyond_keep(tmp_path: Path) -> None:
    """The first and the newest stay; never more than `keep` files, thinned evenly."""
    run, seen = RunFolder(tmp_path), []
    for step in range(1, 41):
        run.write_records(step, [GroupRecord(step=step, group=0, prompt="", answers=[])], keep=8)
        steps = [int(path.name[5:13]) for path in run.record_files()]
        seen.append(len(steps))
        assert steps[0] == 1 and steps[-1] == step
    assert max(seen) == 8 and min(seen[8:]) >= 4
    for step in range(41, 60):
        run.write_records(step, [GroupRecord(step=step, group=0, prompt="", answers=[])])
    assert len(run.record_files()) == seen[-1] + 19  # 0 keeps all of them


def test_alarm_repeated_by_a_resumed_run_is_listed_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for value in (0.1, 0.2):
        run.append_alarm({"step": 9, "alarm": "entropy_collapse", "value": value})
    run.append_alarm({"step": 3, "alarm": "truncated", "value": 0.5})
    assert [(a["step"], a["value"]) for a in run.alarms()] == [(3, 0.5), (9, 0.2)]


def test_damaged_files_and_a_newer_schema(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for name, read in {"run.json": run.run, "scores.json": run.scores, "metrics.jsonl": run.metrics}.items():
        (tmp_path / name).write_bytes(b'{"step": 1, "na\n')
        with pytest.raises(RecordError, match=name):
            read()
    (tmp_path / "run.json").write_text('{"schema": 2}')
    with pytest.raises(RecordError, match=r"schema 2.*Upgrade dew"):
        run.run()
