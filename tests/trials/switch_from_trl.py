"""Switch from TRL, as a user would: with an installed `dew`, own files and the command line, outside the repository.

    python switch_from_trl.py [FOLDER]     works in FOLDER (default: a temporary one); exit code 0 if every step did

Uses the tiny model that comes with dew, a CPU and no network. It imports nothing from dew's repository.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REWARDS = """
def right(completions, answer, **_):
    return [float(text.strip().endswith(gold)) for text, gold in zip(completions, answer)]

def short(completions, **_):
    return [1 / (1 + len(text)) for text in completions]
"""
RULES = """
from dataclasses import dataclass
from dew.algorithms import GRPO

@dataclass(frozen=True, kw_only=True)
class Halved(GRPO):
    name = "halved"

    def advantages(self, rollouts):
        return super().advantages(rollouts) / 2
"""
TRL_FILE = """
# a file for `trl grpo --config`
env:
  SWITCH_TRIAL: 1
model_name_or_path: tiny
datasets:
  - path: json
    data_files: data/problems.jsonl
test_split_size: 0.25
reward_funcs: [rewards.right, rewards.short]
output_dir: from-trl
loss_type: dapo
scale_rewards: group
beta: 0.04
epsilon: 0.2
epsilon_high: 0.28
delta: 4.0
per_device_train_batch_size: 8
num_generations: 4
num_generations_eval: 4
max_completion_length: 16
max_steps: 2
eval_strategy: steps
eval_steps: 2
bf16: true
use_cpu: true
report_to: none
"""
SCRIPT = """
import sys
from datasets import load_dataset
from peft import LoraConfig
from transformers import TrainerCallback
from dew.engines.trl import DewConfig, DewTrainer
from dew.preflight import passed, preflight
from dew.tasks import model_folder
from rewards import right, short

class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3 and "--dies" in sys.argv and not args.output_dir + "-died" in DIED:
            open(args.output_dir + "-died", "w").close()
            import os; os._exit(9)

import glob
DIED = glob.glob("*-died")
data = load_dataset("json", data_files="data/problems.jsonl", split="train")
args = DewConfig(
    "python-run", algorithm="grpo", outcome_reward="right", per_device_train_batch_size=8, num_generations=4,
    max_completion_length=16, max_steps=4, save_steps=2, records_every=1, use_cpu=True, bf16=False, report_to="none",
    overwrite_output_dir="--overwrite" in sys.argv,
)
lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = DewTrainer(model_folder("tiny"), [right, short], args, data, peft_config=lora, callbacks=[Dies()])
print("preflight failed:", [c.name for c in preflight(trainer, answers=8, say=lambda _: None) if c.status == "failed"])
trainer.train()
print("trained to step", trainer.state.global_step)
"""


def run(*words: str, fails: bool = False, says: str = "") -> str:
    """Run a command; check whether it fails, and what it says. A command of dew never shows a traceback."""
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, check=False)
    output = done.stdout + done.stderr
    shown = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    problem = (
        "exit code" if fails != bool(done.returncode)
        else f"{says!r} is missing" if says not in " ".join(output.split())
        else "a traceback" if fails and "Traceback" in output and "dew.cli" in words
        else ""
    )  # fmt: skip
    print(f"{'FAILED' if problem else 'ok'}: {shown}", flush=True)
    if problem:
        sys.exit(f"{problem} in:\n{output[-4000:]}")
    return output


def dew(*words: str, **expected: object) -> str:
    return run(sys.executable, "-m", "dew.cli", *words, **expected)  # type: ignore[arg-type]


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)


def enter_folder() -> None:
    os.chdir(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", HF_DATASETS_CACHE=str(Path("cache").resolve()))


def main() -> None:
    enter_folder()
    write("rewards.py", REWARDS)
    write("rules.py", RULES)
    write("trl.yaml", TRL_FILE)
    write("script.py", SCRIPT)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(48)]
    write("data/problems.jsonl", "\n".join(map(json.dumps, rows)))

    # TRL's file as it is, and its contradictions
    dew("train", "trl.yaml", says="training with the algorithm trl")
    lines = [json.loads(line) for line in Path("from-trl/metrics.jsonl").read_text().splitlines()]
    assert any("eval/pass@4" in line for line in lines)
    dew("train", "trl.yaml", "--algorithm", "gtpo", fails=True, says="delta=4.0 is not supported by gtpo")
    dew("train", "trl.yaml", fails=True, says="from-trl is not empty")
    dew("train", "trl.yaml", "--algorithm", "grpo", "--loss_type", "grpo", "--delta", "null", "--dry-run",
        fails=True, says="outcome_reward='right'")  # fmt: skip
    dew("train", "trl.yaml", "--loss_type", "dr_grpo", "--scale_rewards", "none", "--delta", "null", "--dry-run",
        "--outcome_reward", "right", "--num_iterations", "2", says="2 optimizer steps per generation")  # fmt: skip
    dew("train", "trl.yaml", "--algorithm", "gtpo", "--delta", "null", "--algorithm_kwargs", '{"alpha2": "big"}',
        fails=True, says="alpha2='big' is not a number")  # fmt: skip
    dew("train", "trl.yaml", "--untrusted", fails=True, says="env: sets environment variables (SWITCH_TRIAL)")

    # an algorithm of one's own in a file, scored before and after training in bf16
    settings = "model_name_or_path: tiny\ntask: countdown\nproblems: 32\nscores: {problems: 2, k: 2}\noutput_dir: own\n"
    settings += "per_device_train_batch_size: 8\nnum_generations: 4\nmax_completion_length: 16\nmax_steps: 1\n"
    write("own.yaml", settings + "algorithm: rules:Halved\nbf16: true\nuse_cpu: true\nreport_to: none\n")
    dew("train", "own.yaml", says="after training: pass@1")
    dew(
        "train",
        "own.yaml",
        "--output_dir",
        "x",
        "--algorithm",
        "rules:Missing",
        fails=True,
        says="has no class 'Missing'",
    )

    # a Python script with LoRA and two rewards: killed, resumed, refused, evaluated, reported, exported
    run(sys.executable, "script.py", "--dies", fails=True, says="preflight failed:")
    dew("eval", "python-run", "--task", "data", "--reward", "rewards.py:right", "-n", "2", "-k", "2", says="pass@2")
    dew("resume", "python-run", says="trained to step 4")
    dew("resume", "python-run", says="python-run is finished.")
    run(sys.executable, "script.py", fails=True, says="holds an earlier run")
    for folder in ("data", "./data"):
        dew("eval", "python-run", "--task", folder, "--reward", "rewards.py:short", "-n", "2", "-k", "2", says="reward")
    dew("eval", "python-run", "--task", "data", fails=True, says="--reward file.py:function")
    dew("eval", "python-run", "-n", "2", "-k", "2", says="2 held-out problems")
    dew("report", "python-run")
    dew("explain", "python-run", says="step")
    dew("export", "python-run", "exported", says="loads and generates")
    dew("eval", "exported", "-n", "2", "-k", "2", says="2 held-out problems")
    run(sys.executable, "script.py", "--overwrite", says="trained to step 4")
    print("Everything works.")


if __name__ == "__main__":
    main()
