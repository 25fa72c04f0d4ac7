"""`dew compare`: what is refused, its runs, and what is left to do after an interruption."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dew.cli import compare as command
from dew.cli.app import app
from dew.cli.flags import load_run
from dew.compare.grid import Cell
from dew.errors import ConfigError
from dew.rewards.process import cores
from dew.run.config import make_run
from dew.run.folder import RunFolder


def test_algorithms_are_named_by_their_labels(tmp_path):
    code = "from dew.algorithms import GRPO\n\nclass Rule(GRPO):\n    name = 'rule_to_compare'\n"
    (tmp_path / "compared_rules.py").write_text(code)
    own = f"{tmp_path}/compared_rules.py:Rule"
    assert command._algorithms(f"GTPO, grpo-s, {own}") == {"gtpo": "GTPO", "grpo_s": "grpo-s", "rule_to_compare": own}
    typed = {
        "gtpo": "gtpo",
        "gtpo(entropy_clip=(0.01,5.0),alpha2=0.2)": "gtpo(alpha2=0.2, entropy_clip=(0.01, 5.0))",
        "rule_to_compare(clip_low=0.1)": f"{own}(clip_low=0.1)",
    }
    assert command._algorithms(",".join(typed.values())) == typed
    (tmp_path / "others.py").write_text(code)
    for wrong, says in (
        ("gtop", "Did you mean 'gtpo'"),
        (" ,", "''"),
        (f"{own},{tmp_path}/others.py:Rule", "have the same name, 'rule_to_compare'"),
        ("gtpo,GTPO(alpha2=0.1)", r"gtpo and GTPO\(alpha2=0.1\) have the same name"),
    ):
        with pytest.raises(ConfigError, match=says):
            command._algorithms(wrong)
    with pytest.raises(ConfigError, match="give alpha2 different values"):
        command._algorithms("gtpo(alpha2=0.1)", {"alpha2": 0.2})
    with pytest.raises(ConfigError, match="grpo has no setting 'alpha2'"):  # before the first run starts
        command._algorithms("gtpo,grpo", make_run({"algorithm_kwargs": '{"alpha2": 0.2}'}).algorithm_settings)


def test_settings_that_the_comparison_chooses_are_refused(tmp_path):
    (tmp_path / "r.yaml").write_text("task: countdown\nseed: 3\nalgorithm: dapo\nmax_steps: 5\n")
    run = command.without_per_run(*load_run(tmp_path / "r.yaml", ["--max_steps", "7"]))
    assert run.settings == {"max_steps": 7}  # without the recipe's own algorithm and seed
    with pytest.raises(ConfigError, match=r"seed: .*--seeds"):
        command.without_per_run(*load_run(tmp_path / "r.yaml", ["--seed", "1"]))
    with pytest.raises(ConfigError, match="dew train --engine verl"):
        command.without_per_run(*load_run(tmp_path / "r.yaml", ["--engine", "verl"]))


def test_runs_with_a_checkpoint_are_resumed_and_others_started_again(tmp_path):
    cell, home = Cell("gtpo", 0), tmp_path / "gtpo-seed0"
    fresh = command._child(tmp_path, cell, "gtpo")
    assert fresh.command[3:5] == ["train", str(tmp_path / "recipe.yaml")]
    assert fresh.command[5:] == ["--algorithm", "gtpo", "--seed", "0", "--output_dir", str(home)]
    RunFolder(home).write_run({"status": "running"})  # killed before its first checkpoint
    assert command._child(tmp_path, cell, "gtpo").command == fresh.command and not home.exists()
    (home / "checkpoint-4").mkdir(parents=True)
    (home / "checkpoint-4" / "trainer_state.json").write_text("{}")
    assert command._child(tmp_path, cell, "gtpo").command[3:] == ["resume", str(home)]


@pytest.mark.parametrize(("flags", "expected"), [(["--no_use_cpu"], 1), ([], cores()), (["--parallel", "3"], 3)])
def test_runs_at_a_time(flags, expected, tmp_path, monkeypatch):
    """One per core on a CPU, one on a GPU, or as many as were asked for."""

    class Enough(Exception):
        pass

    def run_all(children, parallel, **_):
        assert (len(children), parallel) == (2, expected)
        raise Enough

    monkeypatch.setattr(command, "run_all", run_all)
    words = ["compare", "tiny/countdown", "--algorithms", "gtpo,dapo", "--seeds", "1", "--out", str(tmp_path), *flags]
    assert isinstance(CliRunner().invoke(app, words).exception, Enough)


@pytest.mark.slow
def test_a_comparison_killed_half_way_resumes(tmp_path):
    words = ["compare", "tiny/countdown", "--algorithms", "gtpo(pool=outcome),grpo", "--seeds", "1"]
    words += ["--parallel", "1", "--out", "c"]
    words += ["--max_steps", "4", "--scores", "{problems: 8, k: 4}", "--save_steps", "1"]
    typed = [sys.executable, "-m", "dew", *words]
    running = subprocess.Popen(typed, cwd=tmp_path)
    while not (tmp_path / "c" / "grpo-seed0" / "checkpoint-1" / "trainer_state.json").exists():
        assert running.poll() is None
    running.terminate()
    assert running.wait() == 1
    home = tmp_path / "c" / "gtpo_pool_outcome-seed0"
    first = (home / "run.json").read_text()
    assert json.loads(first)["algorithm"]["settings"]["pool"] == "outcome"
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 finished, 1 to do" in done.stdout and "with one run each" in done.stdout
    assert (home / "run.json").read_text() == first
    result = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [(r["arm"], r["seed"]) for r in result["runs"]] == [("gtpo(pool=outcome)", 0), ("grpo", 0)]
    assert {d["unit"] for d in result["differences"] if d["score"] != "area"} == {"problems"}
    assert (tmp_path / "c" / "compare.md").exists() and (tmp_path / "c" / "report.html").exists()
    steps = [m["step"] for m in RunFolder(tmp_path / "c" / "grpo-seed0").metrics()]
    assert steps == [1, 2, 3, 4]
