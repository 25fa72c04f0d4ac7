"""The benchmark of credit rules on language models: its settings, its stages and its committed runs.

docs/benchmark.md is the plan. A stage trains some arms on some tasks: the runs of a stage on a task are a study of the
lab. DATA/STAGE-TASK/001.jsonl.gz, 002 and so on hold the files of their run folders, but no adapters and token records.
"""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from dew.algorithms import DAPO
from dew.compare import Result
from dew.compare.results import run_folders
from dew.engines.lab import load_study, study
from dew.engines.lab.arms import parse_arms
from dew.errors import ConfigError, Problem
from dew.files import write_atomically
from dew.rollouts import Rollouts

# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────

BASELINE = "dapo"
ARMS = (
    BASELINE, "grpo", "dr_grpo", "gspo", "cispo", "sapo", "gtpo", "grpo_s", "dew", "forking_tokens",
    "entropy_advantage", "maxrl", "qae", "w_reinforce", "reinforce_pp", "clip_cov", "kl_cov", "steer", "otb",
)  # fmt: skip
FINALISTS = (BASELINE, "grpo", "dew", "gtpo", "grpo_s")
"""With the best OTHERS of stage 2."""
OTHERS = 3
CONTROLLED = ("dew", "gtpo")
"""Rules whose control and placebo are trained in stage 2; in stage 3, those of all finalists are."""
IN_THE_LOSS = {arm: f"{arm}(placebo=True)" for arm in ("entropy_advantage", "kl_cov")}
"""Rules that weight tokens in their loss, where placebos do not reach: theirs are not trained, so they cannot win."""
RANDOM = "random_rewards"
RATES = (2e-5, 4e-5, 8e-5)
BEYOND = {2e-5: 1e-5, 8e-5: 1.6e-4}
"""The rate that is added if this one is the best."""
STANDSTILL = 1e-12
"""A learning rate at which the policy stays what it was at the start."""
MARGIN = 0.01
INTERIM = (12, 0.005)
"""Seeds of the interim look of stage 3 on task A, and the alpha it spends."""
SCORES = ("pass@1", "area", "pass@4")
SETTINGS = {
    "group_size": 8, "prompts": 16, "optimizer_steps": 4, "generations": 30, "eval_problems": 512, "eval_k": 4,
    "evaluations": 3, "max_new_tokens": 512, "rank": 16, "alpha": 32.0, "target_modules": "all",
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    title: str
    model: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


QWEN = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
TASKS = {
    "A": Task("GSM8K", QWEN, "gsm8k"),
    "A-train": Task("GSM8K, held-out training problems", QWEN, "gsm8k", {"held_out": "train"}),
    "B": Task("countdown in words", QWEN, "countdown-tinyzero", {"template": "tinyzero"}),
    "C": Task("sums of two numbers", "HuggingFaceTB/SmolLM2-135M-Instruct", "sums"),
    "D": Task("GSM8K, 1.5B", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "gsm8k"),
}


@dataclass(frozen=True)
class Stage:
    first_seed: int
    seeds: Mapping[str, int]
    """Of each task."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    random: str = ""
    """Tasks with an arm with random rewards."""


STAGES = {
    "start": Stage(400, dict.fromkeys(TASKS, 1), {"generations": 3}),
    "replication": Stage(300, {"A": 20}, {"generations": 20, "eval_problems": 192, "evaluations": 1}),
    "stage1": Stage(0, {"A-train": 4}, {"eval_problems": 192}),
    "stage2": Stage(100, {"A": 8, "B": 8, "C": 8}, random="AC"),
    "stage3": Stage(200, {"A": 24, "B": 8, "C": 8, "D": 8}, {"generations": 60}, random="D"),
}
"""In order. `start` measures the accuracy before training, with three evaluations of a policy that stands still."""


@dataclass(frozen=True, kw_only=True)
class RandomRewards(DAPO):
    """DAPO with coins for rewards: what training gains without a verifier. Metrics and evaluations are the task's."""

    name = RANDOM
    needs_logp = True

    def signal(self, rollouts: Rollouts) -> torch.Tensor:
        return super().signal(self._tossed(rollouts))

    def advantages(self, rollouts: Rollouts) -> torch.Tensor:
        return super().advantages(self._tossed(rollouts))

    def _tossed(self, rollouts: Rollouts) -> Rollouts:
        """A coin for each answer: the parity of a late digit of its log-probability."""
        assert rollouts.logp is not None
        digits = torch.where(rollouts.mask, rollouts.logp, 0).double().sum(-1).mul(1e4).floor()
        return replace(rollouts, reward=(digits % 2).to(rollouts.reward.dtype))


def train(stage: str, task: str, arms: Sequence[str], output: Path, **changed: Any) -> list[Result]:
    """Train arms on a task with the settings of a stage, or with other arguments of `study`."""
    from dew.engines.lab.lora import LoraSettings

    of, where = STAGES[stage], TASKS[task]
    how: dict[str, Any] = {"model": where.model, "tasks": [where.name], "task_settings": where.settings}
    how |= {"seeds": of.seeds[task], "first_seed": of.first_seed}
    return study(arms, output=output, **{"settings": LoraSettings(**{**SETTINGS, **of.settings}), **how, **changed})


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────

COMMITTED = Path(__file__).parents[3] / "docs" / "results" / "benchmark"
FILES = ("run.json", "metrics.jsonl", "scores.json")
Runs = Mapping[str, Sequence[Result]]
"""The finished runs of each STAGE-TASK."""


def read(data: Path, work: Path) -> Runs:
    """All runs of the archives in `data`, which are unpacked into `work` unless they are there."""
    for archive in sorted(data.glob("*/*.jsonl.gz"), reverse=True):  # the newest grid.json is the one that counts
        root = (work / archive.parent.name).resolve()
        for name, text in _files(archive).items():
            path = (root / name).resolve()
            if path.is_relative_to(root) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    jobs = [f"{stage}-{task}" for stage, of in STAGES.items() for task in of.seeds]
    return {job: load_study(work / job) for job in jobs if (work / job / "grid.json").exists()}


def pack(work: Path, data: Path) -> list[Path]:
    """Write an archive of the finished runs of each study in `work` that are in none yet."""
    written = []
    for folder in sorted(path.parent for path in work.glob("*/grid.json")):
        old = sorted((data / folder.name).glob("*.jsonl.gz"))
        packed = {name for archive in old for name in _files(archive)}
        homes = [home.relative_to(folder) for home in run_folders(folder)]
        names = [str(home / name) for home in homes if str(home / FILES[0]) not in packed for name in FILES]
        if names:
            path = data / folder.name / f"{len(old) + 1:03}.jsonl.gz"
            lines = [json.dumps({"file": x, "text": (folder / x).read_text()}) + "\n" for x in ["grid.json", *names]]
            write_atomically(path, gzip.compress("".join(lines).encode(), mtime=0))
            written.append(path)
    return written


def _files(archive: Path) -> dict[str, str]:
    lines = gzip.decompress(archive.read_bytes()).splitlines()
    return {entry["file"]: entry["text"] for entry in map(json.loads, lines)}


@cache
def companions(arm: str) -> tuple[str | None, str | None]:
    """The labels of an arm's control and placebo, if it weights tokens."""
    found = parse_arms([arm], RATES[:1])[0]
    return found.control, found.placebo


def points(stage: str, task: str, runs: Runs) -> list[tuple[str, float]]:
    """The arms of a stage and their learning rates, which follow from the stages before."""
    if stage == "start":
        return [(BASELINE, STANDSTILL)]
    if stage == "replication":
        return [(arm, 4e-5) for arm in (BASELINE, "dew", str(companions("dew")[1]))]
    if stage == "stage1":
        best = {arm: max(RATES, key=of.__getitem__) for arm, of in staying(runs).items()}
        return [(x, rate) for x in ARMS for rate in (*RATES, *(BEYOND[y] for y in [best.get(x)] if y in BEYOND))]
    rates = chosen_rates(runs)
    arms = list(rates) if stage == "stage2" else finalists(runs)
    weighted = [arm for arm in arms if stage == "stage3" or arm in CONTROLLED]
    found = {arm: rates[arm] for arm in arms}
    found |= {other: rates[arm] for arm in weighted for other in companions(arm) if other}
    return list((found | ({RANDOM: rates[BASELINE]} if task in STAGES[stage].random else {})).items())


def texts(points: Iterable[tuple[str, float]]) -> list[str]:
    """As `study` takes them."""
    return [f"{f'{__name__}:RandomRewards' if arm == RANDOM else arm}@{rate:g}" for arm, rate in points]


def missing(stage: str, task: str, runs: Runs) -> list[tuple[str, float, int]]:
    """Arm, learning rate and seed of the runs that are not finished."""
    have, of = {(r.arm, r.learning_rate, r.seed) for r in runs.get(f"{stage}-{task}", ())}, STAGES[stage]
    every, seeds = points(stage, task, runs), range(of.first_seed, of.first_seed + of.seeds[task])
    return [x for seed in seeds for point in every if (x := (*point, seed)) not in have]


def rate_means(runs: Sequence[Result]) -> dict[str, dict[float, float]]:
    """Mean pass@1 of each arm at each learning rate with all seeds of stage 1."""
    of: dict[str, dict[float, list[float]]] = {}
    for r in runs:
        of.setdefault(r.arm, {}).setdefault(r.learning_rate or 0, []).append(r.scores["pass@1"])
    seeds = STAGES["stage1"].seeds["A-train"]
    return {arm: {x: fmean(y) for x, y in sorted(at.items()) if len(y) >= seeds} for arm, at in of.items()}


def chosen_rates(runs: Runs) -> dict[str, float]:
    """The best learning rate of each rule that stays, by stage 1."""
    for stage in ("start", "stage1"):
        if n := len(missing(stage, "A-train", runs)):
            what = f"The learning rates are not known yet: {stage} on A-train lacks {n} runs."
            raise ConfigError(Problem(what, remedy=f"Run: python scripts/benchmark.py run {stage}"))
    return {arm: max(of, key=of.__getitem__) for arm, of in staying(runs).items()}


def staying(runs: Runs) -> dict[str, dict[float, float]]:
    """The means of the rules that are not worse than the start at all RATES."""
    found = rate_means(runs.get("stage1-A-train", ()))
    start = start_of("A-train", runs) if runs.get("start-A-train") else 0.0
    done = {arm: of for arm, of in found.items() if of.keys() >= set(RATES)}
    return {arm: of for arm, of in done.items() if arm == BASELINE or max(of[rate] for rate in RATES) >= start}


def start_of(task: str, runs: Runs) -> float:
    return fmean(r.scores["pass@1"] for r in runs[f"start-{task}"])


def finalists(runs: Runs) -> list[str]:
    """FINALISTS, and the OTHERS with the best mean rank of pass@1 in stage 2."""
    tasks = STAGES["stage2"].seeds
    if n := sum(len(missing("stage2", task, runs)) for task in tasks):
        what = f"The finalists are not known yet: stage2 lacks {n} runs."
        raise ConfigError(Problem(what, remedy="Run: python scripts/benchmark.py run stage2"))
    ranks: dict[str, list[int]] = {}
    for task in tasks:
        means = {arm: fmean(r.scores["pass@1"] for r in of) for arm, of in by_arm(runs[f"stage2-{task}"]).items()}
        for place, arm in enumerate(sorted(filter(ARMS.__contains__, means), key=lambda x: -means[x])):
            ranks.setdefault(arm, []).append(place)
    others = sorted((arm for arm in ranks if arm not in FINALISTS), key=lambda arm: fmean(ranks[arm]))
    return [*(arm for arm in FINALISTS if arm in ranks), *others[:OTHERS]]


def by_arm(runs: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for r in runs:
        found.setdefault(r.arm, []).append(r)
    return found
