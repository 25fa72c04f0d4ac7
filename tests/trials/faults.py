"""Mistakes, hostile files and crashes: each ends in what the user wanted or in one clear sentence.

    python faults.py [FOLDER]     works in FOLDER (default: a temporary one); exit code 0 if every step did

Like switch_from_trl.py it needs only an installed `dew`, a CPU and no network.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from switch_from_trl import dew, enter_folder, run, write

SMALL = {"model_name_or_path": "tiny", "task": "countdown", "problems": 32, "max_steps": 1, "num_generations": 4,
         "per_device_train_batch_size": 8, "max_completion_length": 8, "use_cpu": True, "bf16": False,
         "report_to": "none"}  # fmt: skip
REWARDS = """
import os

def breaks(completions, **_):
    breaks.calls = getattr(breaks, "calls", 0) + 1
    if breaks.calls == 4 and not os.path.exists("paper"):
        raise ValueError("the judge is out of paper")
    return [float(len(text) % 2) for text in completions]
"""
VERIFIER = r"""
from dew.rewards.math import math_verdicts
same = [(r"\boxed{16\text{ m}^2}", "16"), (r"\boxed{2\pi\text{ m}}", r"2\pi"), ("10 cm^2", "10"),
        (r"\boxed{i(2-i)}", "1+2i"), (r"\boxed{10^-2}", "0.01"), ("\\boxed{1\u2003000}", "1000"), (r"\boxed{∛8}", "2")]
other = [("not A", "A"), ("neither A nor B", "A"), ("A, B, C, D", "A"), (r"\boxed{4}", "6-2t"), (r"\boxed{16}", "16t"),
         (r"\boxed{0.0}", "10^{-7}"), (r"\boxed{1.0}", "1-2^{-40}"), (r"\boxed{10_{2}}", "10_{3}")]
wanted = [True] * len(same) + [False] * len(other)
found = [verdict.correct for verdict in math_verdicts(*map(list, zip(*same, *other)), timeout=60)]
print("wrong:", [case for case, a, b in zip(same + other, found, wanted) if a != b])
"""


def config(name: str, **changes: object) -> str:
    """Write a small config as `name`; its run goes into the folder of the same name."""
    write(f"{name}.yaml", json.dumps({**SMALL, "output_dir": name, **changes}))
    return f"{name}.yaml"


def refused(says: str, *flags: str, command: str = "train", **changes: object) -> None:
    """A config with these changes ends in one error."""
    dew(command, config("refused", **changes), *flags, fails=True, says=says)


def settings_and_messages() -> None:
    dew("train", "tiny/countdown", "--max_steps", "1", "--save_strategy", "no", "--output_dir", "unsaved", says="Done")
    refused("trains on one of them", dataset_name="owner/data")
    refused("alpha2='big' is not a number", algorithm="gtpo", algorithm_kwargs={"alpha2": "big"})
    refused("Write dtype", torch_dtype="bfloat16")
    refused("no longer truncates prompts", max_prompt_length=512)
    refused("learning_rate=inf: not a finite number", learning_rate=float("inf"))
    refused("refused.yaml: learning_rate: invalid float value: 'fast'", learning_rate="fast")
    refused("command line: learning_rate: invalid float value: 'fast'", "--learning_rate", "fast")
    write("twice.yaml", "task: countdown\nlearning_rate: 1\n# a comment\nlearning_rate: 2\n")
    dew("train", "twice.yaml", fails=True, says="line 4")
    for level, algorithm in (("sequence", "gspo"), ("token", "dr_grpo")):
        loss = {"loss_type": "dr_grpo", "scale_rewards": "none"} if level == "token" else {"loss_type": "grpo"}
        made = config(algorithm, importance_sampling_level=level, **loss)
        dew("train", made, "--dry-run", says=f"training with the algorithm {algorithm}")
        dew("train", made, "--dry-run", "--algorithm", "gtpo", fails=True, says="gtpo")
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "dew.cli", "train")
    said = run(*launch, config("both", max_steps=2), says="Done: both")
    assert said.count("step 2/2") == said.count("Done:") == 1, said
    dew("report", "both", "unsaved")
    for name in ("dapo", "dew"):
        settings = {"algorithm": name, "output_dir": f"several/{name}", "records_every": 1}
        dew("train", config(name, max_completion_length=32, **settings))
    dew("explain", "several", fails=True, says="several/dapo")
    dew("explain", "several/dew", says="step 1")


def files() -> None:
    bomb = "a: &a {k: 1}\n" + "\n".join(
        f"b{i}: &b{i} {{<<: [{', '.join(['*' + (f'b{i - 1}' if i else 'a')] * 20)}]}}" for i in range(7)
    )
    write("bomb.yaml", bomb)
    write("bombed/config.yaml", bomb)
    dew("train", "bomb.yaml", fails=True, says="aliases expand to too many values")
    dew("resume", "bombed", fails=True, says="aliases expand to too many values")
    os.mkfifo("pipe.jsonl")
    os.mkfifo("pipe.yaml")
    Path("zero.jsonl").symlink_to("/dev/zero")
    dew("train", "pipe.yaml", fails=True, says="not a regular file")
    for path in ("pipe.jsonl", "zero.jsonl"):
        refused("not a regular file", task=path)
        refused("not a regular file", guide=path, algorithm="grpo")
    rows = [json.dumps({"prompt": f"{i}\u2028+\u0085{i}=", "answer": "1"}, ensure_ascii=False) for i in range(99)]
    text = "\n".join([*rows[:4], "not json", rows[0], *rows[4:]])
    write("rows.jsonl", "\ufeff" + text)
    dew("train", config("from-rows", task="rows.jsonl", verifier="math"), says="Done: from-rows")
    write("clash.jsonl", "\n".join(json.dumps({"prompt": f"{i}=", "answer": "1", "completions": 1}) for i in range(40)))
    refused("Rename it", task="clash.jsonl", verifier="math")
    write("golds.jsonl", "\n".join(json.dumps({"prompt": f"{i}=", "answer": "\\frac{"}) for i in range(40)))
    refused("gold answers can be matched", task="golds.jsonl", verifier="math")


def sizes() -> None:
    said = "8 problems, but a generation of"
    few = ("tiny/countdown", "--problems", "8", "--max_steps", "2")
    dew("train", *few, fails=True, says=said)
    dew("preflight", *few, "--answers", "0", fails=True, says=said)
    refused("from 1 to 10,000,000", problems=99_999_999_999)
    refused("hidden size 128", model_init_kwargs={"hidden_size": 10_000_000})
    dew("eval", "tiny", "-n", "-5", "-k", "0", fails=True, says="at least one")


def crashes() -> None:
    """The folder lock, checkpoints after a clock correction, and a reward function that raises."""
    made = config("cut", max_steps=20, save_steps=5, save_total_limit=1, problems=400)
    command = [sys.executable, "-m", "dew.cli", "train", made]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not Path("cut/checkpoint-5/dew_manifest.json").exists() and first.poll() is None:
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    dew("train", made, "--overwrite", fails=True, says="in use by another command")
    dew("resume", "cut", fails=True, says="in use by another command")
    first.kill()
    first.wait()
    for path in Path("cut").glob("checkpoint-*"):  # the clock was a day ahead
        os.utime(path, (time.time() + 86400, time.time() + 86400))
    dew("resume", "cut", says="Done: cut")
    assert [path.name for path in Path("cut").glob("checkpoint-*")] == ["checkpoint-20"]

    write("rewards.py", REWARDS)
    made = config("breaks", reward_funcs=["rewards.py:breaks"], max_steps=8, save_steps=100)
    said = dew("train", made, fails=True, says="the judge is out of paper")
    assert said.count("the judge is out of paper") == 1 and list(Path("breaks").glob("checkpoint-*")), said
    write("paper", "")
    said = dew("resume", "breaks", says="Done: breaks")
    assert "missing keys" not in said.lower() and "earlier run" not in said, said


def approval() -> None:
    home = Path(tempfile.mkdtemp())
    os.environ |= {"HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    refused("is neither below", "--untrusted", output_dir="~/x")
    assert not (home / "x").exists()
    made = config("approved", reward_funcs=["rewards.py:breaks"], max_steps=8)
    dew("train", made, "--untrusted", fails=True, says="reward_funcs")
    Path("paper").unlink()
    dew("train", made, "--untrusted", "--reward_funcs", "rewards.py:breaks", fails=True, says="out of paper")
    write("paper", "")
    dew("resume", "approved", "--untrusted", says="Done: approved")


def main() -> None:
    enter_folder()
    settings_and_messages()
    files()
    sizes()
    crashes()
    approval()
    run(sys.executable, "-c", VERIFIER, says="wrong: []")
    print("Everything works.")


if __name__ == "__main__":
    main()
