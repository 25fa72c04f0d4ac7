"""`dew eval` and `dew pairs`: what is evaluated, and which flags have no effect. Nothing is sampled here."""

import json
import os
import shutil

import pytest

from dew import evaluate
from dew.cli import evaluate as command
from dew.evaluate.sampling import Sampled, Sampling
from dew.evaluate.scores import ScoredProblem, Scores
from dew.rewards import Verdict
from dew.tasks import TINY


@pytest.fixture
def asked(monkeypatch):
    """The arguments of `evaluate`, in place of an evaluation: all answers are wrong."""
    calls = []

    def record(model, tokenizer, problems, verifier=None, **settings):
        calls.append({"problems": problems, "verifier": verifier, **settings})
        problem = ScoredProblem("1+1?", "2", [Sampled("3", 1, False)], [Verdict("wrong", "3")])
        return Scores("sums", "none", Sampling(k=1), [problem], 1.0)

    monkeypatch.setattr(evaluate, "evaluate", record)
    monkeypatch.setattr(command, "load_model", lambda *_: (None, None))
    return calls


@pytest.mark.parametrize(("engine", "file"), [("trl", "config.yaml"), ("verl", "verl.yaml")])
def test_a_run_its_model_and_its_checkpoints_have_the_runs_task_and_length(dew, asked, tmp_path, engine, file):
    (tmp_path / "run.json").write_text(json.dumps({"engine": engine}))
    (tmp_path / "config.yaml").write_text("trainer: {nnodes: 1}")  # verl's own
    (tmp_path / file).write_text("task: chain\ntask_settings: {steps: [2, 3]}\nmax_completion_length: 7")
    for name in ("", "model", "checkpoint-3"):
        (tmp_path / name).mkdir(exist_ok=True)
        assert dew("eval", tmp_path / name, "--json")[0] == 0
        assert asked[-1]["problems"].steps == (2, 3) and asked[-1]["max_new_tokens"] == 7
        dew("pairs", tmp_path / name, tmp_path / "pairs.jsonl", "-n", 3)
        assert asked[-1]["name"] == "chain" and asked[-1]["max_new_tokens"] == 7
    assert dew("eval", tmp_path, "--task", "countdown", "--max-new-tokens", 9, "--json")[0] == 0
    assert asked[-1]["problems"].name == "countdown" and asked[-1]["max_new_tokens"] == 9


def test_a_model_that_was_not_copied_completely_is_an_error(dew, tmp_path):
    shutil.copytree(TINY, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 100_000)
    code, _, err = dew("eval", tmp_path / "cut", "-n", 1)
    assert code == 1 and "cut' cannot be loaded" in err


def test_a_file_that_cannot_be_written_is_an_error_before_sampling(dew, asked, tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for words in (["eval", "tiny", "--keep"], ["eval", "tiny", "--suite", "paper", "--keep"], ["pairs", "tiny"]):
        code, _, err = dew(*words, tmp_path / "file" / "folder" / "kept.jsonl")
        assert code == 1 and "kept.jsonl cannot be written: Not a directory." in err
    code, _, err = dew("eval", "tiny", "--keep", tmp_path / "pipe.jsonl")
    assert code == 1 and "pipe.jsonl cannot be written: it is a folder, a pipe or a device." in err
    assert not asked and dew("eval", "tiny", "--keep", tmp_path / "new" / "kept.json")[0] == 0


def test_typed_settings_replace_those_of_a_suite(dew, asked):
    dew("eval", "tiny", "--suite", "paper", "--temperature", 0.6, "-n", 20, "--json")
    assert [(call["k"], call["temperature"], call["n_problems"]) for call in asked] == [(32, 0.6, 20)] * 3


def test_flags_without_an_effect_are_refused(dew, asked, tmp_path):
    kept = tmp_path / "kept.json"
    evaluate.evaluate(None, None, []).write(kept)
    assert dew("eval", kept)[0] == 0
    for flag, value in (("--task", "chain"), ("--temperature", 0.5), ("--seed", 1), ("-k", 16)):
        assert f"error: {flag}: no effect on answers read from a file" in dew("eval", kept, flag, value)[2]
    for flag in ("--task", "--vs"):
        assert f"error: {flag}: --suite evaluates one model" in dew("eval", "tiny", "--suite", "paper", flag, "x")[2]
    for flag, value in (("-k", 4), ("--temperature", 0.5), ("--top-p", 0.9), ("--seed", 1)):
        assert f"error: {flag}: no effect with --greedy" in dew("eval", "tiny", "--greedy", flag, value)[2]
    assert "error: --threshold: no effect without --reward" in dew("eval", "tiny", "--threshold", 0.9)[2]
    assert len(asked) == 1


def test_a_second_model_that_does_not_exist_is_an_error_before_sampling(dew, asked):
    code, _, err = dew("eval", "tiny", "--vs", "nowhere")
    assert code == 1 and "'nowhere' cannot be loaded" in err and not asked
