"""Cost of large batches in the advantage estimator that verl calls.

    python benchmarks/verl_load.py [--write benchmarks/results/verl_load-cpu.md]

Runs `dew.engines.verl.estimators` on 512 to 4,096 answers of 8,192 tokens in groups of 16, in shuffled order as in
verl, on one CPU thread: verl does this in the driver, once per step. Every size runs in a separate process. Time is CPU
time, the median of three calls after a warm-up; memory is the growth of the resident set beyond the batch itself. The
last two columns are per token: constant means linear growth. Does not need verl.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import psutil

GROUP, TOKENS, SIZES = 16, 8192, (512, 1024, 2048, 4096)
ALGORITHMS = ("gtpo", "grpo_s", "forking_tokens")


def measure(name: str, answers: int, repeats: int) -> dict[str, float]:
    """One algorithm on one size, in this process."""
    import torch

    from dew.algorithms import get_algorithm
    from dew.engines.verl import estimators

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(answers, generator=generator)
    uid = [f"problem-{int(i) // GROUP}" for i in order]
    entropy = torch.rand(answers, TOKENS, generator=generator)
    lengths = torch.randint(TOKENS // 4, TOKENS + 1, (answers,), generator=generator)
    lengths[:: GROUP // 2] = TOKENS
    mask = torch.arange(TOKENS) < lengths[:, None]
    correct = (torch.rand(answers, generator=generator) > 0.5).float()
    rewards = torch.zeros(answers, TOKENS)
    rewards[torch.arange(answers), lengths - 1] = correct
    estimate, algorithm = estimators.estimator(name), get_algorithm(name)

    def call() -> float:
        start = time.process_time()  # of this process only
        with estimators.batch_context(estimators.BatchContext(algorithm=algorithm, entropy=entropy, acc=correct)):
            estimate(token_level_rewards=rewards, response_mask=mask, index=uid)
        return time.process_time() - start

    before = psutil.Process().memory_info().rss
    call()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = statistics.median(call() for _ in range(repeats))
    return {"seconds": seconds, "extra": peak - before, "batch": answers * TOKENS * 9, "tokens": answers * TOKENS}


def rows(repeats: int) -> list[str]:
    lines = []
    for name in ALGORITHMS:
        for answers in SIZES:
            words = [sys.executable, __file__, "--one", name, str(answers), "--repeats", str(repeats)]
            found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
            lines.append(
                f"| {name} | {answers:,} x {TOKENS:,} | {found['batch'] / 2**20:,.0f} | {found['seconds']:.2f} | "
                f"{found['extra'] / 2**20:,.0f} | {found['seconds'] / found['tokens'] * 1e9:.0f} | "
                f"{found['extra'] / found['tokens']:.1f} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, help="also write the table, as Markdown, to this file")
    parser.add_argument("--one", nargs=2, metavar=("ALGORITHM", "ANSWERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]), options.repeats)))
        return
    import torch

    head = [
        "# Large batches in the advantage estimator that verl calls",
        "",
        f"`python benchmarks/verl_load.py`, {date.today()}, {platform.machine()} CPU, one thread, torch "
        f"{torch.__version__}, Python {platform.python_version()}. The batch is entropy and rewards in float32 and the "
        "mask; extra is what the estimator needs beyond it.",
        "",
        "| algorithm | answers x tokens | batch MB | CPU seconds | extra MB | ns per token | extra bytes per token |",
        "|---|---|---|---|---|---|---|",
    ]
    text = "\n".join([*head, *rows(options.repeats)]) + "\n"
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text)


if __name__ == "__main__":
    main()
