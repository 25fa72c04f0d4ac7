"""Compare DPO with entropy-weighted DPO, on preference pairs from a model's own verified answers.

    python examples/weighted_dpo.py OUT                   # tiny6 on countdown, one CPU core: docs/results.md
    python examples/weighted_dpo.py OUT --setup gsm8k --model MODEL --seeds 2     # one GPU

For each seed: sample answers to training problems, pair a correct and a wrong answer to the same problem, train
once with every alpha (0 is plain DPO) on the same pairs in the same order, and evaluate on held-out problems. Prints a
line per run and a table of pass@1 and pass@k with paired differences from plain DPO. OUT/results.json is written after
every run; re-run the same command to resume. `--shuffled` adds a control: the same weights, but on random tokens of
the answer.
"""

import argparse
import json
import random
import shutil
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from dew.cli.evaluate import load_model
from dew.compare import evaluate, preference_pairs
from dew.compare.statistics import paired_interval, pass_at_k
from dew.credit import preference_weights
from dew.engines.trl import DewDPOConfig, DewDPOTrainer, dpo
from dew.engines.trl.launch import quiet
from dew.files import write_atomically
from dew.rewards import verifier
from dew.tasks import model_folder, task

SETUPS = {
    "tiny": {
        "model": "tiny6",
        "task": ("countdown", {"numbers": 6, "largest": 9}),
        "pairs": {"problems": 512, "k": 8, "per_problem": 2, "max_new_tokens": 48},
        "evaluation": {"problems": 256, "k": 16, "max_new_tokens": 48},
        "training": {"learning_rate": 3e-5, "beta": 1.0, "num_train_epochs": 3, "per_device_train_batch_size": 32,
                     "lr_scheduler_type": "constant", "bf16": False, "use_cpu": True, "gradient_checkpointing": False},
    },
    "gsm8k": {
        "model": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "task": ("gsm8k", {"template": "qwen-boxed"}),
        "pairs": {"problems": 1500, "k": 8, "per_problem": 2, "max_new_tokens": 512},
        "evaluation": {"problems": 1319, "k": 8, "max_new_tokens": 512},
        "training": {"learning_rate": 2e-6, "beta": 0.1, "num_train_epochs": 1, "per_device_train_batch_size": 8,
                     "gradient_accumulation_steps": 4, "warmup_steps": 5, "lr_scheduler_type": "constant_with_warmup"},
    },
}  # fmt: skip


def make_pairs(setup, seed, path):
    """The pairs of a seed, from the model before training; kept in a file."""
    if not path.exists():
        name, settings = setup["task"]
        chosen = dict(setup["pairs"])
        problems, per_problem = chosen.pop("problems"), chosen.pop("per_problem")
        source = task(name, **settings)
        rows = random.Random(seed).sample(source.rows(8 * problems if name == "countdown" else 7000), problems)
        scores = evaluate(*load_model(setup["model"]), rows, verifier(source.name), seed=seed, **chosen)
        pairs = preference_pairs(scores, per_problem=per_problem, seed=seed)
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in pairs).encode())
    return Dataset.from_list([json.loads(line) for line in path.read_text().splitlines()])


def shuffled_weights(chosen, entropy, mask, **settings):
    """The weights of every answer, moved to random tokens of it."""
    weights = preference_weights(chosen, entropy, mask, **settings)
    for row, live in zip(weights, mask, strict=True):
        row[live] = row[live][torch.randperm(int(live.sum()), device=row.device)]
    return weights


def train(setup, alpha, shuffled, seed, pairs, folder):
    """A trainer after its run, on the GPU if there is one."""
    dpo.preference_weights = shuffled_weights if shuffled else preference_weights
    model, init = model_folder(setup["model"]), {"dtype": "float32", "use_safetensors": True}
    plain = {"report_to": "none", "save_strategy": "no", "logging_steps": 10, "disable_tqdm": True, "records_every": 20}
    args = DewDPOConfig(str(folder), **plain, **setup["training"], alpha=alpha, seed=seed, model_init_kwargs=init)
    trainer = DewDPOTrainer(model, args=args, train_dataset=pairs)
    trainer.train()
    return trainer


def count_correct(setup, model, tokenizer):
    """The number of correct answers among the k to each held-out problem."""
    name, settings = setup["task"]
    chosen = dict(setup["evaluation"])
    source, problems = task(name, **settings), chosen.pop("problems")
    scores = evaluate(model.eval(), tokenizer, source, verifier(source.name), n_problems=problems, **chosen)
    return [sum(v.status == "correct" for v in p.verdicts) for p in scores.problems], scores.truncated_share


def table(results, k):
    """Markdown: pass@1 and pass@k of every arm, and paired differences from alpha 0 over seeds and problems."""
    runs, arms = results["runs"], sorted({arm_of(run) for run in results["runs"]})
    lines = [
        f"| alpha | seeds | pass@1 | pass@{k} | pass@1 − DPO | pass@{k} − DPO |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    before = [score(results["before"], k, j) for j in (1, k)]
    lines.append("| before | | " + " | ".join(f"{sum(x) / len(x):.3f}" for x in before) + " | | |")
    for alpha, shuffled in arms:
        own = {run["seed"]: run["correct"] for run in runs if arm_of(run) == (alpha, shuffled)}
        plain = {run["seed"]: run["correct"] for run in runs if run["alpha"] == 0 and run["seed"] in own}
        means = [sum(sum(score(c, k, j)) / len(c) for c in own.values()) / len(own) for j in (1, k)]
        cells = [f"{alpha:g}{' shuffled' * shuffled}", str(len(own)), *(f"{mean:.3f}" for mean in means)]
        for j in (1, k) if alpha and plain else ():
            D = [[b - a for a, b in zip(score(plain[s], k, j), score(own[s], k, j), strict=True)] for s in plain]
            found = paired_interval(torch.tensor(D).numpy())
            cells.append(f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]")
        lines.append("| " + " | ".join(cells + [""] * (6 - len(cells))) + " |")
    return "\n".join(lines)


def arm_of(run):
    return run["alpha"], run.get("shuffled", False)


def score(correct, n, k):
    return [pass_at_k(n, c, k) for c in correct]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--setup", choices=SETUPS, default="tiny")
    parser.add_argument("--model", help="A folder or a name on the hub, instead of the setup's.")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.0, 0.25])
    parser.add_argument("--shuffled", action="store_true", help="Add the control with shuffled weights.")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--training", type=json.loads, default={}, help="Other settings of the trainer, as JSON.")
    given = parser.parse_args()
    quiet()
    setup = SETUPS[given.setup]
    setup = {**setup, "model": given.model or setup["model"], "training": {**setup["training"], **given.training}}
    given.out.mkdir(parents=True, exist_ok=True)
    file, k = given.out / "results.json", setup["evaluation"]["k"]
    results = json.loads(file.read_text()) if file.exists() else {"setup": setup, "runs": []}
    if "before" not in results:
        results["before"], _ = count_correct(setup, *load_model(setup["model"]))
    done = {(run["seed"], *arm_of(run)) for run in results["runs"]}
    arms = [(alpha, False) for alpha in given.alphas]
    arms += [(alpha, True) for alpha in given.alphas if given.shuffled and alpha]
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for alpha, shuffled in arms:
            if (seed, alpha, shuffled) in done:
                continue
            name = f"alpha {alpha:g}{' shuffled' * shuffled}"
            pairs = make_pairs(setup, seed, given.out / f"pairs-{seed}.jsonl")
            folder = given.out / f"seed {seed} {name}".replace(" ", "-")
            shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
            start = time.perf_counter()
            trainer = train(setup, alpha, shuffled, seed, pairs, folder)
            seconds = time.perf_counter() - start
            tokenizer = AutoTokenizer.from_pretrained(model_folder(setup["model"]))
            correct, truncated = count_correct(setup, trainer.sampling_model(), tokenizer)
            facts = {"pairs": len(pairs), "steps": trainer.state.global_step, "train_seconds": round(seconds, 1)}
            facts |= {"truncated": round(truncated, 4), "correct": correct}
            results["runs"].append({"seed": seed, "alpha": alpha, "shuffled": shuffled, **facts})
            write_atomically(file, json.dumps(results).encode())
            print(f"seed {seed} {name}: pass@1 {sum(correct) / len(correct) / k:.3f}, {seconds:.0f} s", flush=True)
    print(table(results, k))


if __name__ == "__main__":
    main()
