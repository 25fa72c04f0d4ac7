"""Data sets: every file format, bad rows counted, no test problems in training."""

import gzip
import json
import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.errors import ConfigError
from dew.tasks import task
from dew.tasks.datasets import PRESETS, TEMPLATES, named, render
from dew.tasks.rows import columns, key, read_rows, row_key, without_overlap

SHARED = Path(os.environ.get("DEW_DATA") or Path(__file__).parents[3] / "shared/data")
ROWS = [{"problem": f"What is {i} plus {i + 1}, please?", "answer": 2 * i + 1, "level": i % 3} for i in range(100)]


def write(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


@pytest.fixture
def shared(monkeypatch):
    if not (SHARED / "gsm8k").is_dir():
        pytest.skip(f"no copies of the data sets at {SHARED}")
    monkeypatch.setenv("DEW_DATA", str(SHARED))


# ── Golden ────────────────────────────────────────────────────────────────────────────────────────────────
def test_all_formats_give_the_same_rows(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "a.jsonl.gz", ROWS)
    write(tmp_path / "folder/train.jsonl", ROWS)
    data.to_parquet(tmp_path / "shards/data/train-00000-of-00001.parquet")
    expected = [{"problem": row["problem"], "answer": str(row["answer"]), "level": row["level"]} for row in ROWS]
    for source in ("a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "folder", "shards"):
        assert read_rows(tmp_path / source, columns(keep=["level"])) == expected, source


def test_bad_rows_are_skipped_counted_and_logged(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("dew.tasks.rows.MAX_SHOWN", 9)
    good, who = {"problem": "How many?", "answer": "1"}, [{"problem": "Who?", "answer": answer} for answer in "AB"]
    empty = [{"problem": "How much?"}, {"problem": " ", "answer": "2"}, {"problem": "When?", "answer": None}]
    lines = [good, *empty, [1, 2], good, *who]
    path = write(tmp_path / "bad.jsonl", lines)
    path.write_bytes(path.read_bytes() + b'{not json\n\xff\xfe\n\n{"problem": "\\ud83d?", "answer": "3"}\n')
    with caplog.at_level(logging.WARNING, "dew.tasks"):
        rows = read_rows(path, columns())
    assert [row["problem"] for row in rows] == ["How many?"]
    assert [line.split(" (")[0].strip() for line in caplog.messages[0].split("\n")[1:]] == [
        "bad.jsonl:2: no column 'answer'; there are problem",
        "bad.jsonl:3: no problem",
        "bad.jsonl:4: no answer",
        "bad.jsonl:5: a list, not an object with columns",
        "bad.jsonl:9: not JSON",
        "bad.jsonl:10: not JSON",
        "bad.jsonl:12: 'utf-8' codec can't encode character '\\ud83d' in position 1: surrogates not allowed",
        "bad.jsonl:7: conflicting answers to one problem, A and B",
        "bad.jsonl:8: conflicting answers to one problem, A and B",
    ]
    monkeypatch.setattr("dew.tasks.rows.MAX_SHOWN", 3)
    read_rows(path, columns())
    assert "9 unusable rows skipped" in caplog.text and caplog.messages[1].endswith("...")


def test_any_folder_with_or_without_a_dot(tmp_path, monkeypatch):
    """Files that are not named after splits, ready-made prompts, a test split alone."""
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(64)]
    write(tmp_path / "mine" / "part-a.jsonl", rows[:32])
    write(tmp_path / "mine" / "part-b.jsonl", rows[32:])
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "./mine", str(tmp_path / "mine")):
        found = [task(name).rows(64, split=split) for split in ("train", "held_out")]
        assert sorted(row["prompt"] for part in found for row in part) == sorted(row["prompt"] for row in rows)
    write(tmp_path / "tests" / "test.jsonl", rows)
    assert len(task("tests").rows(64, split="held_out")) == 64
    write(tmp_path / "both" / "train.jsonl", rows[:60])
    write(tmp_path / "both" / "test.jsonl", rows[60:])
    assert [len(task("both").rows(64, split=split)) for split in ("train", "held_out")] == [60, 4]
    for name in ("mine_train.jsonl", "mine_test.jsonl"):
        write(tmp_path / "suffixes" / name, rows)
    with pytest.raises(ConfigError, match=r"no train split; it has mine_test.jsonl, mine_train"):
        task("suffixes").rows(64)
    write(tmp_path / "problems" / "train.jsonl", [{"problem": "1+1", "answer": "2"}])
    for name in ("problems", "problems/train.jsonl"):
        assert task(name).rows(1)[0]["problem"] == "1+1"


def test_nested_columns(tmp_path):
    raw = {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 times 7?"}],
        "reward_model": {"ground_truth": ["42"], "style": "rule"},
    }
    read = columns("prompt", "reward_model.ground_truth")
    assert read_rows(write(tmp_path / "verl.jsonl", [raw]), read) == [{"problem": "What is 6 times 7?", "answer": "42"}]


@pytest.mark.parametrize(
    ("name", "raw", "problem", "answer"),
    [
        ("gsm8k", {"question": "Q?", "answer": "48/2 = <<48/2=24>>24\n#### 1,072"}, "Q?", "1072"),
        ("math", {"problem": "P", "solution": r"so $\boxed{\frac{1}{2}}$", "level": "Level 1"}, "P", r"\frac{1}{2}"),
        ("math500", {"problem": "P", "solution": "s", "answer": "p - q", "unique_id": "u"}, "P", "p - q"),
        ("amc23", {"id": 0, "question": "P", "answer": 27.0}, "P", "27.0"),
        ("dapo17k", {"prompt": "P", "solution": "34", "reward_model": {"ground_truth": "34"}}, "P", "34"),
    ],
)
def test_columns_of_the_hub(tmp_path, monkeypatch, *, name: str, raw, problem: str, answer: str):
    monkeypatch.setenv("DEW_DATA", str(tmp_path))
    file, split = ("test", "held_out") if PRESETS[name].train is None else ("train", "train")
    write(tmp_path / name / f"{file}.jsonl", [raw])
    (row,) = named(name).problems(split)
    assert (row["problem"], row["answer"]) == (problem, answer)


def test_tinyzero_from_its_numbers(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"target": 98, "nums": [44, 19, 35]}])
    (row,) = task("countdown-tinyzero", path=str(path.parent)).rows(5)
    assert row["numbers"] == [44, 19, 35] and row["answer"] == "98"
    assert "the numbers [44, 19, 35], create an equation that equals 98" in row["prompt"]
    assert row["prompt"].startswith("A conversation") and row["prompt"].endswith("Assistant:")
    (row,) = task("countdown-tinyzero", path=str(path.parent), template="tinyzero").rows(5)
    (message,) = row["prompt"]
    assert message["role"] == "user" and "equals 98. You can" in message["content"] and "<think>" in message["content"]


def test_settings_are_chosen_on_training_problems(tmp_path, monkeypatch):
    """held_out="train": an eighth of the training problems; the test split is not read."""
    monkeypatch.setenv("DEW_DATA", str(tmp_path))
    for split in ("train", "test"):
        rows = [{"problem": f"What is {split} problem number {i}?", "answer": "1"} for i in range(80)]
        write(tmp_path / "gsm8k" / f"{split}.jsonl", rows)
    parts = [task("gsm8k", held_out="train").rows(99, split=split) for split in ("train", "held_out")]
    assert 1 < len(parts[1]) < 20 and len({row["problem"] for rows in parts for row in rows}) == 80
    assert all("train problem" in row["problem"] for row in parts[1])
    with pytest.raises(ConfigError, match="an eighth"):
        task("gsm8k", held_out="validation")


def test_templates():
    assert render("chat", "1+1?") == [
        {"role": "user", "content": "1+1?\nPlease reason step by step, and put your final answer within \\boxed{}."}
    ]
    assert render("qwen-boxed", "1+1?") == (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    for part in ("<think> reasoning process here </think>", "User: 1+1? Assistant:"):
        assert part in render("r1", "1+1?")
    assert render("plain", "1+1?") == "1+1?"
    assert render("Q: {problem}\nA:", "{x}?") == "Q: {x}?\nA:"
    assert all("{problem}" not in str(render(name, "{braces} $x$")) for name in TEMPLATES)


# ── Oracle: the copies of the real sets ───────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("name", "train", "held_out"),
    [("gsm8k", 7473, 1319), ("math500", 0, 500), ("amc23", 0, 40), ("countdown-tinyzero", 8001, 2001)],
)
def test_the_real_sets_are_complete(shared, name: str, train: int, held_out: int):
    assert len(named(name).problems("held_out")) == held_out
    if train:
        assert len(named(name).problems("train")) == train


@pytest.mark.slow
def test_dapo_shares_seven_problems_with_math500_and_eight_with_amc23(shared):
    dapo = named("dapo17k").problems("train")
    tests = {name: named(name).problems("held_out") for name in ("math500", "amc23", "aime24", "aime25")}
    found = {name: len(rows) - len(without_overlap(rows, dapo)[0]) for name, rows in tests.items()}
    assert found == {"math500": 7, "amc23": 8, "aime24": 0, "aime25": 0}
    clean = task("dapo17k", without=["amc23"])  # its held-out problems are MATH-500, which is always removed
    train, held_out = clean.rows(10**6), clean.rows(10**6, split="held_out")
    assert len(held_out) == 500 and without_overlap(train, held_out, tests["amc23"])[1] == 0
    assert len(dapo) - len(train) < 30


# ── Properties ────────────────────────────────────────────────────────────────────────────────────────────
@settings(max_examples=20)
@given(st.integers(0, 9), st.integers(0, 60), st.integers(0, 60))
def test_fewer_rows_are_a_prefix_and_removing_a_row_moves_no_other(seed: int, n: int, gone: int):
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.jsonl", ROWS)
        whole = task(str(path), template="plain").rows(1000, seed=seed)
        assert task(str(path), template="plain").rows(n, seed=seed) == whole[:n]
        write(path, [row for i, row in enumerate(ROWS) if i != gone][::-1])  # in another order, without one row
        rest = task(str(path), template="plain").rows(1000, seed=seed)
        assert rest == [row for row in whole if not row["problem"].startswith(f"What is {gone} plus")]


@settings(max_examples=15)
@given(st.text(min_size=20, max_size=40))
def test_white_space_is_ignored(text: str):
    rows = [{"problem": text}, {"problem": f"  {text} "}]
    assert key(f" {text}\n") == key(text) and len({row_key(row, "problem") for row in rows}) == 1


def test_training_and_held_out_problems_are_disjoint(tmp_path):
    sums = task(str(write(tmp_path / "a.parquet.jsonl", ROWS)), template="plain")
    train, held_out = sums.rows(1000), sums.rows(1000, split="held_out")
    assert len(train) + len(held_out) == 100 and 0 < len(held_out) < 40
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert task("gsm8k", path=tmp_path / "a.parquet.jsonl", template="plain").rows(1000) == train
    assert len(task("aime25", path=str(tmp_path / "a.parquet.jsonl")).rows(1000, split="held_out")) == 100
    other = sums.rows(1000, seed=1)
    assert other != train and sorted(r["prompt"] for r in other) == sorted(r["prompt"] for r in train)


def test_overlap_ignores_spelling_but_not_numbers():
    texts = (r"Find $x$ if \frac{1}{2}x = 17.  ", "Find x if 1/2 x = 18.", "1+1?")
    train = [{"problem": text} for text in texts]
    test = [{"problem": r"find $ x $ if $\frac 12 x=17$"}, {"problem": "1+1?"}]
    assert without_overlap(train, test) == (train[1:], 1)  # "1+1?" is too short
    assert row_key({"problem": "x + 1"}, "problem") != row_key({"problem": "x - 1"}, "problem")


# ── Edges ─────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: task("gsm8"), "Did you mean 'gsm8k'"),
        (lambda p: task("gsm8k", templat="r1"), "Did you mean 'template'"),
        (lambda p: task("gsm8k", template="qwen-box"), "Did you mean 'qwen-boxed'"),
        (lambda p: task("aime24", path=str(p)).rows(1), "evaluation only"),
        (lambda p: task("gsm8k", path=str(p)).rows(1), "no train split.*Expected train.jsonl"),
        (lambda p: task(str(p / "none.parquet")).rows(1), "none.parquet: cannot be read"),
        (lambda p: task(str(p / "text.parquet")).rows(1), "not a Parquet file"),
        (lambda p: task(str(p / "text.json")).rows(1), "not JSON"),
        (lambda p: task(str(p / "text.jsonl.gz")).rows(1), "cannot be read"),
        (lambda p: task(str(p / "empty.jsonl"), problem="q").rows(1), "No usable rows.*empty.jsonl: 1 unusable rows"),
        (lambda p: task(str(p / "empty.jsonl"), held_out="test"), "is one file, without splits"),
        (lambda p: task("a.csv").rows(1), r"a.csv: neither a folder, nor a file \(.jsonl"),
        (lambda p: task("data/b.csv").rows(1), "b.csv: neither a folder, nor a file"),
        (lambda p: task("nobody/nothing-at-all").rows(1), "'nobody/nothing-at-all' cannot be loaded"),
    ],
)
def test_invalid_sources_and_settings(tmp_path, monkeypatch, call, message: str):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("text.parquet", "text.json", "text.jsonl.gz", "a.csv", "data/b.csv"):
        (tmp_path / name).write_text("something else")
    write(tmp_path / "empty.jsonl", [{}])
    with pytest.raises(ConfigError, match=message):
        call(tmp_path)


def test_a_task_names_the_template_that_it_renders_with():
    """The verl engine chooses the model's chat template by it."""
    assert task("own.jsonl", problem="question").template == "chat"
    assert task("own.jsonl", problem="question", template="r1").template == "r1"
    assert task("own.jsonl", prompt="prompt").template is None
