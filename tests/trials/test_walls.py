"""What stopped or misled new users, tried again by the same command. Before: exit 0 without learning, a traceback, or
an error about something else. After: it works, or one error names the setting and what to write."""

import json
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import trl_tiny
from dew.cli.train import read_yaml
from dew.run.folder import RunFolder

FILES = {
    "graded.py": "def score(completions, **_):\n    return [len(set(text)) / 100 for text in completions]\n",
    "words.jsonl": "".join(f'{{"prompt": "Reach {i} with 1, 2"}}\n' for i in range(32)),
    "extra.py": "from dew.algorithms import GRPO\n\nclass Rule(GRPO):\n    name = 'extra'\n\n"
    "    def advantages(self, rollouts, extra):\n        return rollouts.mask\n",
    "typo.py": "from dew.algorithms import GRPO\n\nclass Rule(GRPO):\n    name = 'typo'\n    needs_entropy = 'old'\n\n"
    "    def advantages(self, rollouts):\n        return rollouts.entropies\n",
    "run/run.json": '{"engine": "trl"}',
    "run/model/config.json": "{}",
}
CONFIG = {"model_name_or_path": "tiny", "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1,
          "max_completion_length": 8, "save_strategy": "no", "problems": 64, **trl_tiny.ON_A_CPU}  # fmt: skip
GRADED = ["--dataset_name", "json_rows", "--reward_funcs", "graded.py:score"]
GAME = ["--task", "countdown"]

WALLS = {
    # before: exit 0, with a gradient of exactly 0 at every step
    "gtpo, graded": (["train", *GRADED, "--algorithm", "gtpo"], 1, "`algorithm: gtpo(pool=outcome)`"),
    "dapo, graded": (["train", *GRADED, "--algorithm", "dapo"], 1, "`algorithm: dapo(dynamic_sampling=False)`"),
    "it is meant": (["train", *GRADED, "--algorithm", "gtpo(threshold=0.5)"], 0, "Done"),
    "default, graded": (["train", *GRADED], 0, "dew on"),
    # before: algorithm='gtpo(pool=outcome)' is not known
    "pasted": (["train", *GRADED, "--algorithm", "gtpo(pool=outcome)"], 0, "Done"),
    "pasted twice": (
        ["train", *GAME, "--algorithm", "gtpo(pool=joint)", "--algorithm_kwargs", "{pool: outcome}"], 1,
        "give pool different values.\n  → Give it once.",
    ),
    # before: model_name_or_path: 'tiny' cannot be loaded
    "reward model": (
        ["train", *GAME, "--reward_model_name_or_path", "me/judge"], 1,
        "reward_model_name_or_path: 'me/judge' cannot be loaded",
    ),
    # before: ValueError of TRL
    "weights": (["train", *GAME, "--reward_weights", "1", "2"], 1, "[1.0, 2.0]: 2 for 1 rewards, countdown."),
    # before: TypeError at a line of typer; AttributeError without a suggestion
    "signature": (["train", *GAME, "--algorithm", "extra.py:Rule"], 1, "Write def advantages(self, rollouts)."),
    "attribute": (["train", *GAME, "--algorithm", "typo.py:Rule"], 1, "at typo.py, line 8.\n→ Did you mean 'entropy'?"),
    # before: evaluated on countdown; no column 'answer'
    "eval of a run": (["eval", "run"], 1, "run: no task to evaluate it on.\n→ Add --task"),
    "eval, own reward": (
        ["eval", "tiny", "--task", "words.jsonl", "--reward", "graded.py:score", "-n", "2", "-k", "2"], 0, "mean@2",
    ),
    # before: no word about it
    "LoRA": (["preflight", *GAME, "--use_peft", "true", "--answers", "0"], None, "learning_rate=1e-06 with LoRA"),
}  # fmt: skip


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "json_rows").mkdir()
    (tmp_path / "json_rows" / "train.jsonl").write_text(FILES["words.jsonl"])
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in CONFIG.items()))
    return tmp_path


@pytest.mark.parametrize("wall", WALLS)
def test_walls(wall, dew, desk):
    (command, *flags), code, said = WALLS[wall]
    given = flags if command == "eval" else ["run.yaml", "--output_dir", "runs/new", *flags]
    found, out, err = dew(command, *given)
    assert (code is None or found == code) and said in out + err


def test_a_pasted_remedy_in_a_file_is_replaced_as_a_whole_by_a_flag(dew, desk):
    (desk / "run.yaml").write_text(f"{(desk / 'run.yaml').read_text()}algorithm: gtpo(pool=outcome, alpha2=0.2)\n")
    assert "gtpo(pool=outcome,alpha2=0.2)" in dew("train", "run.yaml", *GAME, "--dry-run")[1]
    code, out, _ = dew("train", "run.yaml", *GAME, "--algorithm", "grpo", "--dry-run")
    assert code == 0 and "gtpo" not in out.replace("gtpo_", "")
    assert read_yaml("run.yaml")["algorithm"] == "gtpo(pool=outcome, alpha2=0.2)"


SCRIPT = """
from datasets import Dataset
from dew.engines.trl import DewConfig, DewTrainer
from graded import score
data = Dataset.from_list([{"prompt": f"Reach {i} with 1, 2"} for i in range(32)])
small = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4}
args = DewConfig("py", logging_steps=1, report_to="none", use_cpu=True, **small)
DewTrainer("tiny", score, args, data).train()
"""


def test_a_script_says_how_it_trains_and_where_the_report_is(desk):
    def run(_):  # as in a process of its own: nothing has set up logging
        for name in ("", "dew"):
            logging.getLogger(name).handlers.clear()
        sys.path.insert(0, "")
        with Path("said.txt").open("w") as file, redirect_stdout(file), redirect_stderr(file):
            exec(SCRIPT, {})

    assert trl_tiny.in_children(run) == [0]
    lines = [line for line in Path("said.txt").read_text().replace("\r", "\n").splitlines() if line.strip()]
    own = [line.strip() for line in lines if "dew: " in line]
    assert own[0].startswith("dew: training with dew: 2 prompts x 4 answers") and "sampling with generate (" in own[0]
    assert own[-1].startswith("dew: done at step 2.") and own[-1].endswith("See: dew report py")
    assert all(line.startswith("dew: ") for line in own)
    printed = [line for line in lines if "'grad_norm'" in line]
    assert len(printed) == 2 and all(4 < line.count("': ") <= 15 for line in printed)
    assert len(RunFolder("py").metrics()[0]) > 30


@pytest.mark.slow
def test_a_learning_rate_that_destroys_the_policy_is_an_alarm(dew, desk):
    flags = ["--learning_rate", "6e-4", "--max_steps", "24", "--scores", "false", "--output_dir", "runs/new"]
    assert dew("train", "tiny/countdown", *flags)[0] == 0
    (alarm,) = (alarm for alarm in RunFolder("runs/new").alarms() if alarm["alarm"] == "reward_falls")
    assert alarm["value"] < alarm["threshold"] / 2 and "Lower learning_rate" in alarm["remedy"]
