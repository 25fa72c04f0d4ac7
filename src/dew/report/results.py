"""Results of runs: one row per metric with paired differences between arms, and findings in words (verdicts, changes of
scores, alarms, and findings from the recorded tokens)."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from dew.compare import Difference, corrected, paired, verdicts
from dew.compare.grid import AREA, by_problem, main_scores, read_answers
from dew.compare.verdicts import TITLES, listed
from dew.errors import quoted
from dew.report.readers import Run
from dew.report.rules import recorded_rule
from dew.run.alarms import FIRST, Alarms
from dew.run.folder import RunFolder, algorithm_of
from dew.run.records import Json

METRICS = {
    "accuracy": "share of correct answers in training",
    "reward": "mean reward in training",
    "entropy": "nats per token",
    "length/mean": "tokens per answer",
    "length/truncated_share": "share of truncated answers",
    "groups/mixed_share": "share of groups with different outcomes",
    "credit/flipped_share": "share of tokens with credit of the wrong sign",
}
"""Metrics that get a row, after the scores."""
EVAL_PASS = re.compile(r"(eval/(?:.+_)?)pass@\d")
"""pass@k during training. The regex group is the prefix of an evaluation set, `eval/` or `eval/<set>_`."""
answers_of = cache(read_answers)


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────
def rows_of(runs: Sequence[Run], arms: Sequence[Json]) -> list[Json]:
    """Return rows of scores, then of metrics: {name, note, link, before, after, low, high (per run), differences}."""
    answers_of.cache_clear()
    scores = _score_rows(runs)
    rows = [*(_area_row(runs, scores) if len(runs) > 1 else ()), *scores, *_metric_rows(runs, scores)]
    for row in rows:
        row["differences"] = _differences(runs, arms, row)
    return rows


def _area_row(runs: Sequence[Run], scores: Sequence[Json]) -> list[Json]:
    """Return a row with the mean accuracy in training, if no run has it among its scores."""
    curves = [_values(run, "accuracy") for run in runs]
    if not any(curves) or any(row["name"] == AREA for row in scores):
        return []
    tasks = {row["task"] for row in scores}
    row = {**_row(runs, AREA, TITLES[AREA]), "task": tasks.pop() if len(tasks) == 1 else ""}
    return [{**row, "after": [fmean(curve) if curve else None for curve in curves]}]


def _score_rows(runs: Sequence[Run]) -> list[Json]:
    found: dict[tuple[str, ...], Json] = {}
    for i, run in enumerate(runs):
        for entry in run.scores:
            scores = entry["scores"] if isinstance(entry.get("scores"), dict) else {}
            for name in _shown(scores):
                scored = f"{entry.get('n_problems')} problems × {entry.get('k')} answers"
                key = (str(entry.get("task")), scored, str(entry.get("scored_by")), name)  # else not comparable
                row = found.setdefault(key, _row(runs, name, ""))
                row["task"], when = str(entry.get("task")), "before" if entry.get("when") == "before" else "after"
                row["note"] = f"{entry.get('task')}: {TITLES.get(name, scored)}"
                score = scores[name] if isinstance(scores[name], dict) else {}
                row[when][i] = _number(score.get("value"))
                if when == "after":
                    row["low"][i], row["high"][i] = _number(score.get("low")), _number(score.get("high"))
    return sorted(found.values(), key=lambda row: row["name"] == "final")  # the page opens with the first two


def _shown(scores: Mapping[str, Any]) -> list[str]:
    """Return the main scores or, if there is no pass@k, the first scores."""
    known = [name for name in scores if name in TITLES or re.fullmatch(r"pass@\d{1,6}", name)]
    return main_scores(known) or list(scores)[:4]


def _metric_rows(runs: Sequence[Run], scores: Sequence[Json]) -> list[Json]:
    names = {name for run in runs for line in (*run.metrics[:1], *run.metrics[-1:]) for name in line}
    evals = {name for run in runs for line in run.metrics for name in line if EVAL_PASS.match(name)}
    if any(row["name"] == "final" for row in scores):  # both ends of these curves are already among the scores
        names, evals = names - {"accuracy"}, set()
    sets = sorted({match[1] for name in evals if (match := EVAL_PASS.match(name))})
    picked = [of + n for of in sets for n in _shown({n.removeprefix(of): 0 for n in evals})]
    rows = []
    for name in [*picked, *(name for name in METRICS if name in names)]:
        row = _row(runs, name, METRICS.get(name, "held-out problems, during training"))
        for i, run in enumerate(runs):
            if values := _values(run, name):
                tenth = max(1, round(len(values) / 10))  # the means of the first and of the last tenth
                row["after"][i] = fmean(values[-tenth:])
                row["before"][i] = fmean(values[:tenth]) if len(values) > 1 else None
        if any(x is not None for x in row["after"]):
            rows.append(row)
    ends = [[row["before"], row["after"]] for row in rows if row["name"] == "accuracy"]
    return [r for r in rows if r["name"] != "reward" or [r["before"], r["after"]] not in ends]  # a single 0/1 reward


def _values(run: Run, name: str) -> list[float]:
    return [x for line in run.metrics if (x := _number(line.get(name))) is not None]


def _row(runs: Sequence[Run], name: str, note: str) -> Json:
    link = f"#{'curves' if note else 'overview'}&chart={quote(name, safe='', errors='replace')}"
    values = {key: [None] * len(runs) for key in ("before", "after", "low", "high")}
    return {"name": name, "note": note, "link": link, **values}


def _number(x: Any) -> float | None:
    good = isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e300
    return float(x) if good else None


def _differences(runs: Sequence[Run], arms: Sequence[Json], row: Json) -> list[Difference]:
    """Return differences between arms, paired by seed if both have several, or by problem if each has one run."""
    found = []
    for pair in _compared(arms):
        names = dict(zip(("arm", "baseline"), (arm["label"] for arm in pair), strict=True))
        both = [_by_seed(runs, arm, row) for arm in pair]
        if len(both[0].keys() & both[1].keys()) > 1:
            found.append(paired(*both, score=row["name"], task=row.get("task", ""), **names))
        elif "task" in row and all(row["after"][a["runs"][0]] is not None and len(a["runs"]) == 1 for a in pair):
            one, other = (answers_of(runs[arm["runs"][0]].folder) for arm in pair)
            found.append(by_problem(one, other, row["name"], **names))
    return corrected(found)


def _compared(arms: Sequence[Json]) -> list[tuple[Json, Json]]:
    """Return every arm that has a baseline, with it."""
    return [(arm, arms[arm["baseline"]]) for arm in arms if arms[arm["baseline"]] is not arm]


def _by_seed(runs: Sequence[Run], arm: Json, row: Json) -> dict[tuple[str, str, int], float]:
    """Return an arm's mean for each seed and warm start. Means over training also need equal numbers of steps."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for i in arm["runs"]:
        seed, x = runs[i].facts.get("seed"), row["after"][i]
        if None not in (seed, x):
            of_training = row["link"].startswith("#curves") or row["name"] in TITLES
            found.setdefault((str(seed), runs[i].start, _steps(runs[i]) if of_training else 0), []).append(x)
    return {key: fmean(values) for key, values in found.items()}


def _steps(run: Run) -> int:
    return run.metrics[-1]["step"] if run.metrics else 0


def headline(runs: Sequence[Run], arms: Sequence[Json], rows: Sequence[Json]) -> str:
    """Return model, task, budget and result: "tiny6 on countdown, 320 steps: dew 8% to 40% solved, dapo 35%"."""
    known = ({str(run.facts.get(name) or "") for run in runs} for name in ("model", "data"))
    model, data = (of.pop() if len(of) == 1 else "" for of in known)
    steps = max(map(_steps, runs))
    of = max((n for run in runs if isinstance(n := run.facts.get("steps"), int)), default=steps)
    budget = f"{steps} of {of} steps" if steps < of else f"{steps} step{'s' * (steps != 1)}" if steps else ""
    data = Path(data).name if data.startswith(("/", "~")) else data
    about = " on ".join(text for text in (Path(model).name, data) if text)
    about = ", ".join(text for text in (about, budget) if text)
    by_name = {row["name"]: row for row in reversed(rows) if any(x is not None for x in row["after"])}
    names = [x for x in ("pass@1", "eval/pass@1", "accuracy", "reward") if x in by_name]
    if not any(run.facts.get("uses_threshold", True) for run in runs):  # then graded rewards may all be on one side
        names.sort(key=lambda x: {*by_name[x]["before"], *by_name[x]["after"], None} in ({0, None}, {1, None}))
    name = next(iter(names), None)
    show, what = ("{:.3g}".format, "reward") if name == "reward" else ("{:.0%}".format, "solved")
    found = list[tuple[Json, str, list[float]]]()
    for arm in [*arms[1:], arms[0]] if name else ():
        both = (by_name[name][when] for when in ("before", "after"))
        before, after = ([x for i in arm["runs"] if (x := values[i]) is not None] for values in both)
        if after:
            found.append((arm, f"{show(fmean(before))} to " if before and not found else "", after))
    unequal = len({len(after) for *_, after in found}) > 1

    def who(arm: Json, n: int) -> str:
        runs = f" ({n} run{'s' * (n > 1)})" * unequal
        return f"{arm['label']}{runs} " if len(arms) > 1 else ""

    texts = [f"{who(arm, len(after))}{start}{show(fmean(after))}" for arm, start, after in found]
    if len(found) > 4:  # the baseline and the range: to name some of the others would be a choice
        with_baseline = found[-1][0] is arms[0]  # whether the baseline, which is last, has a value
        others = [fmean(after) for *_, after in found[: len(found) - with_baseline]]
        text = f"{len(others)} {'others' if with_baseline else 'arms'} {show(min(others))} to {show(max(others))}"
        texts = [*texts[len(others) :], text]
    texts[:1] = [f"{text} {what}" for text in texts[:1]]
    return ": ".join(text for text in (about, ", ".join(texts)) if text)


# ── findings in words ───────────────────────────────────────────────────────────────────────────────────────
MAX_CHECKED = 20_000
"""Maximum number of steps, over all runs, that are checked for alarms: the first and last ones of each run."""
MAX_PAIRED = 16
"""With more runs, the evaluated answers are not read to pair scores by problem."""


def findings_of(
    runs: Sequence[Run], arms: Sequence[Json], rows: Sequence[Json], summaries: Sequence[Sequence[Json]]
) -> list[Json]:
    """Return verdicts, then changes of scores, alarms and findings from tokens, bad ones first.

    A finding is {kind, text, remedy?, link?}. The kind is verdict, good, bad, amber (a property of the rule) or note;
    the link is an address within the page. `summaries`: those of each run's groups.
    """
    alarms, tokens = _alarms(runs, arms), _tokens(runs, arms, summaries)
    for sign in [finding for finding in alarms if finding["alarm"] == "wrong_sign"]:
        sign["kind"] = "amber"
        for finding in tokens:  # findings from the records are more precise
            finding["remedy"] = sign["remedy"]
        alarms = [finding for finding in alarms if finding is not sign or not tokens]
    found = [*_score_changes(runs, arms, rows), *alarms, *tokens]
    found += [{"kind": "note", "text": f"{_who(runs, i)}{n}"} for i, run in enumerate(runs) for n in run.notices]
    ended = [text for i, run in enumerate(runs) if (text := _ended(run, _who(runs, i)))]
    order = {"bad": 0, "amber": 1, "good": 2, "note": 3}
    return [*ended, *_verdicts(rows), *_unpaired(runs, arms, rows), *sorted(found, key=lambda x: order[x["kind"]])]


def _who(runs: Sequence[Run], i: int) -> str:
    return f"{runs[i].name}: " if len(runs) > 1 else ""


HOW = {
    "failed": "Stopped by an error",
    "killed": "Killed (its process ended without an error, often out of memory)",
    "stopped": "Interrupted",
}


def _ended(run: Run, who: str) -> Json | None:
    """Return why an incomplete run is no longer training, and how to resume it."""
    status, of = run.facts.get("status"), run.facts.get("steps")
    if status not in HOW:
        return None
    error = f": {run.facts['error']}" if run.facts.get("error") else "."
    folder = run.folder if run.folder and not run.folder.is_absolute() else Path(run.name)
    resumes = run.folder and any(run.folder.glob("checkpoint*"))
    how = "trainer.train(resume_from_checkpoint=True)" if run.config is None else f"dew resume {quoted(folder)}"
    remedy = f"Resume with `{how}`." if resumes else "No checkpoint was saved: train again."
    text = f"{who}{HOW[status]} at step {_steps(run)}{f' of {of}' if of else ''}{error}"
    kind = "note" if status == "stopped" else "bad"
    return {"kind": kind, "ended": True, "text": text, "remedy": remedy, "link": "#curves"}


def _verdicts(rows: Sequence[Json]) -> list[Json]:
    scored = [row for row in rows if row["differences"] and ("task" in row or row["name"].startswith("eval/"))]
    scored = scored or [row for row in rows if row["differences"]][:1]
    judged = [*scored, *(row for row in rows if row["name"] == "entropy" and row not in scored)]
    texts = verdicts([d for row in judged for d in row["differences"]])
    return [{"kind": "verdict", "link": scored[0]["link"], "text": text} for text in texts]


def _unpaired(runs: Sequence[Run], arms: Sequence[Json], rows: Sequence[Json]) -> list[Json]:
    steps = [{_steps(runs[i]) for arm in pair for i in arm["runs"]} for pair in _compared(arms)]
    low, high = (end((end(of) for of in steps if len(of) > 1), default=0) for end in (min, max))
    text = f"The runs have {low} to {high} steps: means over training are paired only between runs of equal length."
    texts = [text] if low < high else []

    def seeds(arm: Json) -> set[tuple[str, str]]:
        return {(str(runs[i].facts.get("seed")), runs[i].start) for i in arm["runs"]}

    unequal = [(arm, of) for arm, of in _compared(arms) if seeds(arm) != seeds(of) and len(seeds(arm) & seeds(of)) > 1]
    of_seeds: dict[str, list[str]] = {}
    for arm in (arm for arm in arms if any(arm in pair for pair in unequal)):
        of_seeds.setdefault(_ranges(seed for seed, _ in seeds(arm)), []).append(arm["label"])
    if of_seeds:
        each = "; ".join(f"{text} of {listed(labels)}" for text, labels in of_seeds.items())
        what = f"Means and curves are over all seeds of an arm ({each}), differences over those that it shares with"
        texts.append(f"{what} the baseline.")
    known = {d.arm for row in rows for d in row["differences"]}
    if alone := [arm["label"] for arm, _ in _compared(arms) if arm["label"] not in known]:
        needed = "two common seeds with the same start, or one run each with evaluated answers to the same problems"
        texts.append(f"Not compared with the baseline, which needs {needed}: {listed(alone)}.")
    return [{"kind": "verdict", "text": text, "link": "#curves"} for text in texts]


def _ranges(seeds: Iterable[str]) -> str:
    """Return numbers as text: 0–2, 7."""
    numbers = sorted({int(seed) for seed in seeds if seed.isdecimal()})
    successive = ([x for _, x in of] for _, of in groupby(enumerate(numbers), lambda place: place[1] - place[0]))
    return ", ".join(f"{first}–{more[-1]}" if more else str(first) for first, *more in successive)


def _score_changes(runs: Sequence[Run], arms: Sequence[Json], rows: Sequence[Json]) -> list[Json]:
    """Describe how each score changed during training. Three or more arms with the same direction share a sentence."""
    scored = [row for row in rows if "task" in row and any(x is not None for x in row["before"])]
    scored = scored or [row for row in rows if EVAL_PASS.match(row["name"])]
    tasks = {row.get("task") for row in scored}
    found: list[Json] = []
    for row in scored:
        score = f"{row['name']} on {row['task']}" if len(tasks) > 1 else row["name"]
        changes = [change for arm in arms if (change := _score_change(runs, arm, row, score, rows))]
        for kind, verb in (("bad", "fell"), ("good", "rose"), ("note", "stayed within noise")):
            texts = [text for of, _, text in changes if of == kind]
            if len(texts) > 2:
                sizes = [100 * size for of, size, _ in changes if of == kind]
                by = f", by {min(sizes):.1f} to {max(sizes):.1f} points" if kind != "note" else ""
                texts = [f"{score} {verb} in {len(texts)} of {len(arms)} arms{by}."]
            found += [{"kind": kind, "text": text, "link": row["link"]} for text in texts]
    return found


def _score_change(
    runs: Sequence[Run], arm: Json, row: Json, score: str, rows: Sequence[Json]
) -> tuple[str, float, str] | None:
    """Return the kind, size and description of an arm's change in a score, or None if it was not measured twice.

    Pairs problems for a single run that kept its answers, else seeds.
    """
    after, before = ({i: x for i in arm["runs"] if (x := row[when][i]) is not None} for when in ("after", "before"))
    change, common = None, [i for i in after if i in before]
    if len(common) == 1 and "task" in row and len(runs) <= MAX_PAIRED:
        folder = runs[common[0]].folder
        change = by_problem(answers_of(folder), answers_of(folder, "before"), row["name"])
    change = change or paired(after, before, arm="after", baseline="before", score=row["name"])
    if change is None:
        return None
    size, wide = abs(change.value), -math.inf < change.low < 0 < change.value  # a fall of few seeds may matter anyway
    noise = change.within_noise and (not change.too_few or size < 0.05 or wide)
    kind, moved = ("bad", "fell") if change.value < 0 else ("good", "rose")
    text = f"{score} {'did not change' if change.equal else f'{moved} by {100 * size:.1f} points'}"
    if math.isfinite(change.high):
        low, high = (f"{100 * x:+.1f}".replace("-", "−") for x in (change.low, change.high))
        text += f" (95% interval {low} to {high}){', which is within noise' * (noise and not change.too_few)}"
    who = arm["label"] if len(runs) > 1 else runs[0].name
    return "note" if noise else kind, size, f"{who}: {text}.{_meaning(arm, row, rows) * (kind == 'bad' and not noise)}"


def _meaning(arm: Json, row: Json, rows: Sequence[Json]) -> str:
    """Return what the fall of a score means, if another one of the arm did not fall."""
    score, _, k = row["name"].rpartition("@")
    names = ("accuracy", "reward") if k == "1" else (f"{score}@1",)
    for other in (x for x in rows if x["name"] in names and x.get("task") in (None, row.get("task"))):
        pairs = [(other["before"][i], other["after"][i]) for i in arm["runs"]]
        if all(None not in pair and pair[0] <= pair[1] for pair in pairs):
            if k != "1":
                return " The answers have become less diverse."
            return f" Training {other['name']} did not fall: the policy may exploit the reward or memorise problems."
    return ""


def _alarms(runs: Sequence[Run], arms: Sequence[Json]) -> list[Json]:
    """Return one finding per alarm: the first run that raised it, how often, and how many runs (of each arm) did."""
    raised: dict[str, dict[int, list[Json]]] = {}
    for i, run in enumerate(runs):
        for alarm in [*run.alarms, *remarks(run, MAX_CHECKED // len(runs))]:
            raised.setdefault(str(alarm.get("alarm")), {}).setdefault(i, []).append(alarm)
    found = []
    for name, by_run in raised.items():
        i, alarms = next(iter(by_run.items()))
        others = len(by_run) - 1
        also = f" Also in {others} more run{'s' * (others > 1)}." if others else ""
        if any(len(arm["runs"]) > 1 for arm in arms):
            raising = [(sum(r in by_run for r in arm["runs"]), arm) for arm in arms]
            counts = [f"{n} of {len(arm['runs'])} runs of {arm['label']}" for n, arm in raising if n]
            also = f" In {listed(counts)}."
        steps = [alarm["step"] for alarm in alarms if isinstance(alarm.get("step"), int)]
        counted = runs[i].facts.get("alarms")
        n = counted.get(name) if isinstance(counted, dict) else None
        more = f", {n} steps in all" if isinstance(n, int) and n > 1 else ""
        message = str(alarms[0].get("message") or name)
        when = f"{message.removesuffix('.')} (step {steps[0]}{more})." if steps else message
        text = f"{_who(runs, i)}{when}{also}"
        remedy = str(alarms[0].get("remedy") or "")
        found.append({"kind": "bad", "alarm": name, "text": text, "remedy": remedy, "link": "#curves"})
    return found


def _tokens(runs: Sequence[Run], arms: Sequence[Json], summaries: Sequence[Sequence[Json]]) -> list[Json]:
    """Count tokens with credit of the wrong sign for each arm."""
    found = []
    for arm in arms if summaries else ():
        groups = [group for i in arm["runs"] for group in summaries[i]]
        if flipped := sum(group["flipped"] for group in groups):
            who = f"{arm['label']}: " if len(runs) > 1 else ""
            text = (
                f"{who}{sum(group['flipped'] > 0 for group in groups):,} of {len(groups):,} recorded groups have "
                f"credit of the wrong sign, rewarded in an answer below its group's mean reward or penalised in one "
                f"above it: {flipped:,} tokens, {flipped / sum(g['trained'] for g in groups):.1%} of those that train."
            )
            link = f"#groups&in={arm['runs'][0] + 1}" if len(arm["runs"]) == 1 < len(runs) else "#groups"
            found.append({"kind": "amber", "text": text, "link": f"{link}&with=flipped&by=flipped"})
    return found


def remarks(run: Run, most: int = MAX_CHECKED) -> list[Json]:
    """Return alarms computed from the metrics, for runs of other trainers and the lab, which do not record alarms."""
    checked = [*run.metrics[:FIRST], *run.metrics[FIRST:][-most:]]
    raised = {str(alarm.get("alarm")) for alarm in run.alarms}
    kept = list(RunFolder(run.folder).checkpoints()) if run.folder else []

    def fired(algorithm: Any = None) -> list[Json]:
        rules = Alarms(algorithm, run.facts.get("uses_threshold") is not False, lambda: kept)
        return [x for line in checked for x in rules.update(line["step"], line) if x["alarm"] not in raised]

    return fired() and fired(recorded_rule(*algorithm_of(run.facts)))
