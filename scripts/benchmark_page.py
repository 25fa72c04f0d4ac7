"""The page of the benchmark's results, docs/benchmark-results.md, and its forest plots."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from statistics import fmean, median

import numpy as np
from benchmark_stages import SCREEN_RATES, better, by_seed, chosen_rates, missing, seeds_of, start_of
from scipy.stats import f, spearmanr

from dew.compare import Difference, Result, corrected, paired
from dew.compare.statistics import SIGNIFICANT, Interval
from dew.compare.verdicts import listed, markdown_table, signed
from dew.engines.lab.summary import noise
from dew.errors import ConfigError
from dew.report import benchmark as b
from dew.report.benchmark import Runs
from dew.run.folder import RunFolder

NOTES = """The plan is on [its own page](benchmark.md). `python scripts/benchmark.py page` writes this one from
the runs in `docs/results/benchmark/`. Where the plan is silent: `entropy_advantage` and `kl_cov` weight tokens in their
loss, which no placebo permutes; without a placebo they cannot win. The interim look of stage 3 on task A spends an
alpha of 0.005, which leaves 0.045 for the last one. The first runs of `w_reinforce` and `reinforce_pp` are kept apart
and do not count (addition 29 of the plan)."""


def page(runs: Runs) -> tuple[str, dict[str, str]]:
    """Markdown, the result first, and SVG files by name."""
    parts, images, replication = ["# The benchmark's results"], dict[str, str](), _replication(runs)
    parts.append(_answer(runs, replication.partition("\n")[0]))
    by_stage = {
        stage: {task: found for task in b.STAGES[stage].seeds if (found := b.stage_rows(stage, task, runs))}
        for stage in ("stage3", "stage2")
    }
    decides = any(_alpha(task, found) is not None for task, found in by_stage["stage3"].items())
    for stage, rows in sorted(by_stage.items(), reverse=decides):  # stage 3 is first once it has an analysis
        if rows:
            images[name := f"benchmark-{stage}.svg"] = forest({b.TASKS[task].title: x for task, x in rows.items()})
            parts += [f"## Stage {stage[-1]}", f"![pass@1 − DAPO, with a band of ±{b.MARGIN}](images/{name})", b.ABOUT]
        for task, found in rows.items():
            given = [row.than_baseline[b.SCORES[0]] for row in found if row.verdict]
            seeds = " to ".join(str(n) for n in sorted({end(seeds_of(found)) for end in (min, max)}))
            about = f"{seeds} of {b.STAGES[stage].seeds[task]} seeds."
            parts += [f"### {task}: {b.TASKS[task].title}", about, b.table(found)]
            parts += noise(given, runs[f"{stage}-{task}"])
            parts += _components(found, runs.get("stage1-A-train", ())) if stage == "stage2" else []
    if screen := _screening(runs.get("screen-A-train", ())):
        text, images["benchmark-screen.svg"] = screen
        parts += ["## Screening of further candidates", text]
    if replication:
        parts += ["## Replication", replication]
    tried = {task: of for task in b.STAGES["stage1"].seeds if (of := b.rate_means(runs.get(f"stage1-{task}", ())))}
    parts += ["## Stage 1: the learning rate of each rule"] * bool(tried)
    for task, of in tried.items():
        parts += [f"### {task}: {b.TASKS[task].title}", _rates(of, task, runs)]
    parts += ["## Runs", _progress(runs) if any(runs.values()) else "No run has been made yet.", NOTES]
    return "\n\n".join(part.strip() for part in parts) + "\n", images


def _answer(runs: Runs, replication: str) -> str:
    """The result so far, in a few sentences."""
    begun = {task: found for task in b.STAGES["stage3"].seeds if (found := b.stage_rows("stage3", task, runs))}
    unfinished = [about for task, n in b.STAGES["stage3"].seeds.items() if (about := _unfinished(task, n, begun))]
    rows = {task: found for task, found in begun.items() if _alpha(task, found) is not None}
    if not rows:
        first = "**No rule is known to beat DAPO in pass@1 on a language model.**"
        second = f"Stage 3 decides it: {'; '.join(unfinished)}."
        return " ".join([first, *_second(runs), second, replication])
    words = ("win", "level", "loss", "open")
    of = {word: {task: [row.arm for row in x if row.verdict == word] for task, x in rows.items()} for word in words}
    of["better"] = {task: [arm for arm in better(task, runs) if arm not in of["win"][task]] for task in rows}
    text = {word: "; ".join(f"{', '.join(x)} ({task})" for task, x in arms.items() if x) for word, arms in of.items()}
    so_far = " so far" if unfinished else ""
    won = f"Rules that win against DAPO in pass@1{so_far}: {text['win']}."
    parts = [f"**{won if text['win'] else f'No rule wins against DAPO in pass@1{so_far}.'}**"]
    parts += [f"Stage 3 is not finished: {'; '.join(unfinished)}."] * bool(unfinished)
    parts += [f"Better than DAPO, but not known to be better than a placebo: {text['better']}."] * bool(text["better"])
    return " ".join([*parts, *(f"{word.capitalize()}: {text[word] or 'none'}." for word in words[1:])])


def _unfinished(task: str, planned: int, rows: Mapping[str, Sequence[b.Row]]) -> str:
    """How many of the planned seeds of stage 3 a task has, and what that allows; empty if it has all."""
    found = rows.get(task, ())
    seeds, alpha = min(seeds_of(found), default=0), _alpha(task, found)
    about = "no verdicts yet" if alpha is None else f"interim analysis with alpha {alpha:g}"
    return f"{task} has {seeds} of {planned} seeds{f' ({about})' if seeds else ''}" if seeds < planned else ""


def _alpha(task: str, rows: Sequence[b.Row]) -> float | None:
    """The alpha of the analysis of stage 3 that the seeds so far allow."""
    return b.alpha_of("stage3", task, min(seeds_of(rows), default=0))


def _second(runs: Runs) -> list[str]:
    rows = b.stage_rows("stage2", "A", runs)
    found = {row.arm: row.than_baseline[b.SCORES[0]] for row in rows if row.verdict}
    if not found:
        return []
    try:
        planned = set(chosen_rates(runs))
    except ConfigError:  # stage 1 is not finished
        planned = set(b.ARMS)
    most = max(d.pairs for d in found.values())
    lacking = [x for x in b.ARMS[1:] if x in planned and (x not in found or found[x].pairs < most)]
    clear = {arm: d.value for arm, d in found.items() if d.holm < SIGNIFICANT}
    ahead, behind = ([arm for arm, value in clear.items() if (value > 0) == wanted] for wanted in (True, False))
    seeds = f"{most} of {b.STAGES['stage2'].seeds['A']} seeds"
    return [
        f"In stage 2 ({seeds}), of {len(found)} rules at their own rates, better than DAPO: "
        f"{listed(ahead or ['none'])}; worse: {listed(behind or ['none'])}.",
        *[f"Runs of {listed(lacking)}, which are also planned, are missing there."] * bool(lacking),
    ]


def _components(rows: Sequence[b.Row], tuning: Sequence[Result]) -> Iterator[str]:
    """How much rules differ, how much seeds, and how much a rule's learning rate changes."""
    alike = [row for row in rows if row.arm in b.ARMS and row.verdict != "loss"]
    by_rule = {row.arm: {r.seed: r.scores[b.SCORES[0]] for r in row.runs} for row in alike}
    seeds = sorted(set.intersection(*map(set, by_rule.values()))) if by_rule else []
    scores = np.array([[of[seed] for seed in seeds] for of in by_rule.values()])
    tuned = {arm: list(of.values()) for arm, of in b.rate_means(tuning).items() if arm in by_rule and len(of) > 1}
    if min(scores.shape) < 2 or len(tuned) < 2:
        return
    rules, seeded = scores.mean(1), scores.mean(0)
    rest = scores - rules[:, None] - seeded + scores.mean()
    (n, k), free = scores.shape, (len(rules) - 1) * (len(seeds) - 1)
    error = (rest**2).sum() / free
    ratio = k * rules.var(ddof=1) / error
    between, over = (max(0.0, x.var(ddof=1) - error / m) ** 0.5 for x, m in ((rules, k), (seeded, n)))
    ranks = spearmanr([max(tuned[arm]) for arm in tuned], [fmean(by_rule[arm].values()) for arm in tuned]).statistic
    ranges = sorted(max(of) - min(of) for of in tuned.values())
    differ = "more than by chance" if (p := f.sf(ratio, n - 1, free)) < SIGNIFICANT else "no more than by chance"
    yield (
        f"How much rules differ (not planned in advance): in pass@1, the standard deviation between the {n} rules "
        f"without a loss is {between:.3f}, between seeds {over:.3f}, of the rest {error**0.5:.3f}. Taken together, "
        f"the rules differ {differ} (F({n - 1}, {free}) = {ratio:.2f}, p = {p:.4f}). The rank correlation of their "
        f"pass@1 with that in stage 1, which has other seeds and problems, is {ranks:.2f}. In stage 1 the learning "
        f"rate changes a rule's pass@1, a mean of few seeds, by {ranges[0]:.3f} to {ranges[-1]:.3f}, in the median by "
        f"{median(ranges):.3f}."
    )


def _progress(runs: Runs) -> str:
    lines = []
    for job, of in ((job, runs[job]) for job in runs if runs[job]):
        stage, _, task = job.partition("-")
        facts = [RunFolder(str(r.folder)).run() for r in of]
        times = {(x["started"], x["finished"]) for x in facts}  # those of a stack are the same
        began, ended = (sum(datetime.fromisoformat(x).timestamp() for x in xs) for xs in zip(*times, strict=True))
        try:
            todo = str(len(missing(stage, task, runs)))
        except ConfigError:
            todo = "not known yet"
        machine = ", ".join(sorted({str(x["machine"]["gpu"] or "CPU") for x in facts}))
        start = f"{start_of(task, runs):.3f}" if runs.get(f"start-{task}") else ""
        about = [stage, f"{task}: {b.TASKS[task].title}", Path(facts[0]["warm_start"]["model"]).name, start]
        lines.append([*about, str(len(of)), todo, f"{(ended - began) / 60:.0f}", machine])
    head = ["stage", "task", "model", "pass@1 at the start", "runs", "missing", "minutes", "machine"]
    return markdown_table(head, lines)


def _replication(runs: Runs) -> str:
    rows = b.stage_rows("replication", "A", runs)
    found = [row.than_baseline[b.SCORES[0]] for row in rows if row.arm == "dew" and row.than_baseline]
    if not found:
        return ""
    d = found[0]
    value, half = json.loads((b.COMMITTED.parent / "lora-20-seeds.json").read_text())["table"]["dew − dapo"][2]
    old = Interval(value, value - half, value + half)
    word = "agrees" if d.low <= old.high and old.low <= d.high else "does not agree"
    both = (
        f"In the replication, `dew` − DAPO is {signed(d)} over {d.pairs} seeds; the prototype's, {signed(old)}, {word}."
    )
    return "\n\n".join([both, b.table(rows), *noise(found, runs["replication-A"])])


def _rates(means: Mapping[str, Mapping[float, float]], task: str, runs: Runs) -> str:
    every, lines = sorted({rate for of in means.values() for rate in of}), []
    for arm, of in means.items():
        cells = {rate: f"**{x:.3f}**" if x == max(of.values()) else f"{x:.3f}" for rate, x in of.items()}
        lines.append([arm, *(cells.get(rate, "") for rate in every)])
    start = f"At the start: {start_of(task, runs):.3f}." if runs.get(f"start-{task}") else ""
    return markdown_table(["pass@1", *(f"{rate:g}" for rate in every)], lines) + f"\n{start}"


def _screening(runs: Sequence[Result]) -> tuple[str, str] | None:
    """Candidates against DAPO and their placebos, as text and as an image."""
    of = b.by_arm(runs)

    def differences(score: str, pairs: Mapping[str, str | None]) -> dict[str, Difference]:
        values = {arm: by_seed(x, score) for arm, x in of.items()}
        found = (paired(values[x], values[y], arm=x, baseline=y, score=score) for x, y in pairs.items() if y in of)
        return {d.arm: d for d in corrected(d for d in found if d)}

    candidates = [arm for arm in b.CANDIDATES if arm in of]
    than = [differences(score, dict.fromkeys(candidates, b.BASELINE)) for score in b.SCORES]
    placebo = differences(b.SCORES[0], {arm: b.companions(arm)[1] for arm in candidates})
    lines = []
    for arm, d in than[0].items():
        others = [signed(x[arm]) for x in than[1:]]
        lines.append(
            [arm, str(d.pairs), signed(d), f"{d.holm:.3f}", *others, *map(signed, filter(None, [placebo.get(arm)]))]
        )
    if not lines:
        return None
    head = ("candidate", "seeds", "pass@1 − DAPO", "p", "area − DAPO", "pass@4 − DAPO", "pass@1 − placebo")
    cells = [[*line, *[""] * (len(head) - len(line))] for line in lines]
    planned, rates = b.STAGES["screen"].seeds["A-train"], " and ".join(f"{rate:g}" for rate in SCREEN_RATES)
    clear = ", ".join(arm for arm, d in than[0].items() if d.holm < SIGNIFICANT) or "none"
    about = f"""{max(d.pairs for d in than[0].values())} of {planned} seeds. A seed's value is its mean over the
learning rates {rates}; p is Holm's, over the candidates. Different from DAPO: {clear}. Commit ed304a7e has the
settings of `dew` that did not advance and have been removed since.

![pass@1 − DAPO of the candidates](images/benchmark-screen.svg)

"""
    rows = [b.Row(arm, of[arm], {b.SCORES[0]: d}) for arm, d in than[0].items()]
    return about + markdown_table(head, cells), forest({b.TASKS["A-train"].title: rows})


STYLE = """text { fill: #222 } .back { fill: #fff } .band { fill: #eee } .axis { stroke: #888 }
g { color: #2864dc; stroke: currentcolor; fill: currentcolor } .win { color: #188038 } .loss { color: #c5221f }
.plain { color: #888 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .back { fill: #16181c } .band { fill: #2a2d33 }
g { color: #8ab4f8 } .win { color: #81c995 } .loss { color: #f28b82 } .plain { color: #888 } }"""


def forest(tasks: Mapping[str, Sequence[b.Row]]) -> str:
    """An SVG of the differences from the baseline in pass@1: a line for each arm, a panel for each task."""
    names = {row.arm: b.title(row.arm, rows) for rows in tasks.values() for row in rows if row.than_baseline}
    arms = list(names)
    shown = [row for rows in tasks.values() for row in rows if row.than_baseline]
    judged = [row.than_baseline[b.SCORES[0]] for row in shown if row.verdict or not any(x.verdict for x in shown)]
    most = min(max([2 * b.MARGIN, *(abs(x) for d in judged for x in (d.low, d.high))]), 0.2)
    left, width, top, line = 14 + 7 * max(map(len, names.values()), default=0), 480 if len(tasks) == 1 else 240, 60, 20
    below, total = top + line * len(arms), left + width * len(tasks) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {below + 34}" width="{total}" '
        f'font-family="sans-serif" font-size="12"><style>{STYLE}</style>',
        '<rect class="back" width="100%" height="100%"/>',
        '<text x="12" y="22" font-size="14">pass@1 − DAPO, 95% intervals over seeds</text>',
        *(f'<text x="12" y="{top + line * i + 14}">{escape(name)}</text>' for i, name in enumerate(names.values())),
    ]
    for column, (title, rows) in enumerate(tasks.items()):
        zero, scale = left + width * (column + 0.5), (width / 2 - 26) / most
        parts += [
            f'<text x="{zero}" y="46" text-anchor="middle">{title}</text>',
            f'<rect class="band" x="{zero - b.MARGIN * scale:.1f}" y="{top}" width="{2 * b.MARGIN * scale:.1f}" '
            f'height="{below - top}"/><line class="axis" x1="{zero}" x2="{zero}" y1="{top}" y2="{below}"/>',
            *(f'<text x="{zero + x * scale:.1f}" y="{below + 18}" text-anchor="middle">{x:+.3f}</text>'
              for x in (-most, 0, most)),
        ]  # fmt: skip
        for row in (row for row in rows if row.than_baseline):
            d, y = row.than_baseline[b.SCORES[0]], top + line * arms.index(row.arm) + 10
            x, low, high = (zero + max(-most, min(most, v)) * scale for v in (d.value, d.low, d.high))
            drawn = f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/><circle cx="{x:.1f}" cy="{y}" r="4"/>'
            if abs(d.value) > most:
                end = 'start">← {}' if d.value < 0 else 'end">{} →'
                drawn = (
                    f'<text stroke="none" x="{x:.1f}" y="{y + 4}" text-anchor="{end.format(f"{d.value:+.3f}")}</text>'
                )
            parts.append(f'<g class="{row.verdict or "plain"}" stroke-width="2">{drawn}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"
