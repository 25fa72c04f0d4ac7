"""Cost of reward shaping compared with computing the entropy that it needs.

    python benchmarks/credit.py [--device cuda] [--write benchmarks/results/credit-cpu.md]
    python benchmarks/credit.py --device cuda --answers 512 --group 64 --tokens 16384

Times `gtpo_rewards` + `gtpo_advantages` (and GRPO-S), and `Algorithm.advantages` (and `penalties`) of other papers'
rules, by default on 512 answers of 4,096 tokens and on ten times as many, and in the same run the entropy of these
tokens from float32 logits over a vocabulary of 32,000 (measured on a sample of the tokens and scaled), and prints the
ratio. Memory is the peak growth of the resident set, or the allocator's peak on a GPU. On a CPU the script restarts
itself with glibc configured to keep freed memory: by default it returns blocks above 32 MB to the system, and the page
faults would dominate the timing (they double the larger GTPO case).
"""

import argparse
import ctypes
import gc
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import psutil
import torch

from dew.algorithms import get_algorithm
from dew.credit import grpo_s_advantages, grpo_s_rewards, gtpo_advantages, gtpo_rewards
from dew.rollouts import Rollouts

OTHERS = (
    "dapo", "maxrl", "qae", "w_reinforce", "reinforce_pp", "clip_cov", "kl_cov", "steer", "otb", "gepo",
    "stare(target_entropy=1.0)", "gtpo(compare=turn)", "gtpo(compare=relative)",
)  # fmt: skip
VOCABULARY, SAMPLE = 32_000, 2048


KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}


def keep_freed_memory() -> None:
    """Restart with the allocator settings, which glibc reads only at start-up."""
    if any(name not in os.environ for name in KEEP_MEMORY):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})


def seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median time; on a CPU, where one thread works, its CPU time: other processes hardly matter."""
    times, clock = [], time.perf_counter if device == "cuda" else time.process_time
    for _ in range(repeats + 1):
        start = clock()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return statistics.median(times[1:])  # the first is a warm-up


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Growth of memory during `run`."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # memory kept from earlier runs would hide this one's growth
    process, done = psutil.Process(), threading.Event()
    before, peak = process.memory_info().rss, [0]

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], process.memory_info().rss)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return max(peak[0] - before, 0)


def shaping(answers: int, group: int, tokens: int, device: str) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    shape = (answers // group, group, tokens)
    entropy = torch.rand(shape, generator=generator).to(device)
    lengths = torch.randint(tokens // 4, tokens + 1, shape[:2], generator=generator)
    mask = (torch.arange(tokens) < lengths.unsqueeze(-1)).to(device)
    correct = (torch.rand(shape[:2], generator=generator) > 0.5).to(device)
    logp = -2 * torch.rand(shape, generator=generator).to(device)
    ids = (VOCABULARY * torch.rand(shape, generator=generator) ** 4).long().to(device)  # a few are very frequent
    signals = {"entropy": entropy, "logp": logp, "sum_sq": logp.exp(), "tokens": ids}
    rollouts = Rollouts(mask=mask, reward=correct.float(), **signals)

    def other(name: str) -> Callable[[], object]:
        algorithm = get_algorithm(name)

        def run() -> object:
            advantages = algorithm.advantages(rollouts)
            return algorithm.penalties(rollouts, advantages) if algorithm.penalises else advantages

        return run

    return {
        "gtpo": lambda: gtpo_advantages(gtpo_rewards(correct, entropy, mask), mask),
        "grpo_s": lambda: grpo_s_advantages(grpo_s_rewards(correct, entropy, mask), mask.any(-1)),
        **{name: other(name) for name in OTHERS},
    }


def entropy_seconds(tokens: int, device: str, repeats: int) -> float:
    logits = torch.randn(SAMPLE, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(device)

    def run() -> torch.Tensor:
        logp = logits.log_softmax(-1)
        return -(logp.exp() * logp).sum(-1)

    return seconds(run, device, repeats) * tokens / SAMPLE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--answers", type=int, nargs="+", default=[512, 5120])
    parser.add_argument("--group", type=int, default=16, help="answers of a group")
    parser.add_argument("--tokens", type=int, default=4096, help="of the longest answers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", type=Path, help="also write the table, as Markdown, to this file")
    options = parser.parse_args()
    if options.device == "cpu":
        keep_freed_memory()
    torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU, one thread"
    lines = [
        f"# Shaping against the entropy it needs, groups of {options.group}",
        "",
        f"`python {' '.join(sys.argv)}`, {date.today()}, {machine}, torch {torch.__version__}, "
        f"Python {platform.python_version()}.",
        "",
        "| algorithm | answers x tokens | shaping s | peak extra MB | entropy s | shaping / entropy |",
        "|---|---|---|---|---|---|",
    ]
    for answers in options.answers:
        reference = entropy_seconds(answers * options.tokens, options.device, options.repeats)
        for name, run in shaping(answers, options.group, options.tokens, options.device).items():
            cost = seconds(run, options.device, options.repeats)
            extra = peak_bytes(run, options.device) / 2**20
            lines.append(
                f"| {name} | {answers} x {options.tokens} | {cost:.3f} | {extra:.0f} | {reference:.1f} | "
                f"{100 * cost / reference:.3f} % |"
            )
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text)


if __name__ == "__main__":
    main()
