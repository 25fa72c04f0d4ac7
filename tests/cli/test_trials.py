"""What hostile trials did to the commands: each ends in what the user wanted, or in one clear error."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from dew.cli import app
from dew.engines.problems import training_rows
from dew.engines.trl import launch
from dew.engines.trl.rewards import missing_columns
from dew.engines.trl.settings import parse
from dew.errors import ConfigError, EngineError
from dew.run.config import make_run, parse_yaml, read_run, to_yaml
from dew.run.folder import RUN_AGAIN, claim, lock
from dew.run.permission import check_permission, remember, remembered
from dew.tasks import TINY, task

SOURCE = Path(__file__).parents[2] / "src/dew"
SMALL = {"model_name_or_path": "tiny", "task": "countdown", "problems": 16, "max_steps": 1, "num_generations": 4,
         "per_device_train_batch_size": 8, "max_completion_length": 8, "use_cpu": True, "bf16": False,
         "gradient_checkpointing": False, "report_to": "none"}  # fmt: skip


# Files


def test_a_pipe_and_a_device_are_refused_wherever_a_file_is_read(tmp_path):
    from dew.engines.trl.guide import RecordedGuide

    for suffix in ("yaml", "jsonl"):
        os.mkfifo(tmp_path / f"pipe.{suffix}")
        (tmp_path / f"zero.{suffix}").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        for read in (
            lambda path: read_run(f"{path}.yaml"),
            lambda path: task(f"{path}.jsonl").rows(4),
            lambda path: RecordedGuide(f"{path}.jsonl", None, 8),
        ):
            with pytest.raises(ConfigError, match="not a regular file"):
                read(tmp_path / name)


def test_yaml_errors_name_the_line(tmp_path):
    with pytest.raises(ConfigError, match=r"line 4.*duplicate key"):
        parse_yaml("task: countdown\nlearning_rate: 1\n# a comment\nlearning_rate: 2\n")
    (tmp_path / "bom.yaml").write_text("task: chain\n", encoding="utf-8-sig")
    assert read_run(tmp_path / "bom.yaml").task == "chain"


# Settings


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"problems": 99_999_999_999}, "from 1 to 10,000,000"),
        ({"scores": {"k": 0}}, "scores.k: 0"),
        ({"scores": {"problems": "many"}}, "scores.problems: 'many'"),
        ({"dataset_name": "owner/data"}, "trains on one of them"),
        ({"learning_rate": float("inf")}, "learning_rate=inf: not a finite number"),
        ({"torch_dtype": "bfloat16"}, "Write dtype"),
        ({"max_prompt_length": 512}, "no longer truncates prompts"),
        ({"vllm_device": "cuda:1"}, "dew train --keys"),
    ],
)
def test_settings_that_cannot_work_are_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        parse(make_run({**SMALL, **given}))


def test_save_strategy_no_is_written_as_text():
    run = parse(make_run({**SMALL, "save_strategy": "no"})).run
    assert parse_yaml(to_yaml(run))["save_strategy"] == "no"


def test_too_few_problems_are_refused_before_training(dew, tmp_path):
    run = {**SMALL, "output_dir": str(tmp_path / "run"), "problems": 8, "steps_per_generation": 8}
    (tmp_path / "r.yaml").write_text(json.dumps(run))
    code, _, err = dew("train", tmp_path / "r.yaml")
    assert code == 1 and "8 problems, but a generation of 64 completions takes 16" in err
    assert dew("preflight", tmp_path / "r.yaml", "--answers", "0")[0] == 1


def test_columns_and_gold_answers_that_cannot_work_are_named(tmp_path):
    assert missing_columns(["prompt", "completions"], []) == [
        "the column 'completions' has the name of what TRL passes to every reward. Rename it."
    ]
    rows = [{"prompt": f"{i}+1=", "answer": "\\frac{"} for i in range(9)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=r"none of the . gold answers can be matched"):
        training_rows(make_run({"task": str(tmp_path / "x.jsonl"), "verifier": "math"}))


def test_evaluating_less_than_one_problem_is_refused(dew):
    assert dew("eval", "tiny", "-n", "-5") == (1, "", "error: -5 problems: evaluate at least one.\n")


def test_a_config_that_does_not_fit_the_weights_is_refused_before_loading():
    launch.check_width(TINY, {})
    with pytest.raises(ConfigError, match="hidden size 128, but its config says 10000000"):
        launch.check_width(TINY, {"hidden_size": 10_000_000})
    launch.check_width(TINY, {"hidden_size": None, "text_config": {"hidden_size": 128}})


@pytest.mark.parametrize("damaged", ["config.json", "model.safetensors"])
def test_a_damaged_model_is_refused(damaged, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes()[: 100 if name == damaged else None])
    run = make_run({**SMALL, "model_name_or_path": str(tmp_path), "output_dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        launch.build_trainer(parse(run))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    settings = {**SMALL, "learning_rate": 1e39, "weight_decay": 0.5, "output_dir": str(tmp_path), "save_strategy": "no"}
    with pytest.raises(EngineError, match="not finite"):
        parsed = parse(make_run(settings))
        launch.launch(parsed, launch.build_trainer(parsed), say=lambda text: None)
    assert not (tmp_path / "model").exists()


# Folders, processes, approval


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
    with pytest.raises(ConfigError, match="does not hold a run, but checkpoints, config"):
        claim(tmp_path, overwrite=True)  # a project of the user's that has a config.yaml
    (tmp_path / "config.yaml").write_text(to_yaml(make_run(SMALL), [RUN_AGAIN]))  # stopped before its first step
    claim(tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "data", "notes.txt"]
    (tmp_path / "verl.yaml").touch()  # on verl, these two are the run's
    claim(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_only_the_first_of_several_processes_prints():
    command = [sys.executable, "-m", "dew.cli", "recipes"]
    done = subprocess.run(command, env={**os.environ, "RANK": "1"}, capture_output=True, text=True, check=True)
    assert not done.stdout


def test_approval_outlives_the_command_but_not_a_change_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    run = make_run({**SMALL, "reward_funcs": ["mine.py:score"], "output_dir": "run"})
    remember(run, ["reward_funcs"], tmp_path / "run")
    moved = make_run({**run.to_dict(), "output_dir": str(tmp_path / "run")})
    assert remembered(moved, tmp_path / "run") == ["reward_funcs"]
    check_permission(moved, remembered(moved, tmp_path / "run"), untrusted=True)
    assert remembered(moved, tmp_path / "another") == []
    changed = make_run({**moved.to_dict(), "reward_funcs": ["theirs.py:score"]})
    with pytest.raises(ConfigError, match="approval"):
        check_permission(changed, remembered(changed, tmp_path / "run"), untrusted=True)


def test_the_home_folder_needs_approval(dew, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("r.yaml").write_text(json.dumps({**SMALL, "output_dir": "~/x"}))
    code, _, err = dew("train", "r.yaml", "--untrusted")
    assert code == 1 and f"output_dir: {tmp_path}/home/x is neither below" in err
    assert not (tmp_path / "home").exists()


# Messages


@pytest.mark.parametrize("error", [PackageNotFoundError("transformers"), ModuleNotFoundError(name="peft")])
def test_a_missing_package_names_its_extra(error, capsys):
    assert app._explain(error) == 1
    assert "is not installed.\n→ pip install 'dew-rl[trl]'" in capsys.readouterr().err


def test_messages_name_commands_that_exist():
    from typer.main import get_command

    named = {word for file in SOURCE.rglob("*.py") for word in re.findall(r"`dew ([a-z]+)", file.read_text("utf-8"))}
    assert named and named <= set(get_command(app.app).commands)  # type: ignore[attr-defined]
