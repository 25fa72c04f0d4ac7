"""`dew train`, `resume`, `eval` and `export` on the tiny model that comes with dew."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from torch import nn

import trl_tiny
from dew.cli import app, train
from dew.engines.trl import launch
from dew.engines.trl.launch import parse
from dew.errors import ConfigError, EngineError
from dew.run.config import make_run, read_run, to_yaml, training_rows, verifier_of
from dew.run.folder import RUN_AGAIN, RunFolder, claim, lock
from dew.tasks.games import BUNDLED

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
SMALL = {**trl_tiny.COUNTDOWN, "max_completion_length": 32, "records_every": 1, "save_steps": 1}


def start(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "dew", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        run = {**SMALL, "output_dir": str(tmp_path / "run"), **changes}
        (tmp_path / "run.yaml").write_text(json.dumps(run))
        return tmp_path / "run.yaml"

    return write


def test_a_file_named_like_a_built_in_task_does_not_get_its_verifier():
    assert verifier_of(make_run({"task": "math.jsonl"})) is None and verifier_of(make_run({"task": "math"})) is not None


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: str(p.relative_to(ROOT / "recipes")))
def test_every_recipe_takes_every_algorithm(path):
    for algorithm in ("gtpo", "grpo_s", "dapo", "grpo"):
        parsed = parse(read_run(path, {"algorithm": algorithm}), dry=True)
        assert parsed.args.build_algorithm().name == algorithm and parsed.args.batches.fits
    assert str(read_run(path).settings["algorithm"]) in path.read_text()


@pytest.mark.parametrize(
    ("given", "converted"),
    [
        ({"max_steps": 1e2}, 100),
        ({"learning_rate": "1e-5"}, 1e-5),
        ({"bf16": "no"}, False),
        ({"run_name": 5}, "5"),
        ({"reward_funcs": "think_format"}, ["think_format"]),
        ({"report_to": ["tensorboard"]}, ["tensorboard"]),
        ({"lr_scheduler_type": "cosine"}, "cosine"),
    ],
)
def test_values_get_the_type_that_trl_declares(given, converted):
    (name,) = given
    parsed = parse(make_run({**SMALL, **given}))
    found = parsed.run.settings[name]
    assert found == converted and type(found) is type(converted)
    assert name == "bf16" or any(getattr(part, name, None) == converted for part in (parsed.script, parsed.args))


def test_preflight_names_the_command_that_was_checked(dew, config):
    code, out, _ = dew("preflight", config(), "--answers", "0", "--algorithm", "dapo", "--run_name", "a b")
    assert code == 0 and f"Next: dew train {config()} --algorithm dapo --run_name 'a b'" in out


def test_text_stays_as_it_was_typed():
    parsed = parse(make_run({**SMALL, "run_name": 1.1}), {"run_name": "1.10"})
    assert parsed.args.run_name == parsed.run.settings["run_name"] == "1.10"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"learning_rate": "fast"}, "invalid float"),
        ({"max_steps": 1.5}, "invalid int"),
        ({"bf16": "maybe"}, "yes/no"),
        ({"lr_scheduler_type": "cosin"}, "Did you mean 'cosine'"),
        ({"reward_weights": ["much"]}, "invalid float"),
        ({"torch_dtype": "bfloat16"}, "Write dtype"),
        ({"vllm_device": "cuda:1"}, "dew train --keys"),
        ({"loging_steps": 1}, "Did you mean 'logging_steps'"),
    ],
)
def test_a_wrong_value_is_blamed_on_the_file_or_the_command_line(given, says):
    (name,) = given
    for typed, source in (({}, "x.yaml"), ({name: "..."}, "command line"), ({"max_tokens": "1"}, "x.yaml")):
        with pytest.raises(ConfigError, match=says) as error:
            parse(make_run({**SMALL, **given}, source="x.yaml"), typed)
        assert error.value.source == source and name in error.value.problems[0].what


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"task": None}, "no training data"),
        ({"algorithm": "gtop"}, "Did you mean 'gtpo'"),
        ({"model_name_or_path": None}, "model_name_or_path is missing"),
        ({"learning_rate": float("inf")}, "learning_rate=inf. Give a number >= 0"),
        ({"task": None, "dataset_name": "nobody/nothing", "verifier": "math"}, "cannot be loaded"),
        ({"task": None, "dataset_name": f"{BUNDLED['tiny']}/config.json"}, "is a file; .* Write `task: /.*.json`"),
    ],
)
def test_bad_settings_and_missing_data_are_named(change, says):
    with pytest.raises(ConfigError, match=says):
        launch.data_of(parse(make_run({**SMALL, **change})))


def test_problems_whose_gold_cannot_be_matched_are_left_out_with_a_warning(tmp_path, caplog):
    pytest.importorskip("math_verify")
    rows = [{"problem": f"What is {i}+1?", "answer": str(i + 1)} for i in range(24)]
    rows += [{"problem": f"How does {i} look?", "answer": "\\frac{"} for i in range(24)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"task": str(tmp_path / "p.jsonl"), "task_settings": {}, "verifier": "math", "problems": 8}
    _, kept = training_rows(make_run({**SMALL, **task}))
    assert len(training_rows(make_run({**SMALL, **task, "task_settings": {"answer": ""}}))[1]) == 8
    assert 0 < len(kept) < 8 and all(row["answer"].isdecimal() for row in kept)
    assert "are skipped" in caplog.text


def test_a_reward_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match=r"no_such_module.*cannot be imported"):
        launch.rewards_of(parse(make_run({**SMALL, "reward_funcs": ["no_such_module.reward"]})))


def test_rewards_come_from_dew_trl_or_the_user(tmp_path):
    (tmp_path / "mine.py").write_text("def brevity(completions, **_):\n    return [-len(c) for c in completions]\n")
    names = ["think_format_reward", "boxed_format", f"{tmp_path}/mine.py:brevity"]
    rewards = {"reward_funcs": names, "reward_model_name_or_path": "tiny"}
    functions = launch.rewards_of(parse(make_run({**SMALL, **rewards})))
    assert functions[0].name == "countdown" and isinstance(functions[1], str)  # as in TRL: the order of the weights
    assert functions[4](completions=["abc"]) == [-3]
    (tmp_path / "own.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')  # data that have no verifier of their own
    own = {**SMALL, "task": str(tmp_path / "own.jsonl"), "reward_funcs": names[2:]}
    assert len(launch.rewards_of(parse(make_run(own)))) == 1
    with pytest.raises(ConfigError, match="no reward"):
        launch.rewards_of(parse(make_run({**own, "reward_funcs": None})))


def test_train_leaves_a_run_that_can_be_read_scored_and_exported(dew, config, tmp_path):
    path = config(scores={"problems": 4, "k": 2}, task_settings={"numbers": 3})
    code, said, err = dew("train", path)
    assert code == 0, err
    folder = RunFolder(tmp_path / "run")
    assert [m["step"] for m in folder.metrics()] == [1, 2] and folder.run()["status"] == "done"
    assert [entry["when"] for entry in folder.scores()] == ["before", "after"]
    assert next(iter(folder.records())).algorithm == "gtpo" and folder.run()["data"] == "countdown"
    assert read_run(folder.path / "config.yaml").to_dict() == read_run(path).to_dict()  # re-runnable as it is
    assert (folder.path / "report.html").is_file()
    assert "step 2/2" in said and "after training: pass@1" in said

    more = ("--output_dir", tmp_path / "more", "--resume_from_checkpoint", folder.path / "checkpoint-1")
    assert dew("train", path, *more)[0] == 0 and [m["step"] for m in RunFolder(tmp_path / "more").metrics()] == [2]
    code, _, err = dew("train", path)
    assert code == 1 and "already holds a run" in err and "--overwrite" in err
    for cannot, says in ((more[2:], "a new run clears"), (("--model_name_or_path", "./absent"), "there is no folder")):
        code, _, err = dew("train", path, "--overwrite", *cannot)
        assert code == 1 and says in err and folder.finished()  # deleted only once the new run can start
    code, _, err = dew("export", folder.path, tmp_path / "model")
    assert code == 0 and (tmp_path / "model" / "config.json").is_file(), err
    _, scored, _ = dew(
        "eval", tmp_path / "model", "--task", "countdown", "-n", 4, "-k", 2, "--max-new-tokens", 32, "--json"
    )
    assert 0 <= json.loads(scored)["scores"]["pass@1"]["value"] <= 1
    assert dew("eval", folder.path, "-n", 2, "-k", 1, "--keep", tmp_path / "kept.json")[0] == 0
    kept = json.loads((tmp_path / "kept.json").read_text())  # on the run's own task, with its settings and length
    assert [row["prompt"].count(",") for row in kept["problems"]] == [2, 2] and kept["sampling"]["max_new_tokens"] == 32
    (folder.path / "config.yaml").write_text("dataset_name: some/data")
    assert "trained on some/data" in dew("eval", folder.path)[2]


def test_own_data_and_rewards_are_scored_on_problems_that_the_run_left_out(dew, config, tmp_path):
    """Without a verifier the outcome reward decides, above the algorithm's threshold: 0.4 is correct above 0.3."""
    body = "def same(completions, completion_ids, **_):\n    return [0.4 if ids else 0.0 for ids in completion_ids]\n"
    (tmp_path / "mine.py").write_text(body)
    for split in ("train", "validation"):
        rows = [{"prompt": f"{i},{i}>{split[0]}:", "answer": "1"} for i in range(64)]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = config(
        task=str(tmp_path / "data"), reward_funcs=[f"{tmp_path}/mine.py:same"], scores={"problems": 3, "k": 2},
        algorithm_kwargs={"threshold": 0.3}, max_steps=1, max_completion_length=4,
    )  # fmt: skip
    code, said, err = dew("train", path)
    assert code == 0 and "after training: pass@1 1.000" in said, err
    (entry, _), task = RunFolder(tmp_path / "run").scores(), tmp_path / "data"
    assert entry["scores"]["reward"]["value"] == pytest.approx(0.4) and entry["of_train"]

    def prompts(file):
        return {problem["prompt"] for problem in json.loads(file.read_text())["problems"]}

    few = ["-n", 8, "-k", 1, "--max-new-tokens", 4, "--task", task, "--reward"]
    warning = "data has no test split: these problems are an eighth of its training data"
    mine, kept = f"{tmp_path}/mine.py:same", tmp_path / "kept.json"
    _, said, _ = dew("eval", tmp_path / "run", *few, mine, "--keep", kept)
    trained = {row["prompt"] for row in training_rows(read_run(path))[1]}
    assert "held-out problems" in said and warning not in said
    assert trained and not trained & prompts(kept)
    assert f"add --reward {mine} --options '{{threshold: 0.3}}'" in dew("eval", tmp_path / "run")[2]
    assert json.loads(kept.read_text())["scored_by"] == "mine.same > 0.5" and entry["scored_by"] == "mine.same > 0.3"
    _, said, _ = dew("eval", "tiny", *few, mine)
    assert "held-out problems" not in said and warning in said and warning in dew("eval", kept)[1]
    kept.unlink()

    file = tmp_path / "run" / "config.yaml"  # a run with a split of its own
    file.write_text(file.read_text() + "task_settings: {held_out: validation}\nverifier: countdown\n")
    _, said, _ = dew("eval", tmp_path / "run", *few, mine, "--keep", kept)
    assert warning not in said and all(prompt.endswith(">v:") for prompt in prompts(kept))
    assert "numbers" in dew("eval", tmp_path / "run", *few[:-1])[2]  # the run's verifier, which needs that column


def test_scores_need_a_verifier_or_a_reward_function(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    own = {"task": str(tmp_path / "own.jsonl"), "scores": True, "output_dir": str(tmp_path)}
    own["reward_model_name_or_path"] = "tiny"
    trainer = SimpleNamespace(accelerator=Accelerator(cpu=True), reward_funcs=[nn.Linear(1, 1)], outcome_index=0)
    with pytest.raises(ConfigError, match=r"scores: a reward model.*verifier: math"):
        launch._score(trainer, parse(make_run({**SMALL, **own})), "before", print)


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_fails_says_how_to_resume(monkeypatch, capsys, tmp_path, saved):
    parsed, error = parse(make_run({**SMALL, "output_dir": str(tmp_path)})), RuntimeError("CUDA error")

    def fails(*_, **__):
        if saved:
            (tmp_path / "checkpoint-5").mkdir(exist_ok=True)
        raise error

    monkeypatch.setattr(launch, "launch", fails)
    with pytest.raises(RuntimeError, match="CUDA error"):
        train._train_on_trl(parsed, resume=False)
    assert ("dew resume" in capsys.readouterr().out) == saved
    error = OSError(28, "No space left on device")
    with pytest.raises(EngineError, match=rf"disk is full.*dew resume {tmp_path}"):
        train._train_on_trl(parsed, resume=False)


def test_more_steps_need_a_checkpoint(dew, tmp_path):
    """A finished run without one would start again from the beginning."""
    (tmp_path / "config.yaml").write_text("task: countdown\nmax_steps: 2\n")
    (tmp_path / "model").mkdir()
    RunFolder(tmp_path).write_run({"status": "done"})
    assert "kept no checkpoint" in dew("resume", tmp_path, "--max_steps", "4")[2]
    RunFolder(tmp_path).append_metrics({"step": 4})
    assert "already at step 4" in dew("resume", tmp_path, "--max_steps", "4")[2]


def test_too_few_problems_are_refused_before_training(dew, config):
    path = config(problems=8, steps_per_generation=4)
    code, _, err = dew("train", path)
    assert code == 1 and "8 problems, fewer than the 16 prompts" in err
    assert dew("preflight", path, "--answers", "0")[0] == 1


def test_a_folder_in_use_is_refused(dew, tmp_path):
    (tmp_path / "r.yaml").write_text(json.dumps({**SMALL, "output_dir": str(tmp_path / "run")}))
    with lock(tmp_path / "run"):
        (tmp_path / "run/config.yaml").write_text(json.dumps(SMALL))
        (tmp_path / "run/run.json").write_text("{}")
        for words in (["train", tmp_path / "r.yaml", "--overwrite"], ["resume", tmp_path / "run"]):
            code, _, err = dew(*words)
            assert code == 1 and "in use by another command" in err
        claim(tmp_path / "run", overwrite=True)
        with pytest.raises(ConfigError, match="in use"), lock(tmp_path / "run"):
            pass


def test_overwrite_deletes_a_run_and_nothing_else(tmp_path):
    for name in ("config.yaml", "notes.txt", "model/weights", "records/step-1", "checkpoints/latest", "data/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("task: countdown\n")
    with pytest.raises(ConfigError, match=r"does not hold a run\. It has checkpoints, config"):
        claim(tmp_path, overwrite=True)  # a project of the user's that has a config.yaml
    (tmp_path / "config.yaml").write_text(to_yaml(make_run(SMALL), [RUN_AGAIN]))  # stopped before its first step
    claim(tmp_path, overwrite=True)
    RunFolder(tmp_path).clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "data", "notes.txt"]
    (tmp_path / "verl.yaml").touch()  # on verl, these two are the run's
    RunFolder(tmp_path).clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_that_failed_before_its_first_step_is_replaced(config, tmp_path, dew):
    (tmp_path / "mine.py").write_text("def score(completions, **columns):\n    return None\n")
    mine = ("--reward_funcs", tmp_path / "mine.py:score", "--outcome_reward", "score")
    code, _, err = dew("train", config(), *mine)
    assert code == 1 and "score returned NoneType" in err
    claim(tmp_path / "run", overwrite=False)
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="already holds a run"):
        claim(tmp_path / "run", overwrite=False)


def test_only_the_first_of_several_processes_prints():
    command = [sys.executable, "-m", "dew", "recipes"]
    done = subprocess.run(command, env={**os.environ, "RANK": "1"}, capture_output=True, text=True, check=True)
    assert not done.stdout


@pytest.mark.parametrize("error", [PackageNotFoundError("transformers"), ModuleNotFoundError(name="peft")])
def test_a_missing_package_names_its_extra(error, capsys):
    assert app._explain(error) == 1
    assert "is not installed.\n→ pip install 'dew-rl[trl]'" in capsys.readouterr().err


def test_messages_name_commands_that_exist():
    from typer.main import get_command

    texts = [file.read_text("utf-8") for file in (ROOT / "src/dew").rglob("*.py")]
    named = {word for text in texts for word in re.findall(r"`dew ([a-z]+)", text)}
    assert named and named <= set(get_command(app.app).commands)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_run_killed_after_its_last_step_is_not_trained_further(dew, config, tmp_path):
    assert dew("train", config(save_steps=2))[0] == 0
    folder = RunFolder(tmp_path / "run")
    model = (folder.path / "model/model.safetensors").read_bytes()
    assert "is finished" in dew("resume", folder.path)[1]
    shutil.rmtree(folder.path / "model")
    folder.write_run({"status": "running"})
    assert dew("resume", folder.path)[0] == 0 and folder.run()["status"] == "done"
    assert (folder.path / "model/model.safetensors").read_bytes() == model
    assert [m["step"] for m in folder.metrics()] == [1, 2]
    assert dew("resume", folder.path, "--max_steps", "3")[0] == 0  # now further
    assert [m["step"] for m in folder.metrics()] == [1, 2, 3]
    assert "max_steps: 3" in (folder.path / "config.yaml").read_text()


@pytest.mark.slow
def test_a_stopped_run_resumes_with_identical_results(dew, config, tmp_path):
    assert dew("train", config(max_steps=6, output_dir=str(tmp_path / "whole")))[0] == 0
    run = start("train", config(max_steps=6))
    folder = RunFolder(tmp_path / "run")
    while len(folder.metrics()) < 2 and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0 and "dew resume" in out, err
    assert folder.run()["status"] == "stopped" and len(folder.metrics()) < 6
    assert dew("resume", folder.path)[0] == 0
    assert folder.run()["status"] == "done"
    model = "model/model.safetensors"
    assert (folder.path / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()
