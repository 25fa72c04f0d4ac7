"""`dew compare`: its runs, what is left to do after an interruption, and its tables."""

import json
import subprocess
import sys

import pytest
from dew.compare.comparison import Result
from typer.testing import CliRunner

from dew.cli import compare as command
from dew.cli.app import app
from dew.cli.flags import load_run
from dew.compare import compare_runs
from dew.errors import ConfigError
from dew.rewards.process import cores
from dew.run.config import make_run
from dew.run.folder import RunFolder


def runs(algorithm, values):
    return [Result(algorithm, seed, 480, {"area": {"": x}}) for seed, x in enumerate(values)]


# Tables


def test_the_table_by_hand():
    text = command.markdown(compare_runs(runs("dapo", [0.2, 0.4]) + runs("gtpo", [0.3, 0.4]), "dapo"))
    assert "| dapo | 2 | 0.300 ± 0.141 | 480 |" in text  # √(0.1² + 0.1²) = 0.141
    assert "| gtpo − dapo | area under training accuracy | +0.050 [+0.000, +0.100] | 1 of 2 | too few seeds" in text
    assert "Too few seeds to tell a difference from noise; train at least 5." in text
    assert "do not separate" in command.markdown(
        compare_runs(runs("dapo", [0.2] * 5) + runs("gtpo", [0.2] * 5), "dapo")
    )


def test_only_differences_larger_than_noise_are_named():
    base = [0.1, 0.2, 0.3, 0.4, 0.5]
    same = [0.12, 0.18, 0.33, 0.36, 0.5]
    result = compare_runs(runs("dapo", base) + runs("grpo", same) + runs("gtpo", [x + 0.1 for x in base]), "dapo")
    text = command.markdown(result)
    assert "| grpo − dapo |" in text and "within noise |" in text and "| gtpo ahead |" in text
    assert "Larger than noise: gtpo ahead in area" in text and "Any others are within noise" in text
    assert "do not separate" not in text


def test_one_algorithm_has_no_differences():
    assert "difference" not in command.markdown(compare_runs(runs("gtpo", [0.1]), "gtpo"))


# The plan


def test_names_are_spelled_as_dew_does_and_own_classes_as_typed(tmp_path):
    code = "from dew.algorithms import GRPO\n\nclass Rule(GRPO):\n    name = 'rule_to_compare'\n"
    (tmp_path / "compared_rules.py").write_text(code)
    own = f"{tmp_path}/compared_rules.py:Rule"
    assert command._algorithms(f"GTPO, grpo-s, {own}") == {
        "gtpo": "gtpo",
        "grpo_s": "grpo_s",
        "rule_to_compare": own,
    }
    with pytest.raises(ConfigError, match="Did you mean 'gtpo'"):
        command._algorithms("gtop")
    with pytest.raises(ConfigError, match="''"):
        command._algorithms(" ,")
    (tmp_path / "others.py").write_text(code)
    with pytest.raises(ConfigError, match="have the same name, 'rule_to_compare'"):
        command._algorithms(f"{own},{tmp_path}/others.py:Rule")
    with pytest.raises(ConfigError, match="gtpo and gtpo have the same name"):
        command._algorithms("gtpo,GTPO")
    with pytest.raises(ConfigError, match="grpo has no setting 'alpha2'"):  # before the first run starts
        command._algorithms("gtpo,grpo", {"alpha2": 0.2})


def test_settings_that_the_comparison_chooses_are_refused(tmp_path):
    (tmp_path / "r.yaml").write_text("task: countdown\nseed: 3\nalgorithm: dapo\nmax_steps: 5\n")
    run = command._without_per_run(*load_run(tmp_path / "r.yaml", ["--max_steps", "7"]))
    assert run.settings == {"max_steps": 7}  # without the recipe's own algorithm and seed
    with pytest.raises(ConfigError, match=r"seed: .*--seeds"):
        command._without_per_run(*load_run(tmp_path / "r.yaml", ["--seed", "1"]))
    with pytest.raises(ConfigError, match="dew train --engine verl"):
        command._without_per_run(*load_run(tmp_path / "r.yaml", ["--engine", "verl"]))
    with pytest.raises(ConfigError, match="no algorithms to compare"):
        command._without_per_run(make_run({"trainer": "dpo", "pairs": "pairs.jsonl"}), {})


def test_a_folder_holds_one_comparison(tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    first = make_run({"task": "countdown", "max_steps": 5})
    plan = command._write_config(first, folder)
    assert command._write_config(first, folder) == plan
    command._write_config(make_run({"task": "countdown", "max_step": 5}), folder)  # a typo: no run has started
    command._write_config(first, folder)
    RunFolder(folder / "gtpo-seed0").write_run({"status": "running"})
    with pytest.raises(ConfigError, match=r"other settings \(max_steps\)"):
        command._write_config(make_run({"task": "countdown", "max_steps": 6}), folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not empty"):
        command._write_config(first, tmp_path / "full")


def test_runs_of_a_rule_that_was_edited_are_not_mixed_with_new_ones(tmp_path):
    rules, code = (
        tmp_path / "edited_rules.py",
        "from dew.algorithms import GRPO\nclass Rule(GRPO):\n    name = 'edited'\n",
    )
    names = {"gtpo": "gtpo", "edited": f"{rules}:Rule"}
    for text in (code, code + "    scale = False\n"):  # no run has started
        rules.write_text(text)
        command._check_rules(names, tmp_path)
    (tmp_path / "edited-seed0").mkdir()
    command._check_rules(names, tmp_path)
    rules.write_text(code)
    with pytest.raises(ConfigError, match=r"The code of edited has changed.* Delete .*edited-seed\* to train"):
        command._check_rules(names, tmp_path)


def test_finished_runs_are_kept_interrupted_ones_resumed_and_others_started_again(tmp_path):
    plan = tmp_path / "recipe.yaml"
    home = tmp_path / "gtpo-seed0"
    fresh = command._child(plan, home, "gtpo", 0)
    assert fresh is not None and fresh.arguments[:2] == ["train", str(plan)]
    assert fresh.arguments[2:] == ["--algorithm", "gtpo", "--seed", "0", "--output_dir", str(home)]

    RunFolder(home).write_run({"status": "running"})  # killed before its first checkpoint
    again = command._child(plan, home, "gtpo", 0)
    assert again is not None and again.arguments == fresh.arguments and not home.exists()

    (home / "checkpoint-4").mkdir(parents=True)
    (home / "checkpoint-4" / "trainer_state.json").write_text("{}")
    RunFolder(home).write_run({"status": "running"})
    resumed = command._child(plan, home, "gtpo", 0)
    assert resumed is not None and resumed.arguments == ["resume", str(home)]

    RunFolder(home).write_run({"status": "done"})  # killed before its model was saved
    assert command._child(plan, home, "gtpo", 0) is not None
    (home / "model").mkdir()
    assert command._child(plan, home, "gtpo", 0) is None
    RunFolder(home).write_scores([{"when": "before"}])  # killed while it was scored
    unscored = command._child(plan, home, "gtpo", 0)
    assert unscored is not None and unscored.arguments == ["resume", str(home)]


@pytest.mark.parametrize(("flags", "expected"), [(["--no_use_cpu"], 1), ([], cores()), (["--parallel", "3"], 3)])
def test_runs_at_a_time(flags, expected, tmp_path, monkeypatch):
    """One per core on a CPU, one on a GPU, or as many as were asked for."""

    class Enough(Exception):
        pass

    def train(children, total, parallel, *, quiet):
        assert (total, parallel) == (2, expected)
        raise Enough

    monkeypatch.setattr(command, "_train", train)
    words = ["compare", "tiny/countdown", "--algorithms", "gtpo,dapo", "--seeds", "1", "--out", str(tmp_path), *flags]
    assert isinstance(CliRunner().invoke(app, words).exception, Enough)


# As it is typed


def test_mistakes_are_named_before_anything_runs(dew, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, says in (
        (["compare", "tiny/countdown", "--algorithms", "gtpo,gapo"], "gapo"),
        (["compare", "tiny/countdown", "--algorithms", "gtpo", "--baseline", "dapo"], "not among the algorithms"),
        (["compare", "nowhere.yaml"], "no config file or recipe"),
    ):
        code, _, err = dew(*words)
        assert code == 1 and says in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_comparison_killed_half_way_resumes(tmp_path):
    words = ["compare", "tiny/countdown", "--algorithms", "gtpo,grpo", "--seeds", "1", "--parallel", "1", "--out", "c"]
    words += ["--max_steps", "4", "--scores", "{problems: 8, k: 4}", "--save_steps", "1"]
    typed = [sys.executable, "-m", "dew.cli", *words]
    running = subprocess.Popen(typed, cwd=tmp_path)
    while not (tmp_path / "c" / "grpo-seed0" / "checkpoint-1" / "trainer_state.json").exists():
        assert running.poll() is None
    running.terminate()
    assert running.wait() == 1
    first = (tmp_path / "c" / "gtpo-seed0" / "run.json").read_text()
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 finished, 1 to do" in done.stdout and "too few seeds" in done.stdout
    assert (tmp_path / "c" / "gtpo-seed0" / "run.json").read_text() == first
    result = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [(r["algorithm"], r["seed"]) for r in result["runs"]] == [("gtpo", 0), ("grpo", 0)]
    assert (tmp_path / "c" / "compare.md").exists() and (tmp_path / "c" / "report.html").exists()
    steps = [m["step"] for m in RunFolder(tmp_path / "c" / "grpo-seed0").metrics()]
    assert steps == [1, 2, 3, 4]
