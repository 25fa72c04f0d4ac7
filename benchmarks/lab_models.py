"""Speed of `dew lab --model`: LoRA runs of one language model, 1 to 64 at once.

    python benchmarks/lab_models.py MODEL [--replicas 1,4,16,32,64] [--task gsm8k] [--whole] [--write FILE]

For each number of replicas: seconds per generation of 16 x 8 answers of at most 512 tokens and 4 optimizer steps
(median of three, after one to warm up, which also captures the sampling steps), its parts, and peak memory. `--whole`
also times a study of 30 runs with 20 generations and one evaluation of 192 x 4 answers; alone with `--replicas ""`.
"""

import argparse
import gc
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from dew.engines.lab import LoraSettings, study
from dew.engines.lab.arms import parse_arms
from dew.engines.lab.lora import Base, LoraPolicies, load_base
from dew.engines.lab.stack import Replica, Stack
from dew.engines.lab.text import TextTask
from dew.engines.lab.tiny import numerics

ARMS = ["dapo", "dew", "dew(placebo=True)"]
RATE = 4e-5


def row(replicas: int, base: Base, task: TextTask, settings: LoraSettings, device: str) -> str:
    arms = parse_arms(ARMS, [RATE], controls=False)
    runs = sorted((Replica(arms[i % 3], i // 3) for i in range(replicas)), key=lambda x: x.arm.label)
    rates = torch.full((replicas,), RATE, device=device)
    policies = LoraPolicies(base, task.prompts, [x.seed for x in runs], rates, settings, task.ended)
    stack: Any = Stack(task, policies, runs, settings, device)
    times: dict[str, list[float]] = defaultdict(list)
    for owner, name in ((policies, "sample"), (task, "rewards"), (stack, "_update"), (stack, "generation")):
        setattr(owner, name, timed(getattr(owner, name), times[name], device))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number in range(4):
        stack.generation(number)
    del task.rewards  # the task's own again
    parts = [statistics.median(times[name][1:]) for name in ("generation", "sample", "rewards", "_update")]
    answers = statistics.mean(float(metrics["length/mean"].mean()) for metrics in stack.history) * settings.answers
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device == "cuda" else ""
    numbers = " | ".join(f"{x:.2f}" for x in parts)
    return f"| {replicas} | {numbers} | {parts[0] / replicas:.2f} | {replicas * answers / parts[1]:,.0f} | {memory} |"


def whole(model: str, task: str, settings: LoraSettings, device: str) -> str:
    """A study from its command to its run folders: the generations and evaluations of its runs, and everything."""
    times: dict[str, list[float]] = {"generation": [], "evaluate": []}
    own = {name: getattr(Stack, name) for name in times}
    for name, into in times.items():
        setattr(Stack, name, timed(own[name], into, device))
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        how: Any = {"seeds": 10, "learning_rates": [RATE], "settings": settings, "device": device}
        study(ARMS, output=Path(folder) / "study", model=model, tasks=[task], **how)
    took = time.perf_counter() - began
    for name, function in own.items():
        setattr(Stack, name, function)
    generations, evaluations = (sum(x) for x in times.values())
    each = times["generation"]
    text = f"A whole study of 30 runs: {len(each)} generations {generations:.0f} s (the first {each[0]:.1f} s, median "
    text += (
        f"{statistics.median(each):.1f} s), evaluation {evaluations:.0f} s, together {generations + evaluations:.0f} s;"
    )
    memory = f" peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB;" if device == "cuda" else ""
    return f"{text}{memory} with loading and writing {took:.0f} s."


def timed(function: Any, into: list[float], device: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        wait(device)
        began = time.perf_counter()
        found = function(*args, **kwargs)
        wait(device)
        into.append(time.perf_counter() - began)
        return found

    return call


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--replicas", default="1,4,16,32,64")
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--write", type=Path, help="also write the table, as Markdown, to this file")
    options = parser.parse_args()
    device, settings = options.device, LoraSettings(generations=20, eval_problems=192, evaluations=1)
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    lines = [
        "# Speed of dew lab on language models",
        "",
        f"`python {' '.join(sys.argv)}`, {date.today()}, {machine}, {versions}.",
        "",
        "| replicas | s per generation | sampling | verdicts | update | s per replica | sampled tokens/s | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = load_base(options.model, device)
    task = TextTask(options.task, base, settings.max_new_tokens, settings.eval_problems)
    with numerics():
        for replicas in map(int, filter(None, options.replicas.split(","))):
            try:
                lines.append(row(replicas, base, task, settings, device))
            except torch.OutOfMemoryError:
                lines.append(f"| {replicas} | does not fit | | | | | | |")
            print(lines[-1], flush=True)
            gc.collect()  # policies and their wrappers refer to each other
            torch.cuda.empty_cache()
    if options.whole:
        del base, task
        lines += ["", whole(options.model, options.task, settings, device)]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text)


if __name__ == "__main__":
    main()
