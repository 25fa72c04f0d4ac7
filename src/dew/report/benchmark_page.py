"""The page of the benchmark of credit rules: comparisons with DAPO and with placebos, tables and forest plots."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from statistics import fmean

from dew.compare import Difference, Result, corrected, paired
from dew.compare.statistics import SIGNIFICANT, Interval
from dew.compare.verdicts import markdown_table, signed
from dew.engines.lab.summary import noise
from dew.errors import ConfigError
from dew.report import benchmark as plan
from dew.report.benchmark import Runs, by_arm
from dew.run.folder import RunFolder

# ── comparisons ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Row:
    """An arm on a task."""

    arm: str
    runs: Sequence[Result]
    than_baseline: Mapping[str, Difference]
    """By score."""
    than_placebo: Difference | None = None
    verdict: str = ""
    """win, level, loss or open; empty for controls, placebos and random rewards."""


def compare(
    runs: Sequence[Result], placebos: Mapping[str, str | None], *, final: bool = False, alpha: float | None = None
) -> list[Row]:
    """A row for each arm, the baseline first. Holm's correction is over the rules, the keys of `placebos`, which may
    have none. `final`: a win is possible. `alpha`: None before a look."""
    of = by_arm(runs)
    rules, others = (
        [arm for arm in of if arm != plan.BASELINE and (arm in placebos) == wanted] for wanted in (True, False)
    )

    def differences(score: str, pairs: Mapping[str, str | None]) -> dict[str, Difference]:
        values = {arm: {r.seed: r.scores[score] for r in x if score in r.scores} for arm, x in of.items()}
        found = (paired(values[a], values[b], arm=a, baseline=b, score=score) for a, b in pairs.items() if b in of)
        return {d.arm: d for d in corrected(d for d in found if d)}

    placebo = differences(plan.SCORES[0], {arm: placebos[arm] for arm in rules})
    found = [Row(plan.BASELINE, of[plan.BASELINE], {})] if plan.BASELINE in of else []
    for family in (rules, others):
        than = {score: differences(score, dict.fromkeys(family, plan.BASELINE)) for score in plan.SCORES}
        for arm in family:
            d = {score: than[score][arm] for score in plan.SCORES if arm in than[score]}
            judged = arm in placebos and bool(d)
            word = _verdict(d[plan.SCORES[0]], placebo.get(arm), bool(placebos[arm]), final, alpha) if judged else ""
            found.append(Row(arm, of[arm], d, placebo.get(arm), word))
    return found


def _verdict(d: Difference, placebo: Difference | None, weights_tokens: bool, final: bool, alpha: float | None) -> str:
    """As the plan defines it; the first that holds."""
    if alpha is None:
        return "open"
    better, other = (x is not None and x.value > 0 and x.holm < alpha for x in (d, placebo))
    if final and better and (other or not weights_tokens):
        return "win"
    if d.low >= -plan.MARGIN and d.high <= plan.MARGIN:
        return "level"
    return "loss" if d.value < 0 and d.holm < alpha else "open"


def alpha_of(stage: str, task: str, seeds: int) -> float | None:
    """Of a look after this many seeds; None if none is planned."""
    whole, (interim, spent) = plan.STAGES[stage].seeds[task], plan.INTERIM
    looks = {whole: SIGNIFICANT - spent, interim: spent} if (stage, task) == ("stage3", "A") else {whole: SIGNIFICANT}
    return next((alpha for least, alpha in looks.items() if seeds >= least), None)


def stage_rows(stage: str, task: str, runs: Runs) -> list[Row]:
    """Of stage 2 or 3."""
    found = runs.get(f"{stage}-{task}", ())
    placebos = {arm: plan.companions(arm)[1] or plan.IN_THE_LOSS.get(arm) for arm in by_arm(found) if arm in plan.ARMS}
    seeds = min((len(of) for of in by_arm(found).values()), default=0)
    return compare(found, placebos, final=stage == "stage3", alpha=alpha_of(stage, task, seeds))


# ── page ────────────────────────────────────────────────────────────────────────────────────────────────────

INTRODUCTION = """The plan is on [its own page](benchmark.md). `python scripts/benchmark.py page` writes this one from
the runs in `docs/results/benchmark/`.

Where the plan is silent: `entropy_advantage` and `kl_cov` weight tokens in their loss, which no placebo permutes;
without a placebo they cannot win. The interim look of stage 3 on task A spends an alpha of 0.005, which leaves 0.045
for the last one."""
ABOUT = f"""Rules in the order of the plan, controls, placebos and random rewards below them. pass@1 is the mean of the
last evaluations. Differences are paired by seed, with 95% intervals of Student's t; p is Holm's, over the rules of the
task. Verdicts are the plan's; where two hold, the first of win, level (within ±{plan.MARGIN}), loss counts. Entropy in
nats, length in tokens, cut off and KL from the start per token are means over the last sixth of training."""
HEAD = (
    "rule", "rate", "seeds", "pass@1", "− DAPO", "p", "− placebo", "p", "area − DAPO", "pass@4 − DAPO", "entropy",
    "length", "cut off", "KL", "verdict",
)  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        first, *others = (row.than_baseline.get(score) for score in plan.SCORES)
        means = {x: fmean(values) for x in row.runs[0].scores if (values := [r.scores.get(x, 0) for r in row.runs])}
        shown = {"pass@1": ".3f", "entropy": ".3f", "length": ".0f", "truncated": ".3f", "kl": ".4f"}
        score = {name: f"{means[name]:{how}}" if name in means else "" for name, how in shown.items()}
        cells = [row.arm, f"{row.runs[0].learning_rate:g}", str(len(row.runs)), score["pass@1"]]
        for d in (first, row.than_placebo):
            p = f"{d.holm:.3f}" if d and d.holm >= 0.0005 else "<0.001"
            cells += [signed(d) if d else "", p if d and row.verdict else ""]
        cells += [signed(d) if d else "" for d in others]
        lines.append([*cells, *(score[name] for name in list(shown)[1:]), row.verdict])
    return markdown_table(HEAD, lines)


def page(runs: Runs) -> tuple[str, dict[str, str]]:
    """Markdown, and SVG files by name."""
    parts = ["# The benchmark's results", INTRODUCTION]
    if not any(runs.values()):
        return "\n\n".join([*parts, "No run has been made yet."]) + "\n", {}
    images = {}
    parts += ["## Runs", _progress(runs)]
    if both := _replication(runs):
        parts += ["## Replication", both]
    if stage1 := plan.rate_means(runs.get("stage1-A-train", ())):
        parts += ["## Stage 1: the learning rate of each rule", _rates(stage1, runs)]
    for stage in ("stage2", "stage3"):
        rows = {task: found for task in plan.STAGES[stage].seeds if (found := stage_rows(stage, task, runs))}
        if rows:
            images[name := f"benchmark-{stage}.svg"] = forest({plan.TASKS[task].title: x for task, x in rows.items()})
            parts += [f"## Stage {stage[-1]}", f"![pass@1 − DAPO, with a band of ±{plan.MARGIN}](images/{name})", ABOUT]
        for task, found in rows.items():
            given = [row.than_baseline[plan.SCORES[0]] for row in found if row.verdict]
            parts += [f"### {task}: {plan.TASKS[task].title}", table(found), *noise(given, runs[f"{stage}-{task}"])]
    return "\n\n".join(part.strip() for part in parts) + "\n", images


def _progress(runs: Runs) -> str:
    lines = []
    for job, of in ((job, runs[job]) for job in runs if runs[job]):
        stage, _, task = job.partition("-")
        facts = [RunFolder(str(r.folder)).run() for r in of]
        times = {(x["started"], x["finished"]) for x in facts}  # those of a stack are the same
        minutes = sum((datetime.fromisoformat(b) - datetime.fromisoformat(a)).total_seconds() for a, b in times) / 60
        try:
            todo = str(len(plan.missing(stage, task, runs)))
        except ConfigError:
            todo = "not known yet"
        machine = ", ".join(sorted({str(x["machine"]["gpu"] or "CPU") for x in facts}))
        start = f"{plan.start_of(task, runs):.3f}" if runs.get(f"start-{task}") else ""
        about = [stage, f"{task}: {plan.TASKS[task].title}", str(facts[0]["warm_start"]["model"]), start]
        lines.append([*about, str(len(of)), todo, f"{minutes:.0f}", machine])
    head = ["stage", "task", "model", "pass@1 at the start", "runs", "missing", "minutes", "machine"]
    return markdown_table(head, lines)


def _replication(runs: Runs) -> str:
    rows = stage_rows("replication", "A", runs)
    found = [row.than_baseline[plan.SCORES[0]] for row in rows if row.arm == "dew" and row.than_baseline]
    if not found:
        return ""
    d = found[0]
    value, half = json.loads((plan.COMMITTED.parent / "lora-20-seeds.json").read_text())["table"]["dew − dapo"][2]
    old = Interval(value, value - half, value + half)
    word = "agrees" if d.low <= old.high and old.low <= d.high else "does not agree"
    both = f"pass@1 of dew − dapo: {signed(d)} over {d.pairs} seeds. The prototype's, {signed(old)}, {word}."
    return "\n\n".join([both, table(rows), *noise(found, runs["replication-A"])])


def _rates(means: Mapping[str, Mapping[float, float]], runs: Runs) -> str:
    every, lines = sorted({rate for of in means.values() for rate in of}), []
    for arm, of in means.items():
        cells = {rate: f"**{x:.3f}**" if x == max(of.values()) else f"{x:.3f}" for rate, x in of.items()}
        lines.append([arm, *(cells.get(rate, "") for rate in every)])
    start = f"At the start: {plan.start_of('A-train', runs):.3f}." if runs.get("start-A-train") else ""
    return markdown_table(["pass@1", *(f"{rate:g}" for rate in every)], lines) + f"\n{start}"


STYLE = """text { fill: #222 } .back { fill: #fff } .band { fill: #eee } .axis { stroke: #888 }
g { color: #2864dc; stroke: currentcolor; fill: currentcolor } .win { color: #188038 } .loss { color: #c5221f }
.plain { color: #888 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .back { fill: #16181c } .band { fill: #2a2d33 }
g { color: #8ab4f8 } .win { color: #81c995 } .loss { color: #f28b82 } .plain { color: #888 } }"""


def forest(tasks: Mapping[str, Sequence[Row]]) -> str:
    """An SVG of the differences from the baseline in pass@1: a line for each arm, a panel for each task."""
    arms = list(dict.fromkeys(row.arm for rows in tasks.values() for row in rows if row.than_baseline))
    shown = [row.than_baseline[plan.SCORES[0]] for rows in tasks.values() for row in rows if row.than_baseline]
    most = min(max([2 * plan.MARGIN, *(abs(x) for d in shown for x in (d.low, d.high))]), 0.2)
    left, width, top, line = 14 + 7 * max(map(len, arms), default=0), 240, 60, 20
    below, total = top + line * len(arms), left + width * len(tasks) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {below + 34}" width="{total}" '
        f'font-family="sans-serif" font-size="12"><style>{STYLE}</style>',
        '<rect class="back" width="100%" height="100%"/>',
        '<text x="12" y="22" font-size="14">pass@1 − DAPO, 95% intervals over seeds</text>',
        *(f'<text x="12" y="{top + line * i + 14}">{escape(arm)}</text>' for i, arm in enumerate(arms)),
    ]
    for column, (title, rows) in enumerate(tasks.items()):
        zero, scale = left + width * (column + 0.5), (width / 2 - 14) / most
        parts += [
            f'<text x="{zero}" y="46" text-anchor="middle">{title}</text>',
            f'<rect class="band" x="{zero - plan.MARGIN * scale:.1f}" y="{top}" width="{2 * plan.MARGIN * scale:.1f}" '
            f'height="{below - top}"/><line class="axis" x1="{zero}" x2="{zero}" y1="{top}" y2="{below}"/>',
            *(f'<text x="{zero + x * scale:.1f}" y="{below + 18}" text-anchor="middle">{x:+.3f}</text>'
              for x in (-most, 0, most)),
        ]  # fmt: skip
        for row in (row for row in rows if row.than_baseline):
            d, y = row.than_baseline[plan.SCORES[0]], top + line * arms.index(row.arm) + 10
            x, low, high = (zero + max(-most, min(most, v)) * scale for v in (d.value, d.low, d.high))
            parts.append(
                f'<g class="{row.verdict or "plain"}" stroke-width="2"><line x1="{low:.1f}" x2="{high:.1f}" '
                f'y1="{y}" y2="{y}"/><circle cx="{x:.1f}" cy="{y}" r="4"/></g>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"
