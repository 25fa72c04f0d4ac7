"""Settings on the command line."""

from pathlib import Path

import pytest

from dew.cli.flags import load_run, parse_flags
from dew.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--max_steps", "8"], {"max_steps": 8}),
        (["--learning-rate=3e-4"], {"learning_rate": 3e-4}),
        (["--use_cpu", "--bf16", "false"], {"use_cpu": True, "bf16": False}),
        (["--no_shuffle_dataset"], {"shuffle_dataset": False}),
        (["--seed", "-1"], {"seed": -1}),
        (["--reward_funcs", "a.py:b", "think_format"], {"reward_funcs": ["a.py:b", "think_format"]}),
        (["--algorithm_kwargs", "{alpha2: 0.2}"], {"algorithm_kwargs": {"alpha2": 0.2}}),
        (["--algorithm_kwargs", '{"alpha2": 0.2}'], {"algorithm_kwargs": {"alpha2": 0.2}}),
        (["--run_name", "no"], {"run_name": "no"}),
        (["--run_name", "'5'"], {"run_name": "5"}),
        (["--run_name", "a: b #1"], {"run_name": "a: b #1"}),
        (["--run_name", "#1"], {"run_name": "#1"}),
        (["--run_name", "a\nb: c"], {"run_name": "a\nb: c"}),
        (["--guide", "null"], {"guide": None}),
        (["--guide="], {"guide": None}),
        (["--optim_args", "betas=0.9"], {"optim_args": "betas=0.9"}),
        (["--output_dir", "runs/a.b=c"], {"output_dir": "runs/a.b=c"}),
        (["trainer.nnodes=8", "+a.b=[1, x]"], {"verl": {"trainer.nnodes": 8, "+a.b": [1, "x"]}}),
        (["--bf16", "trainer.nnodes=8"], {"bf16": True, "verl": {"trainer.nnodes": 8}}),
        (["--seed", "1", "--seed", "2"], {"seed": 2}),
        (["--algorithm", "rules.py:Mine", "-o", "runs/x"], {"algorithm": "rules.py:Mine", "output_dir": "runs/x"}),
        (["--out", "runs/x", "--learning_rate", "-1"], {"output_dir": "runs/x", "learning_rate": -1}),
    ],
)
def test_flags_are_settings(words, settings):
    assert parse_flags(words)[0] == settings


def test_the_parser_remembers_what_was_typed():
    typed = parse_flags(["--run_name", "1.10", "--no_bf16", "--reward_funcs", "a", "b", "+a.b=1"])[1]
    assert typed == {"run_name": "1.10", "bf16": "false", "reward_funcs": "a b", "verl.+a.b": "1"}


@pytest.mark.parametrize("word", ["stray", "-x", "a=b", "="])
def test_other_words_are_refused(word):
    with pytest.raises(ConfigError, match="not understood"):
        parse_flags(["--seed", "1", "--x=1", word])


def test_flags_override_the_file(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "task: gsm8k\nseed: 1\nproblems: 8\nverl: {trainer: {nnodes: 1, logger: x}, +a.b: 1}\nengine: verl\n"
    )
    run, typed = load_run(path, ["--seed", "2", "--problems=9", "trainer.nnodes=8", "a.b=2"])
    assert run.settings == {"seed": 2} and run.problems == 9 and run.task == "gsm8k" and run.source == str(path)
    assert run.verl == {"trainer.logger": "x", "trainer.nnodes": 8, "a.b": 2}
    assert set(typed) == {"seed", "problems", "verl.trainer.nnodes", "verl.a.b"}


def test_scores_can_be_typed_for_the_task_of_a_file(tmp_path):
    (tmp_path / "x.yaml").write_text("task: countdown\n")
    run, _ = load_run(tmp_path / "x.yaml", ["--scores", "{problems: 8, k: 4}"])
    assert run.scores is not None and (run.scores.problems, run.scores.k) == (8, 4)
    without = ["--scores", "true", "--task", "null", "--dataset_name", "some/data"]
    for words, says in ((without, "scores without a task"), (["--problems", "many"], "problems: expected int")):
        with pytest.raises(ConfigError, match=says) as error:
            load_run(tmp_path / "x.yaml", words)
        assert error.value.source == "command line"


def test_a_tilde_in_output_dir_is_the_home_folder(tmp_path):
    (tmp_path / "my.yaml").write_text("output_dir: ~/runs\n")
    assert load_run(tmp_path / "my.yaml", [])[0].settings == {"output_dir": str(Path.home() / "runs")}


def test_a_folder_may_be_a_number_but_not_missing(tmp_path):
    (tmp_path / "my.yaml").write_text("output_dir: 7\n")
    assert load_run(tmp_path / "my.yaml", [])[0].settings == {"output_dir": "7"}
    for text, name in (("007", "007"), ("'8'", "8")):
        assert load_run(tmp_path / "my.yaml", ["-o", text])[0].settings == {"output_dir": name}
    for words in (["-o"], ["--algorithm"], ["--algorithm", "gtpo", "grpo"]):  # as with a shell variable that is empty
        with pytest.raises(ConfigError, match=r"is not a name\. Write --") as error:
            load_run(tmp_path / "my.yaml", words)
        assert error.value.source == "command line"
    (tmp_path / "my.yaml").write_text("algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 4}}\n")
    with pytest.raises(ConfigError, match="is a configuration of verl itself"):
        load_run(tmp_path / "my.yaml", [])


def test_reward_functions_beside_the_file_are_found_from_anywhere(tmp_path, monkeypatch):
    for name in ("here", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "both.py").touch()
    mine = tmp_path / "theirs" / "mine.py"
    mine.touch()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "theirs" / "my.yaml"
    path.write_text("reward_funcs: ['mine.py:a', mine.b, 'both.py:c', think_format, 'json:dumps']\n")
    run, _ = load_run(path, ["--algorithm", "both.py:Rule"])
    both = tmp_path / "here" / "both.py"
    assert run.settings["reward_funcs"] == [f"{mine}:a", f"{mine}:b", f"{both}:c", "think_format", "json:dumps"]
    assert run.settings["algorithm"] == f"{both}:Rule"  # `dew resume` in another folder finds it
