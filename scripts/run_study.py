"""The steps of docs/study-details.md, each as jobs of one task and a block of seeds, in order of value.

    python scripts/run_study.py --list                           jobs, runs, seconds on an H200
    python scripts/run_study.py OUT [--steps rules ...]          all jobs, three at a time
    python scripts/run_study.py OUT --jobs rules/countdown-6/0   one job in this process

A job is a study of its own in OUT/STEP/TASK/SEED; `load_study` merges those of a step. Finished jobs are kept:
the same command resumes. Every arm of a task has DAPO's best learning rate of step 1, in `confirm` its own rule's.
The steps `learned` and `learned-confirm` of the study need commit a719644, the last one with learned credit.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from dew.compare import Result
from dew.engines.lab import TinySettings, load_study, study

TASKS = ("countdown-4", "countdown-6", "countdown-8", "addition-8")
RATES = {"countdown-4": 3e-5, "countdown-6": 6e-5, "countdown-8": 3e-5, "addition-8": 1.5e-5}
GTPO_RATES = {**RATES, "countdown-4": 6e-5}
FIRST_RATES = {**GTPO_RATES, "countdown-8": 6e-5}
FIRST = "dew(spread=correct,alpha1=0.0,alpha2=1.0)"
"""The defaults of `dew` before `confirm-dew`, which made another candidate the default."""
SHARED: dict[str, Any] = {"prompts": 16, "generations": 100, "evaluations": 2}
RUNS_PER_SECOND = 3.1
"""Measured with three processes of 128 runs on an H200."""
OWN = Path(__file__).with_name("gtpo_misreadings.py")
CONTROL = "grpo_s(beta1=1.1,beta2=0.0"


RULES = ("dapo", "gtpo", "dew")
STEP_RATES = {1: (6e-5, 1.2e-4, 2.4e-4), 2: (3e-5, 6e-5, 1.2e-4), 4: (3e-5, 6e-5, 1.2e-4), 8: (1.5e-5, 3e-5, 6e-5)}
"""Of step 9, by optimizer steps."""


@dataclass(frozen=True)
class Step:
    arms: tuple[str, ...]
    """The baseline first. {gtpo} and {dew}: that rule's best learning rate on the task."""
    tasks: tuple[str, ...] = ("countdown-6",)
    first_seeds: tuple[int, ...] = (0,)
    """One job each."""
    seeds: int = 16
    """Seeds of a job: stacks of about 100 runs use the GPU best."""
    settings: dict[str, int] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    """All arms at these, instead of DAPO's best on the task."""
    tuned: str = ""
    """Each rule at its best rate in this step, a placebo at its rule's."""


def compared(**settings: int) -> Step:
    return Step(("dapo", "gtpo", FIRST), settings=settings)


STEPS = {
    "candidates": Step(
        (
            "dapo", "gtpo", "gtpo(pool=joint)", "gtpo(pool=outcome)", FIRST, "dew(spread=correct)",
            "dew(alpha1=0.0,alpha2=1.0)", "dew",
        ),
        TASKS,
    ),
    "confirm": Step(
        (
            "dapo", "gtpo@{gtpo}", "gtpo(pool=joint)@{gtpo}", "gtpo(pool=outcome)@{gtpo}", FIRST + "@{dew}",
            "dew(alpha1=0.0,alpha2=1.0)@{dew}",
        ),
        TASKS,
        (100, 116),
    ),
    # Why GRPO-S loses against GRPO: the arithmetic mean of ratios hardly moves, so nothing is ever clipped?
    "grpo_s": Step(
        (
            "grpo", "grpo_s", f"{CONTROL})", "grpo(clip_high=0.28)", "grpo(clip_low=1.0,clip_high=1000.0)",
            f"{CONTROL},clip_low=0.03,clip_high=0.04)", f"{CONTROL},clip_low=0.01,clip_high=0.013)",
            "gspo(clip_low=0.03,clip_high=0.04)",
        ),
        ("countdown-6", "countdown-8"),
    ),
    # One optimizer step: every ratio is 1, and both should learn alike.
    "grpo_s-1": Step(("grpo", f"{CONTROL})", "grpo_s"), seeds=8, settings={"optimizer_steps": 1}),
    "rules": Step(
        (
            "dapo", "grpo", "dr_grpo", "gspo", "grpo_s", "forking_tokens", "entropy_advantage", "cispo", "sapo",
            "maxrl", "qae", "w_reinforce", "reinforce_pp", "clip_cov", "kl_cov", "steer", "otb",
        ),
        TASKS,
        (0, 8),
        8,
    ),
    # The best of the candidates, all at DAPO's rate.
    "confirm-dew": Step(
        ("dapo", "gtpo", FIRST, "dew"),
        TASKS,
        (300,),
        32,
    ),
    "group-4": compared(group_size=4, prompts=64),
    "group-8": compared(group_size=8, prompts=32),
    "group-32": compared(group_size=32, prompts=8),
    "steps-1": compared(optimizer_steps=1),
    "steps-2": compared(optimizer_steps=2),
    "steps-8": compared(optimizer_steps=8),
    "misreadings": Step(
        (
            "dapo", "gtpo", "gtpo(pool=sign)", "gtpo(average=geometric)", f"{OWN}:MicroBatches", f"{OWN}:EveryGroup",
        )
    ),
    **{
        f"rates-{n}": Step(RULES, first_seeds=(600,), seeds=4, settings={"optimizer_steps": n}, rates=rates)
        for n, rates in STEP_RATES.items()
    },
    **{f"groups-{n}": Step(RULES, first_seeds=(620,), settings={"group_size": n, "prompts": 256 // n})
       for n in (4, 8, 16, 32)},
    **{
        f"own-{n}": Step(
            (*RULES, "dew(placebo=True)"), first_seeds=(620,), settings={"optimizer_steps": n}, tuned=f"rates-{n}"
        )
        for n in STEP_RATES
    },
    **{
        f"start-{n}": Step((*RULES, "gtpo(placebo=True)", "dew(placebo=True)"), TASKS, (700,), 8, settings={"start": n})
        for n in (1, 2, 3, 4)
    },
}  # fmt: skip
"""Name -> step, in order of value."""


def jobs(steps: list[str]) -> list[str]:
    """STEP/TASK/SEED in order of value: the first job of every step and task, then the others."""
    every = [(i > 0, s, f"{name}/{task}/{first}") for s, name in enumerate(steps) for task in STEPS[name].tasks
             for i, first in enumerate(STEPS[name].first_seeds)]  # fmt: skip
    return [job for _, _, job in sorted(every, key=lambda x: x[:2])]


def best_rates(runs: Sequence[Result]) -> dict[str, float]:
    """The rate of each arm with the largest mean area."""
    areas: dict[str, dict[float, list[float]]] = {}
    for r in runs:
        areas.setdefault(r.arm, {}).setdefault(r.learning_rate or 0, []).append(r.scores["area"])
    return {arm: max(sorted(of), key=lambda rate: fmean(of[rate])) for arm, of in areas.items()}


def run(job: str, options: argparse.Namespace) -> None:
    """Train the job's runs in this process."""
    name, task, first = job.split("/")
    step = STEPS[name]
    arms = [arm.format(gtpo=GTPO_RATES[task], dew=FIRST_RATES[task]) for arm in step.arms]
    if step.tuned:
        best = best_rates(load_study(options.out / step.tuned / task / str(STEPS[step.tuned].first_seeds[0])))
        arms = [f"{arm}@{best[arm.partition('(')[0]]:g}" for arm in arms]
    given = {**SHARED, **step.settings, **({"generations": options.generations} if options.generations else {})}
    began = perf_counter()
    found = study(
        arms,
        output=options.out / name / task / first,
        tasks=[task],
        seeds=options.seeds or step.seeds,
        first_seed=int(first),
        learning_rates=step.rates or [RATES[task]],
        settings=TinySettings(**given),
        controls=False,
        say=lambda _: None,
    )
    print(f"{job}: {len(found)} runs, {perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/study"), metavar="OUT")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--jobs", nargs="+", help="these jobs, in this process")
    parser.add_argument("--parallel", type=int, default=3, help="processes at the same time")
    parser.add_argument("--seeds", type=int, help="fewer seeds a job, for a trial")
    parser.add_argument("--generations", type=int, help="fewer for a trial")
    options = parser.parse_args()
    if options.list:
        total = 0
        for job in jobs(options.steps):
            step = STEPS[job.split("/")[0]]
            total += (runs := len(step.arms) * step.seeds * max(1, len(step.rates)))
            print(f"{job:32} {runs:4} runs, until {total / RUNS_PER_SECOND:5.0f} s")
    elif options.jobs:
        for job in options.jobs:
            run(job, options)
    else:
        words = [sys.executable, __file__, *sys.argv[1:], "--jobs"]
        with ThreadPoolExecutor(options.parallel) as pool:
            codes = list(
                pool.map(lambda job: subprocess.run([*words, job], check=False).returncode, jobs(options.steps))
            )
        sys.exit(any(codes))


if __name__ == "__main__":
    main()
