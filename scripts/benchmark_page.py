"""The page of the benchmark's results, docs/benchmark-results.md, from benchmark_page.md, and its forest plot."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from itertools import groupby
from math import ceil
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

import numpy as np
from benchmark_stages import RANDOM, alpha_of, better, by_seed, finalists, missing, points, seeds_of, start_of
from scipy.stats import f, spearmanr

from dew.compare import Result
from dew.compare.statistics import SIGNIFICANT, Interval, seeds_needed
from dew.compare.verdicts import listed, markdown_table, signed
from dew.engines.lab.summary import noise
from dew.report import benchmark as b
from dew.report.benchmark import Runs
from dew.run.folder import RunFolder

FIRST = b.SCORES[0]
RESULT = """**{won}** In stage 2, {rules} rules were compared with DAPO on GSM8K, each at its own
learning rate and over {pairs} seeds. After Holm's correction, {ahead} better and {behind} worse. The learning
rate changes pass@1 more than the rule does. [Stage 3](#stage-3), which decides, is {state}."""
NONE = "No rule measured here is known to beat DAPO in pass@1 on a language model."
OTHERS = ("rule", *(f"{score} − DAPO" for score in b.SCORES[1:]), "entropy", "length", "cut off", "KL")
Rows = Sequence[b.Row]


def page(runs: Runs) -> tuple[str, dict[str, str]]:
    """Markdown, the result first, and SVG files by name. Only stage 3 may be unfinished."""
    second, decided = {"A": b.stage_rows("stage2", "A", runs)}, {}
    for task in b.STAGES["stage3"].seeds:  # an analysis is planned for its seeds, and no rule is missing
        rows = b.stage_rows("stage3", task, runs)
        if alpha_of(task, rows) is not None:
            rules = dict(points("stage3", task, runs)).keys() & set(finalists(runs))
            decided |= {task: rows} if rules <= {row.arm for row in rows} else {}
    images = {f"benchmark-stage{n}.svg": forest(of) for n, of in ((2, second), (3, decided)) if of}
    about, unfinished = _against_dapo(second["A"], runs), _unfinished(runs, decided)
    stages = [["## Stage 2", *_stage("stage2", second, runs)]]
    stages.insert(0 if decided else 1, ["## Stage 3", unfinished, *_stage("stage3", decided, runs)])
    found = about | _components(second["A"], runs) | _replication(runs) | _screening(runs)
    found |= {"tuning": "\n\n".join(_tuning(runs)), "stages": "\n\n".join(x for of in stages for x in of if x)}
    found["finished"] = "".join(_finished(task, rows) for task, rows in decided.items())
    answer = RESULT.format(**about, won=_winners(decided), state="not finished" if unfinished else "complete")
    found |= {"answer": answer + _decided(decided, runs), "costs": _costs(runs), "about": b.ABOUT}
    text = Path(__file__).with_suffix(".md").read_text().format(**found)
    return re.sub(r"(?<= \| )---(?= \|)", "--:", text), images  # numbers are aligned on the right


# ── the result in words ─────────────────────────────────────────────────────────────────────────────────────
def _winners(decided: Mapping[str, Rows]) -> str:
    won = _named({task: [row.arm for row in rows if row.verdict == "win"] for task, rows in decided.items()})
    return f"Rules that win against DAPO in pass@1 on a language model: {won}." if won else NONE


def _decided(decided: Mapping[str, Rows], runs: Runs) -> str:
    """A sentence on each task, and on rules that are ahead but may be no better than a placebo."""
    found = "".join(f" On {b.TASKS[task].title}, {_counts(rows)}." for task, rows in decided.items())
    wins = {(task, row.arm) for task, rows in decided.items() for row in rows if row.verdict == "win"}
    close = _named({task: [arm for arm in better(task, runs) if (task, arm) not in wins] for task in decided})
    return found + f" Better than DAPO, but not known to be better than a placebo: {close}." * bool(close)


def _named(arms: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{listed(of)} on {b.TASKS[task].title}" for task, of in arms.items() if of)


def _counts(rows: Rows) -> str:
    """How many rules have which verdict; those that are not open are named."""
    words = {"win": ("wins", "win"), "level": ("is level", "are level"), "loss": ("loses", "lose")}
    of = {verdict: [row.arm for row in rows if row.verdict == verdict] for verdict in (*words, "open")}
    found = [f"{len(x)} {words[w][len(x) > 1]} ({', '.join(x)})" for w, x in of.items() if x and w in words]
    found = found if of["win"] else ["none wins", *found]
    left = f"{len(of['open'])} stay{'s' * (len(of['open']) == 1)} open"
    return f"of {sum(map(len, of.values()))} rules, {listed([*found, left])}"


def _finished(task: str, rows: Rows) -> str:
    """What stage 3 says on a task, as an item of a list."""
    judged = [row.than_baseline[FIRST] for row in rows if row.verdict]
    first, last = (f"{signed(d)} ({d.arm})" for d in (judged[-1], judged[0]))
    other = {row.arm: signed(row.than_baseline[FIRST]) for row in rows if row.arm in ("dew", RANDOM)}
    about = f"{Path(b.TASKS[task].model).name}, {min(seeds_of(rows))} seeds"
    named = "; ".join(f"`{arm}` {text}" for arm, text in other.items())
    return f"""
- **Stage 3 on {b.TASKS[task].title}** ({about}): {_counts(rows)}. Differences from DAPO
  range from {first} to {last}; {named}."""


def _unfinished(runs: Runs, decided: Mapping[str, Rows]) -> str:
    """Which seeds stage 3 lacks; empty if it has all."""
    texts = []
    for task, planned in b.STAGES["stage3"].seeds.items():
        seeds = min(seeds_of(b.stage_rows("stage3", task, runs)), default=0)
        alpha = f" (interim analysis, alpha {alpha_of(task, decided[task]):g})" if task in decided else ""
        texts += [f"{task} ({b.TASKS[task].title}) has {seeds} of {planned} seeds{alpha}"] * (seeds < planned)
    about = """Not finished: {}. The finalists are {}. A task is shown once it has the seeds of its first planned
analysis ({} on A). Until then, its runs are only in the data."""
    return about.format("; ".join(texts), listed(finalists(runs)), b.INTERIM[0]) if texts else ""


def _against_dapo(rows: Rows, runs: Runs) -> dict[str, Any]:
    of = {row.arm: row for row in rows}
    found = {row.arm: row.than_baseline[FIRST] for row in rows if row.verdict}
    clear = {arm: d for arm, d in found.items() if d.holm < SIGNIFICANT}
    ahead, behind = ([f"{x} ({signed(d)})" for x, d in clear.items() if (d.value > 0) == y] for y in (True, False))
    best, pairs = next(iter(found.values())), min(d.pairs for d in found.values())
    total = fmean(variance(d.by_pair) for d in found.values()) ** 0.5
    tried = sorted(b.rate_means(runs["stage1-A-train"])[b.BASELINE].items(), key=lambda at: -at[1])
    return {
        "dapo_rates": " and ".join(f"{x:.3f} at {b.rate(rate)}" for rate, x in tried[:2]),
        "rules": len(found), "ahead": _subject(ahead), "behind": _subject(behind), "pairs": pairs,
        "best": f"{best.arm}, {signed(best)}", "start": start_of("A", runs, "stage2"), "needed": seeds_needed(total),
        **{arm: fmean(r.scores[FIRST] for r in of[arm].runs) for arm in (b.BASELINE, RANDOM)},
        "least": next(x for x in range(1, 1000) if seeds_needed(total, x / 1000) <= pairs) / 1000,
    }  # fmt: skip


def _subject(arms: Sequence[str]) -> str:
    return f"{listed(arms or ['none'])} {'are' if len(arms) > 1 else 'is'}"


def _components(rows: Rows, runs: Runs) -> dict[str, Any]:
    """How much rules differ, and how much one rule at several learning rates."""
    alike = {row.arm: row.runs for row in rows if row.arm in b.ARMS and row.verdict != "loss"}
    tuning = sorted((r for r in runs["stage1-A-train"] if r.arm in alike), key=lambda r: (r.arm, r.learning_rate))
    grids = [
        _grid([list(x) for _, x in groupby(of, key=lambda r: r.learning_rate)])
        for _, of in groupby(tuning, key=lambda r: r.arm)
    ]
    scores = _grid(list(alike.values()))
    (n, k), (between, error) = scores.shape, _variances(scores)
    free, ratio = (n - 1, (n - 1) * (k - 1)), 1 + k * between / error
    best = {arm: max(of.values()) for arm, of in b.rate_means(tuning).items()}
    ranks = spearmanr([best[arm] for arm in alike], scores.mean(1)).statistic
    ranges = [float(np.ptp(x.mean(1))) for x in grids]
    rates = fmean(_variances(x)[0] for x in grids)
    return {
        "alike": n, "free": free, "ratio": ratio, "p": f.sf(ratio, *free), "ranks": ranks, "noise_sd": error**0.5,
        "rules_sd": max(0, between) ** 0.5, "rates_sd": max(0, rates) ** 0.5, "smallest": min(ranges),
        "widest": max(ranges), "middle": median(ranges),
    }  # fmt: skip


def _grid(groups: Sequence[Sequence[Result]]) -> Any:
    """pass@1 by group and seed."""
    return np.array([[r.scores[FIRST] for r in sorted(group, key=lambda r: r.seed)] for group in groups])


def _variances(scores: Any) -> tuple[float, float]:
    """The variance between the rows of a two-way layout without noise (negative by chance), and that of the noise."""
    (n, k), mean = scores.shape, scores.mean(1)
    error = ((scores - mean[:, None] - scores.mean(0) + scores.mean()) ** 2).sum() / ((n - 1) * (k - 1))
    return mean.var(ddof=1) - error / k, error


def _replication(runs: Runs) -> dict[str, Any]:
    rows = b.stage_rows("replication", "A", runs)
    row = next(row for row in rows if row.arm == "dew")
    d = row.than_baseline[FIRST]
    value, half = json.loads((b.COMMITTED.parent / "lora-20-seeds.json").read_text())["table"]["dew − dapo"][2]
    old = Interval(value, value - half, value + half)
    return {
        "replicated": d.pairs, "dew": signed(d), "dew_placebo": signed(row.than_placebo), "prototype": signed(old),
        "agrees": "agrees" if d.low <= old.high and old.low <= d.high else "does not agree",
        "replication": "\n\n".join([b.table(rows).strip(), *noise([d], runs["replication-A"])]),
    }  # fmt: skip


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────
def _stage(stage: str, tasks: Mapping[str, Rows], runs: Runs) -> Iterator[str]:
    if tasks:
        yield f"![pass@1 − DAPO, with a band of ±{b.MARGIN}](images/benchmark-{stage}.svg)"
    for task, rows in tasks.items():
        judged = [row.than_baseline[FIRST] for row in rows if row.verdict]
        yield f"**{task}: {b.TASKS[task].title}**, {min(seeds_of(rows))} of {b.STAGES[stage].seeds[task]} seeds:"
        yield b.table(rows).strip()
        yield from noise(judged, runs[f"{stage}-{task}"])
        yield f"Other scores:\n\n{b.table(rows, OTHERS).strip()}"


def _screening(runs: Runs) -> dict[str, Any]:
    """Candidates against DAPO and their placebos."""
    values = {arm: by_seed(of, FIRST) for arm, of in b.by_arm(runs["screen-A-train"]).items()}
    than = b.differences(values, dict.fromkeys(b.CANDIDATES, b.BASELINE), FIRST)
    placebo = b.differences(values, {arm: b.companions(arm)[1] for arm in than}, FIRST)
    ordered = sorted(than.values(), key=lambda d: -d.value)
    lines = [[d.arm, signed(d), f"{d.holm:.3f}", signed(placebo[d.arm]) if d.arm in placebo else ""] for d in ordered]
    return {
        "screened": ordered[0].pairs, "screen_rates": " and ".join(map(b.rate, b.RATES)),
        "different": listed([d.arm for d in ordered if d.holm < SIGNIFICANT] or ["none"]),
        "screening": markdown_table(["candidate", "pass@1 − DAPO", "p", "pass@1 − placebo"], lines).strip(),
    }  # fmt: skip


def _tuning(runs: Runs) -> Iterator[str]:
    """pass@1 of each rule at each learning rate, for each task on which rates are chosen."""
    for task in b.STAGES["stage1"].seeds:
        if means := b.rate_means(runs.get(f"stage1-{task}", ())):
            every, lines = sorted({x for of in means.values() for x in of}), []
            best = {arm: max(of, key=of.__getitem__) for arm, of in means.items()}
            for arm, of in means.items():
                cells = {x: f"{'**' * (x == best[arm])}{y:.3f}{'**' * (x == best[arm])}" for x, y in of.items()}
                lines.append([arm, *(cells.get(x, "") for x in every)])
            edge = [arm for arm, of in means.items() if best[arm] in (min(of), max(of))]
            at_edge = f" Best at the lowest or highest rate tried: {listed(edge)}." * bool(edge)
            yield f"**{task}: {b.TASKS[task].title}**, {start_of(task, runs, 'stage1'):.3f} at the start.{at_edge}"
            yield markdown_table(["rule", *map(b.rate, every)], lines).strip()


def _costs(runs: Runs) -> str:
    lines, total, machines = [], 0.0, set[str]()
    for job, of in ((job, runs[job]) for job in runs if runs[job]):
        stage, _, task = job.partition("-")
        facts = [RunFolder(str(r.folder)).run() for r in of]
        times = {(x["started"], x["finished"]) for x in facts}  # those of a stack are the same
        began, ended = (sum(datetime.fromisoformat(x).timestamp() for x in xs) for xs in zip(*times, strict=True))
        total += (minutes := (ended - began) / 60)
        machines |= {str(x["machine"]["gpu"] or "CPU") for x in facts}
        about = f"{stage}, {task}: {b.TASKS[task].title}, {Path(facts[0]['warm_start']['model']).name}"
        lines += [[about, str(len(of)), str(len(missing(stage, task, runs))), f"{minutes:.0f}"]] * (stage != "start")
    head = ["stage, task, model", "runs", "missing", "minutes"]
    whole = f"{sum(map(len, runs.values()))} runs took {total:.0f} minutes of {listed(sorted(machines))}"
    return f"{whole}, evaluations included; the runs of a stack train at once.\n\n{markdown_table(head, lines).strip()}"


# ── forest plot ─────────────────────────────────────────────────────────────────────────────────────────────
STYLE = """text { fill: #222 } .back { fill: #fff } .band { fill: #eee } .axis { stroke: #888 }
g { color: #2864dc; stroke: currentcolor; fill: currentcolor } .win { color: #188038 } .loss { color: #c5221f }
.plain { color: #888 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .back { fill: #16181c } .band { fill: #2a2d33 }
g { color: #8ab4f8 } .win { color: #81c995 } .loss { color: #f28b82 } .plain { color: #888 } }"""


def forest(tasks: Mapping[str, Rows]) -> str:
    """An SVG of the differences from the baseline in pass@1: a line for each arm, a panel for each task."""
    shown = [(row, rows) for rows in tasks.values() for row in rows if row.than_baseline]
    names = {row.arm: b.title(row.arm, rows) for row, rows in shown}
    ends = [abs(x) for row, _ in shown if row.verdict for d in [row.than_baseline[FIRST]] for x in (d.low, d.high)]
    most = min(ceil(max([2 * b.MARGIN, *ends]) / 0.02) * 0.02, 0.2)
    left, width, top, line = 14 + 7 * max(map(len, names.values())), 400 if len(tasks) == 1 else 220, 60, 20
    below, total = top + line * len(names), left + width * len(tasks) + 16
    at = {arm: top + line * i + 10 for i, arm in enumerate(names)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {below + 34}" width="{total}" '
        f'font-family="sans-serif" font-size="13"><style>{STYLE}</style>',
        '<rect class="back" width="100%" height="100%"/>',
        '<text x="12" y="22" font-size="15">pass@1 − DAPO, 95% intervals over seeds; right is better</text>',
        *(f'<text x="12" y="{at[arm] + 4}">{escape(name)}</text>' for arm, name in names.items()),
    ]
    for column, (task, rows) in enumerate(tasks.items()):
        zero, scale = left + width * (column + 0.5), (width / 2 - 26) / most
        parts += [
            f'<text x="{zero}" y="46" text-anchor="middle">{b.TASKS[task].title}</text>',
            f'<rect class="band" x="{zero - b.MARGIN * scale:.1f}" y="{top}" width="{2 * b.MARGIN * scale:.1f}" '
            f'height="{below - top}"/><line class="axis" x1="{zero}" x2="{zero}" y1="{top}" y2="{below}"/>',
            *(f'<text x="{zero + x * most * scale:.1f}" y="{below + 18}" text-anchor="middle">{x * most:+.2f}</text>'
              for x in (-1, -0.5, 0, 0.5, 1)),
        ]  # fmt: skip
        for row in rows[1:]:
            d, y = row.than_baseline[FIRST], at[row.arm]
            x, low, high = (zero + max(-most, min(most, v)) * scale for v in (d.value, d.low, d.high))
            drawn = f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/><circle cx="{x:.1f}" cy="{y}" r="4"/>'
            if abs(d.value) > most:
                text = 'start">← {}' if d.value < 0 else 'end">{} →'
                drawn = f'<text stroke="none" x="{x:.1f}" y="{y + 4}" text-anchor="{text.format(signed(d))}</text>'
            parts.append(f'<g class="{row.verdict or "plain"}" stroke-width="2">{drawn}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"
