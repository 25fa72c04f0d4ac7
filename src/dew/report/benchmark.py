"""The benchmark of credit rules on language models: its settings, its committed runs, and the comparison with DAPO and
with placebos as a table. `dew lab --benchmark` adds the rows of your own rules.

docs/benchmark.md is the plan. A stage trains some arms on some tasks. Its runs on one task are a study of the lab.
DATA/STAGE-TASK/001.jsonl.gz, 002 and so on hold the files of the run folders, without adapters and token records.
scripts/benchmark.py runs the stages, plots the results and writes their page.
"""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from numpy import format_float_scientific

from dew.compare import Difference, Result, corrected, paired
from dew.compare.statistics import SIGNIFICANT
from dew.compare.verdicts import markdown_table, signed
from dew.engines.lab import LoraSettings, load_study, study
from dew.engines.lab.arms import parse_arms

# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────
BASELINE = "dapo"
ARMS = (
    BASELINE, "grpo", "dr_grpo", "gspo", "cispo", "sapo", "gtpo", "grpo_s", "dew", "forking_tokens",
    "entropy_advantage", "maxrl", "qae", "w_reinforce", "reinforce_pp", "clip_cov", "kl_cov", "steer", "otb",
)  # fmt: skip
REMOVED = (
    "dew(entropy_clip=(0.01,100.0),compare=context)", "dew(compare=matrix,value=rank)",
    "dew(compare=matrix,value=contrast)", "dew(compare=matrix,value=divergence)", "dew(cap=2.0)",
)  # fmt: skip
"""Candidates that the screening rejected and that are no longer part of dew; commit ed304a7e has them."""
CANDIDATES = (
    "dew(entropy_clip=(0.01,100.0),compare=relative)", *REMOVED, "fipo", "stare", "gepo", "gmpo", "dppo",
)  # fmt: skip
"""Rules of the screening, under the lab's labels. Comparisons with unbounded weights have a lower bound on entropy."""
IN_THE_LOSS = {arm: f"{arm}(placebo=True)" for arm in ("entropy_advantage", "kl_cov", "fipo")}
"""Rules that weight tokens in their loss, for which there is no placebo. Without one they cannot win."""
RATES = (4e-5, 8e-5)
THIRD = {4e-5: 2e-5, 8e-5: 1.6e-4}
"""The third learning rate of stage 1 on A, if this one is the better of the first two."""
MARGIN = 0.01
INTERIM = (12, 0.005)
"""Seeds at the interim analysis of stage 3 on task A, and the alpha that it spends."""
SCORES = ("pass@1", "area", "pass@4")
SETTINGS = {
    "group_size": 8, "prompts": 16, "optimizer_steps": 4, "generations": 30, "eval_problems": 512, "eval_k": 4,
    "evaluations": 3, "rank": 16, "alpha": 32.0, "target_modules": "all",
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    title: str
    model: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int = 512


QWEN, SMOL = "Qwen/Qwen2.5-Coder-0.5B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"
TASKS = {
    "A": Task("GSM8K", QWEN, "gsm8k"),
    "A-train": Task("GSM8K, held-out training problems", QWEN, "gsm8k", {"held_out": "train"}),
    "B": Task("sums of three numbers", QWEN, "sums", {"numbers": 3}, 256),
    "B-train": Task("sums of three, held-out training problems", QWEN, "sums", {"numbers": 3, "tuning": True}, 256),
    "C": Task("sums of two numbers", SMOL, "sums", {"example": True}, 64),
    "C-train": Task("sums, held-out training problems", SMOL, "sums", {"example": True, "tuning": True}, 64),
    "D": Task("GSM8K, 1.5B", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "gsm8k"),
}


@dataclass(frozen=True)
class Stage:
    first_seed: int
    seeds: Mapping[str, int]
    """Number of seeds for each task."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    random: str = ""
    """Tasks that have an arm with random rewards."""


STAGES = {
    "start": Stage(400, dict.fromkeys(TASKS, 1), {"generations": 3}),
    "replication": Stage(300, {"A": 20}, {"generations": 20, "eval_problems": 192, "evaluations": 1}),
    "stage1": Stage(0, {"A-train": 4, "B-train": 4, "C-train": 4}, {"eval_problems": 192}),
    "screen": Stage(500, {"A-train": 8}, {"generations": 20, "eval_problems": 192, "evaluations": 1}),
    "stage2": Stage(100, {"A": 8}, {"eval_problems": 192}, random="A"),
    "stage3": Stage(200, {"A": 16, "C": 8, "B": 8, "D": 8}, {"generations": 60, "eval_problems": 256}, random="CD"),
}
"""In order. `start` measures the accuracy before training, with three evaluations at a negligible learning rate."""


def train(stage: str, task: str, arms: Sequence[str], output: Path, **changed: Any) -> list[Result]:
    """Train arms on a task with the settings of a stage, and return their runs, without others in the folder.
    `changed` overrides arguments of `study`."""
    of, where = STAGES[stage], TASKS[task]
    how: dict[str, Any] = {"model": where.model, "tasks": [where.name], "task_settings": where.settings}
    how |= {"seeds": of.seeds[task], "first_seed": of.first_seed}
    settings = LoraSettings(**{"max_new_tokens": where.max_new_tokens, **SETTINGS, **of.settings})
    found = study(arms, output=output, **{"settings": settings, **how, **changed})
    chosen = parse_arms(arms, changed.get("learning_rates", RATES), controls=changed.get("controls", False))
    points = {(arm.label, arm.learning_rate) for arm in chosen}
    return [r for r in found if (r.arm, r.learning_rate) in points]


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────
COMMITTED = Path(__file__).parents[3] / "docs" / "results" / "benchmark"
Runs = Mapping[str, Sequence[Result]]
"""The finished runs of each STAGE-TASK."""


def read(data: Path, work: Path) -> Runs:
    """Return all runs in the archives of `data`, unpacking them into `work` if they are not there yet."""
    for archive in sorted(data.glob("*/*.jsonl.gz"), reverse=True):  # the newest grid.json is the one that counts
        root = (work / archive.parent.name).resolve()
        for name, text in archived(archive).items():
            path = (root / name).resolve()
            if path.is_relative_to(root) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    jobs = [f"{stage}-{task}" for stage, of in STAGES.items() for task in of.seeds]
    return {job: load_study(work / job) for job in jobs if (work / job / "grid.json").exists()}


def archived(archive: Path) -> dict[str, str]:
    """Return {file name: text} of an archive."""
    lines = gzip.decompress(archive.read_bytes()).splitlines()
    return {entry["file"]: entry["text"] for entry in map(json.loads, lines)}


@cache
def companions(arm: str) -> tuple[str | None, str | None]:
    """Return the labels of an arm's control and placebo, if it weights tokens."""
    if arm in REMOVED:
        return None, None
    found = parse_arms([arm], RATES[:1])[0]
    return found.control, found.placebo


def rate_means(runs: Sequence[Result], seeds: int | None = None) -> dict[str, dict[float, float]]:
    """Return the mean pass@1 of each arm at each learning rate that has all seeds (default: those of stage 1)."""
    of: dict[str, dict[float, list[float]]] = {}
    for r in runs:
        of.setdefault(r.arm, {}).setdefault(r.learning_rate or 0, []).append(r.scores["pass@1"])
    seeds = seeds or STAGES["stage1"].seeds["A-train"]
    found = {arm: {x: fmean(y) for x, y in sorted(at.items()) if len(y) >= seeds} for arm, at in of.items()}
    return {arm: means for arm, means in found.items() if means}


def by_arm(runs: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for r in runs:
        found.setdefault(r.arm, []).append(r)
    return found


# ── comparisons ─────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Row:
    """The results of an arm on a task."""

    arm: str
    runs: Sequence[Result]
    than_baseline: Mapping[str, Difference]
    """Difference from the baseline, by score."""
    than_placebo: Difference | None = None
    verdict: str = ""
    """win, level, loss or open; empty for controls, placebos and random rewards."""


def compare(
    runs: Sequence[Result], placebos: Mapping[str, str | None], *, final: bool = False, alpha: float | None = None
) -> list[Row]:
    """Return a row for each arm: the baseline, then the rules and then other arms by their difference from it.
    `placebos`: rule -> its placebo, or None; Holm's correction is over these rules. `final`: whether a win is possible.
    `alpha`: None if no analysis is planned yet."""
    of = by_arm(runs)
    rules, others = ([arm for arm in of if arm != BASELINE and (arm in placebos) == wanted] for wanted in (True, False))

    values = {
        score: {arm: {r.seed: r.scores[score] for r in x if score in r.scores} for arm, x in of.items()}
        for score in SCORES
    }
    placebo = differences(values[SCORES[0]], {arm: placebos[arm] for arm in rules}, SCORES[0])
    found = [Row(BASELINE, of[BASELINE], {})] if BASELINE in of else []
    for family in (rules, others):
        than = {score: differences(values[score], dict.fromkeys(family, BASELINE), score) for score in SCORES}
        order = {arm: -d.value for arm, d in than[SCORES[0]].items()}
        for arm in sorted(family, key=lambda arm: order.get(arm, 1)):
            d = {score: than[score][arm] for score in SCORES if arm in than[score]}
            judged = arm in placebos and bool(d)
            word = _verdict(d[SCORES[0]], placebo.get(arm), bool(placebos[arm]), final, alpha) if judged else ""
            found.append(Row(arm, of[arm], d, placebo.get(arm), word))
    return found


def differences(
    values: dict[str, dict[int, float]], pairs: Mapping[str, str | None], score: str
) -> dict[str, Difference]:
    """Return the difference of each arm from the one that `pairs` names, with Holm's correction over all of them.
    `values`: those of each arm by seed."""
    found = (paired(values[a], values[b], arm=a, baseline=b, score=score) for a, b in pairs.items() if b in values)
    return {d.arm: d for d in corrected(found)}


def _verdict(d: Difference, placebo: Difference | None, weights_tokens: bool, final: bool, alpha: float | None) -> str:
    """Return the first verdict of the plan that applies."""
    if alpha is None:
        return "open"
    better, other = (x is not None and x.pairs >= d.pairs and x.value > 0 and x.holm < alpha for x in (d, placebo))
    if final and better and (other or not weights_tokens):
        return "win"
    if d.low >= -MARGIN and d.high <= MARGIN:
        return "level"
    return "loss" if d.value < 0 and d.holm < alpha else "open"


def look(stage: str, task: str, seeds: int) -> tuple[int, float | None]:
    """Return the seeds and the alpha of the last planned analysis that so many seeds allow; None before the first."""
    whole, (interim, spent) = STAGES[stage].seeds[task], INTERIM
    looks = {whole: SIGNIFICANT - spent, interim: spent} if (stage, task) == ("stage3", "A") else {whole: SIGNIFICANT}
    return next(((least, alpha) for least, alpha in looks.items() if seeds >= least), (whole, None))


def stage_rows(stage: str, task: str, runs: Runs) -> list[Row]:
    """Return the rows of stage 2 or 3. Seeds beyond a planned analysis wait for the next one."""
    found = runs.get(f"{stage}-{task}", ())
    rules = [arm for arm in by_arm(found) if arm in (*ARMS, *CANDIDATES)]
    placebos = {arm: companions(arm)[1] or IN_THE_LOSS.get(arm) for arm in rules}
    have = min((len(of) for arm, of in by_arm(found).items() if arm in rules), default=0)
    seeds, alpha = look(stage, task, have)
    found = [r for r in found if r.seed < STAGES[stage].first_seed + seeds]
    return compare(found, placebos, final=stage == "stage3", alpha=alpha)


# ── table ───────────────────────────────────────────────────────────────────────────────────────────────────
ABOUT = f"""Rules are ordered by their difference from DAPO. Below them are controls (the rule without weights),
placebos (the same weights on permuted tokens) and random rewards. pass@1 is the mean of the last evaluations.
Differences are paired by seed, with 95% intervals of Student's t over seeds, and p is corrected by Holm's method over
the rules of the table. They all share DAPO's runs: if those were lucky, every rule looks worse. The verdict is the
first of win, level (within ±{MARGIN}) and loss that applies, else open."""
HEAD = ("rule", "rate", "seeds", "pass@1", "− DAPO", "p (Holm)", "− placebo", "p (placebo)", "verdict")
MEANS = {"pass@1": ("pass@1", ".3f"), "entropy": ("entropy", ".3f"), "length": ("length", ".0f"),
         "cut off": ("truncated", ".3f"), "KL": ("kl", ".4f")}  # fmt: skip


def rate(x: float | None) -> str:
    return format_float_scientific(x or 0, trim="-", exp_digits=1)


def title(arm: str, rows: Sequence[Row]) -> str:
    """Return the name of an arm, e.g. "dew", or "dew, placebo" for dew(placebo=True)."""
    own = {row.arm: (row.runs[0].control, row.runs[0].placebo) for row in rows}  # committed runs may not name both
    own |= {arm: companions(arm) for arm in own if arm in (*ARMS, *CANDIDATES)}
    of = {x: (arm, what) for arm, two in own.items() for x, what in zip(two, ("control", "placebo"), strict=True)}
    return ", ".join(of.get(arm, [arm]))


def table(rows: Sequence[Row], head: Sequence[str] = HEAD) -> str:
    """Return a table in Markdown with those columns that have values."""
    lines = []
    for row in rows:
        cells = {"rule": title(row.arm, rows), "rate": rate(row.runs[0].learning_rate), "seeds": str(len(row.runs))}
        for d, name, p in ((row.than_baseline.get(SCORES[0]), *HEAD[4:6]), (row.than_placebo, *HEAD[6:8])):
            if d:
                cells |= {name: signed(d), p: (f"{d.holm:.3f}" if d.holm >= 0.0005 else "<0.001") * bool(row.verdict)}
        cells |= {f"{score} − DAPO": signed(d) for score, d in row.than_baseline.items()}
        for name, (score, how) in MEANS.items():
            if all(score in r.scores for r in row.runs):
                cells[name] = f"{fmean(r.scores[score] for r in row.runs):{how}}"
        lines.append(cells | {"verdict": row.verdict})
    columns = [name for name in head if any(line.get(name) for line in lines)]
    return markdown_table(columns, [[line.get(name, "") for name in columns] for line in lines])
