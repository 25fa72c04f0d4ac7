"""`dew eval`: what is evaluated, and which flags have no effect. Nothing is sampled here."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from dew import compare, tasks
from dew.cli import evaluate as command
from dew.compare.sampling import Sampled, Sampling
from dew.compare.scores import ScoredProblem, Scores
from dew.rewards import Verdict
from dew.tasks import TINY
from dew.tasks.games import BUNDLED


@pytest.fixture
def asked(monkeypatch):
    """The arguments of `evaluate`, in place of an evaluation: all answers are wrong."""
    calls = []

    def record(model, tokenizer, problems, verifier=None, **settings):
        calls.append({"problems": problems, "verifier": verifier, **settings})
        problem = ScoredProblem("1+1?", "2", [Sampled("3", 1, False)], [Verdict("wrong", "3")])
        return Scores("sums", "none", Sampling(k=1), [problem], 1.0)

    monkeypatch.setattr(compare, "evaluate", record)
    monkeypatch.setattr(command, "load_model", lambda *_, **__: (None, None))
    return calls


def test_vllm_samples_in_float32_on_a_cpu(monkeypatch):
    monkeypatch.setattr(compare, "load_vllm", lambda folder, **settings: settings)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.load_model("tiny", "vllm")[0] == {"dtype": "float32"}


@pytest.mark.parametrize(("engine", "file"), [("trl", "config.yaml"), ("verl", "verl.yaml")])
def test_a_run_its_model_and_its_checkpoints_have_the_runs_task_and_length(dew, asked, tmp_path, engine, file):
    (tmp_path / "run.json").write_text(json.dumps({"engine": engine}))
    (tmp_path / "config.yaml").write_text("trainer: {nnodes: 1}")  # verl's own
    (tmp_path / file).write_text("task: countdown\ntask_settings: {numbers: 3}\nmax_completion_length: 7")
    for name in ("", "model", "checkpoint-3"):
        (tmp_path / name).mkdir(exist_ok=True)
        assert dew("eval", tmp_path / name, "--json")[0] == 0
        assert asked[-1]["problems"].numbers == 3 and asked[-1]["max_new_tokens"] == 7
    assert dew("eval", tmp_path, "--task", "gsm8k", "--max-new-tokens", 9, "--json")[0] == 0
    assert asked[-1]["problems"].name == "gsm8k" and asked[-1]["max_new_tokens"] == 9
    (tmp_path / "run.json").write_text('{"max_completion_length": 5}')  # started in Python
    for name in {file, "config.yaml"}:
        (tmp_path / name).unlink()
    assert dew("eval", tmp_path, "--task", "gsm8k", "--json")[0] == 0 and asked[-1]["max_new_tokens"] == 5


def test_a_model_that_was_not_copied_completely_is_an_error(dew, tmp_path):
    shutil.copytree(TINY, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 100_000)
    code, _, err = dew("eval", tmp_path / "cut", "--task", "countdown", "-n", 1)
    assert code == 1 and "cut' cannot be loaded" in err


def test_a_file_that_cannot_be_written_is_an_error_before_sampling(dew, asked, tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe.json")
    code, _, err = dew("eval", "tiny", "--keep", tmp_path / "file" / "folder" / "kept.json")
    assert code == 1 and "Not a directory." in err
    code, _, err = dew("eval", "tiny", "--keep", tmp_path / "pipe.json")
    assert code == 1 and "pipe.json already exists." in err
    assert not asked and dew("eval", "tiny", "--keep", tmp_path / "new" / "kept.json")[0] == 0
    code, _, err = dew("eval", "tiny", "--keep", tmp_path / "new" / "kept.json")
    assert code == 1 and "kept.json already exists." in err and len(asked) == 1
    (tmp_path / "a-vs.json").touch()
    assert "a-vs.json already exists" in dew("eval", "tiny", "--vs", "tiny6", "--keep", tmp_path / "a.json")[2]


def test_answers_that_could_not_be_scored_are_scored_by_the_same_command(dew, tmp_path, monkeypatch):
    rule, kept = tmp_path / "own rule.py", tmp_path / "a file.json"
    words = ["eval", "tiny", "--vs", "tiny6", "--reward", f"{rule}:score", "-n", 2, "-k", 2, "--task", "countdown"]
    rule.write_text("def score(completions, **_):\n    raise ValueError('oops')\n")
    code, _, err = dew(*words, "--keep", kept)
    assert code == 1 and "oops" in err and f"--keep '{kept}' does not sample them again" in err
    assert "not a file of scores" in dew("eval", kept)[2]
    assert "of an evaluation with other problems." in dew(*words, "-n", 3, "--keep", kept)[2]
    rule.write_text("def score(completions, prompts, **_):\n    return [len(prompts) for _ in completions]\n")
    monkeypatch.setattr("dew.compare.scores.sample", lambda *_: json.loads("out of memory"))
    assert "JSONDecodeError" in dew(*words, "--keep", kept)[2]  # of the second model
    monkeypatch.setattr("dew.compare.scores.sample", lambda *given: [[Sampled("7", 1, False)] * 2 for _ in given[2]])
    code, _, err = dew(*words, "--keep", kept)
    assert code == 0 and "scoring the answers that were sampled earlier" in err
    first, second = (Scores.read(path) for path in (kept, tmp_path / "a file-vs.json"))
    assert first["reward"].value == 4 and first.problems[0].answers[0].text != "7" == second.problems[0].answers[0].text


def test_answers_of_weights_that_have_changed_since_are_not_scored(dew, tmp_path):
    model, rule, kept = tmp_path / "model", tmp_path / "rule.py", tmp_path / "kept.json"
    shutil.copytree(TINY, model)
    words = ["eval", model, "--reward", f"{rule}:score", "-n", 2, "-k", 2, "--task", "countdown", "--keep", kept]
    rule.write_text("def score(completions, **_):\n    raise ValueError('oops')\n")
    for _ in range(2):
        assert "oops" in dew(*words)[2]
    shutil.copy(BUNDLED["tiny6"] / "model.safetensors", model)
    code, _, err = dew(*words)
    assert code == 1 and "are not scored yet, of an evaluation with other weights." in err


def test_answers_are_not_lost_without_keep(dew, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "gettempdir", lambda: tmp_path)
    rule, words = tmp_path / "rule.py", ["eval", "tiny", "-n", 1, "-k", 1, "--reward", f"{tmp_path}/rule.py:score"]
    rule.write_text("def score(completions, **_):\n    return [None for _ in completions]\n")
    assert "scored none" in dew(*words)[2]
    (kept,) = tmp_path.glob("dew-eval-*.json")
    assert len(json.loads(kept.read_text())["unscored"]) == 1
    files = "[*pathlib.Path(__file__).parent.glob('dew-eval-*.json')]"  # while the second answer is scored
    rule.write_text(f"import pathlib\ndef score(completions, **_):\n    return [len({files}) for _ in completions]\n")
    code, out, _ = dew(*words)
    assert code == 0 and "2.000" in out and [*tmp_path.glob("dew-eval-*.json")] == [kept]


def test_a_checkpoint_that_training_deletes_meanwhile_is_named(dew, tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(TINY, checkpoint)
    (checkpoint / "trainer_state.json").touch()
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(command, "load_weights", lambda path: shutil.rmtree(path) or json.loads("not there"))
    code, _, err = dew("eval", tmp_path, "--task", "countdown")
    assert code == 1 and "checkpoint-3 was deleted while it was loaded" in err
    assert dew("export", tmp_path, tmp_path / "to")[0] == 1


def test_flags_without_an_effect_are_refused(dew, asked, tmp_path):
    kept = tmp_path / "kept.json"
    compare.evaluate(None, None, []).write(kept)
    assert "1 answer each" in dew("eval", kept)[1]
    for flag, value in (("--task", "gsm8k"), ("--temperature", 0.5), ("--options", "{seed: 1}"), ("-k", 16)):
        assert f"error: {flag}: no effect on answers read from a file" in dew("eval", kept, flag, value)[2]
    assert len(asked) == 1
    assert dew("eval", "tiny6")[0] == 0 and asked.pop()["problems"].numbers == 6  # what it has learned
    assert dew("eval", "tiny", "--options", "{greedy: true, batch_size: 8}")[0] == 0
    assert asked[-1]["greedy"] is True and asked[-1]["batch_size"] == 8
    assert "threshold: no effect on the verifier countdown" in dew("eval", "tiny", "--options", "{threshold: 0}")[2]


def test_a_second_model_that_does_not_exist_is_an_error_before_sampling(dew, asked):
    code, _, err = dew("eval", "tiny", "--vs", "nowhere", "--task", "countdown")
    assert code == 1 and "'nowhere' cannot be loaded" in err and not asked


@pytest.fixture
def run(tmp_path):
    """Makes the folder of a run with this config."""

    def make(name, config):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        (tmp_path / name / "config.yaml").write_text(config)
        return tmp_path / name

    return make


def test_two_models_are_evaluated_on_the_task_of_either_run(dew, asked, run, monkeypatch):
    monkeypatch.setattr(command, "load_tokenizer", lambda *_: None)
    a, b = run("a", "task: countdown"), run("b", "task: gsm8k")
    c = run("c", "task: countdown\ntask_settings: {ceiling: 50}")
    assert dew("eval", "tiny", "--vs", a)[0] == 0 and [call["problems"].name for call in asked] == ["countdown"] * 2
    code, _, err = dew("eval", a, "--vs", b)
    assert code == 1 and f"different problems: {a} on countdown, {b} on gsm8k.\n→ Choose with --task." in err
    assert f"{c} on countdown {{'ceiling': 50}}" in dew("eval", a, "--vs", c)[2] and len(asked) == 2
    assert dew("eval", a, "--vs", b, "--task", "countdown")[0] == 0


def test_code_that_a_run_names_is_not_run_but_the_flags_to_do_so_are_shown(dew, asked, run, tmp_path):
    rows, data = [{"prompt": f"{i}+{i}?", "answer": str(2 * i)} for i in range(64)], tmp_path / "own.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    rule = f"reward_funcs: [{tmp_path}/mine.py:short, '{tmp_path}/mine.py:score']\noutcome_reward: score\n"
    own = run("own", f"task: {data}\n{rule}algorithm_kwargs: " + """'{"threshold": 0.3}'""")
    flags = f"--reward {tmp_path}/mine.py:score --options '{{threshold: 0.3}}'"
    for words in (["eval", own], ["eval", own, "--task", data]):
        code, _, err = dew(*words)
        assert code == 1 and f"{data} has no verifier." in err and f"add {flags}, which runs that code." in err
    elsewhere = run("elsewhere", "dataset_name: some/data\nreward_funcs: accuracy_reward")
    says = "trained on some/data, not on a `task` with held-out problems.\n→ Add --task: a file, "
    assert says in dew("eval", elsewhere)[2]
    assert not asked
    assert dew("eval", run("built-in", f"task: {data}\nreward_funcs: [math]"))[0] == 0
    assert asked[-1]["verifier"].name == "math" and asked[-1]["problems"].name == "own"
    (tmp_path / "math.jsonl").write_text(data.read_text())
    assert "math.jsonl has no verifier." in dew("eval", run("file", f"task: {tmp_path}/math.jsonl\n{rule}"))[2]
    (tmp_path / "mine.py").write_text("def score(completions, **_): ...")
    dew("eval", own, "--reward", f"{tmp_path}/mine.py:score", "--options", "{threshold: 0.3}")
    assert asked[-1]["verifier"].name == "score" and asked[-1]["threshold"] == 0.3


def test_a_model_is_compared_with_kept_answers_under_the_same_conditions(dew, asked, tmp_path):
    rows = tasks.task("countdown").rows(3, split="held_out")
    answers = {"answers": [Sampled("3", 1, False)] * 2, "verdicts": [Verdict("wrong", "3")] * 2}
    problems = [ScoredProblem(row["prompt"], row["answer"], **answers) for row in rows]
    kept, sampling = tmp_path / "kept.json", Sampling(k=2, temperature=0.5, max_new_tokens=9)
    Scores("countdown", "m", sampling, problems, 1.0, scored_by="countdown").write(kept)
    dew("eval", kept, "--vs", "tiny", "--temperature", 0.7)
    how = asked.pop()
    assert (how["k"], how["temperature"], how["max_new_tokens"], how["n_problems"]) == (2, 0.7, 9, 3)
    assert how["problems"].name == "countdown" and how["verifier"].name == "countdown"
    assert "4 of countdown, 3 in common" in dew("eval", kept, "--vs", "tiny", "-n", 4)[2]
    assert "reward or verifier: countdown and equation" in dew("eval", kept, "--vs", "tiny", "--reward", "equation")[2]
    assert not asked


def test_different_sampling_settings_are_shown(dew, asked, tmp_path):
    scores = compare.evaluate(None, None, [])
    for name, temperature in (("a", 1.0), ("b", 0.5)):
        replace(scores, sampling=Sampling(k=1, temperature=temperature)).write(tmp_path / f"{name}.json")
    _, said, _ = dew("eval", tmp_path / "a.json", "--vs", tmp_path / "b.json")
    assert "sampled with different settings: temperature 1.0 and 0.5." in said
    _, same, _ = dew("eval", tmp_path / "a.json", "--vs", tmp_path / "a.json")
    assert "different settings" not in same and "within noise" in same
