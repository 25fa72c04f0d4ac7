"""Speed of `dew lab`: stacks of 1 to 512 replicas, and the verdicts.

    python benchmarks/lab.py [--replicas 1,8,32,132,256,512] [--width 192] [--depth 4] [--whole]

Trains the warm start of countdown-4 if it is not in the cache. For each number of replicas: seconds per generation of
512 answers (median of three, after one to warm up), the parts of it, and peak memory. Replicas are 12 arms, so all but
the smallest stacks mix rules. `--whole` also times a whole study: 132 runs of 120 generations with 3 evaluations of
256 x 16 answers, without the warm start.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from dew.engines.lab import TASKS, TinySettings, study
from dew.engines.lab.arms import parse_arms
from dew.engines.lab.stack import Replica, Stack
from dew.engines.lab.tasks import generator
from dew.engines.lab.tiny import TinyPolicies, numerics
from dew.engines.lab.warm_start import warm_start
from dew.files import cache_folder

ARMS = ["dapo", "gtpo", "gtpo(alpha2=0.5)", "gtpo(alpha2=1.0)", "gtpo(pool=joint)", "gtpo(compare=row)", "grpo", "gspo",
        "dr_grpo", "grpo_s", "forking_tokens", "entropy_advantage"]  # fmt: skip
ANSWERS = 65_536


def seconds(run: Callable[[], object], device: str, repeats: int = 3) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def stack_row(replicas: int, settings: TinySettings, start: dict[str, torch.Tensor], device: str) -> str:
    arms = parse_arms(ARMS, [1e-4], controls=False)
    each = -(-replicas // len(arms))
    chosen = sorted((seed, i) for seed in range(each) for i in range(len(arms)))[:replicas]
    runs = sorted((Replica(arms[i], seed) for seed, i in chosen), key=lambda x: x.arm.label)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rates = torch.tensor([x.arm.learning_rate for x in runs], device=device)
    stack = Stack(TASKS["countdown-4"], TinyPolicies(start, rates), runs, settings, device)
    whole = seconds(lambda: stack.generation(0), device)
    problems = stack.task.problems(settings.prompts, generator(0), device=device)[[0] * replicas]
    uniforms = torch.rand(replicas, settings.answers, stack.task.tokens, device=device)
    answers = stack.policies.sample(problems.prompt, uniforms)
    sampling = seconds(lambda: stack.policies.sample(problems.prompt, uniforms), device)
    verdicts = seconds(lambda: stack.task.rewards(answers, problems.facts), device)
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device == "cuda" else ""
    numbers = f"{whole:.3f} | {sampling:.3f} | {verdicts:.3f} | {whole / replicas:.4f}"
    return f"| {replicas} | {numbers} | {replicas * settings.answers / whole:,.0f} | {memory} |"


def verdict_row(name: str, device: str) -> str:
    """Demonstrations and cut-off copies of them, as answers."""
    task = TASKS[name]
    problems = task.problems(4096, generator(0), device=device)[0]
    copies = ANSWERS // 4096
    answers, facts = problems.demonstration.repeat(copies, 1), problems.facts.repeat(copies, 1)
    taken = seconds(lambda: task.verdict(answers, facts), device)
    return f"| {name} | {task.tokens} | {1000 * taken:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,8,32,132,256,512")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--write", type=Path, help="also write the table, as Markdown, to this file")
    options = parser.parse_args()
    device, settings = options.device, TinySettings(width=options.width, depth=options.depth)
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    lines = [
        "# Speed of dew lab",
        "",
        f"`python {' '.join(sys.argv)}`, {date.today()}, {machine}, torch {torch.__version__}, "
        f"Python {platform.python_version()}. countdown-4, width {options.width}, {options.depth} layers, 512 answers "
        "and 4 optimizer steps a generation.",
        "",
        "| replicas | s per generation | sampling | verdicts | s per replica | answers/s | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    with numerics():
        began = time.perf_counter()
        start, facts = warm_start(TASKS["countdown-4"], settings, device, cache_folder("lab"), print)
        print(f"warm start: {time.perf_counter() - began:.0f} s", facts, flush=True)
        for replicas in map(int, options.replicas.split(",")):
            try:
                lines.append(stack_row(replicas, settings, start, device))
            except torch.OutOfMemoryError:
                lines.append(f"| {replicas} | does not fit | | | | | |")
            print(lines[-1], flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()
        lines += ["", f"Verdicts on {ANSWERS:,} answers:", "", "| task | tokens | ms |", "|---|---|---|"]
        lines += [verdict_row(name, device) for name in TASKS]
    if options.whole:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            study(ARMS, output=Path(folder) / "study", settings=settings, seeds=11, device=device)
            lines += ["", f"A whole study, 132 runs: {time.perf_counter() - began:.0f} s."]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text)


if __name__ == "__main__":
    main()
