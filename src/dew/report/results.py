"""One row per metric: every run before and after training, and paired differences between arms with their intervals."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any
from urllib.parse import quote

import numpy as np

from dew.compare import Difference, corrected, paired
from dew.compare.results import AREA, by_problem, main_scores, read_answers
from dew.compare.verdicts import TITLES
from dew.report.readers import Run
from dew.run.records import Json

METRICS = {
    "accuracy": "share of correct answers in training",
    "reward": "mean reward in training",
    "entropy": "nats per token",
    "length/mean": "tokens per answer",
    "length/truncated_share": "share of truncated answers",
    "groups/mixed_share": "share of groups with correct and wrong answers",
    "credit/flipped_share": "share of tokens with credit of the wrong sign",
}
"""Metrics with a row of their own, after the scores."""
EVAL_PASS = re.compile(r"(eval/(?:.+_)?)pass@\d")
"""pass@k during training; the group is the same for all k of an evaluation set, `eval/` or `eval/<set>_`."""
answers_of = cache(read_answers)


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last tenth."""
    tenth = max(1, round(len(values) / 10))
    return float(np.mean(values[:tenth])), float(np.mean(values[-tenth:]))


def rows_of(runs: Sequence[Run], arms: Sequence[Json]) -> list[Json]:
    """Scores, then metrics: {name, note, link, before, after, low, high (one per run), differences}.

    Differences are from the first arm, paired by seed, or by problem if each arm has one run.
    """
    answers_of.cache_clear()
    scores = _score_rows(runs)
    rows = [*(_area_row(runs, scores) if len(runs) > 1 else ()), *scores, *_metric_rows(runs, scores)]
    for row in rows:
        row["differences"] = _differences(runs, arms, row)
    return rows


def _area_row(runs: Sequence[Run], scores: Sequence[Json]) -> list[Json]:
    """The mean accuracy in training, if no run has it among its scores."""
    curves = [_values(run, "accuracy") for run in runs]
    if not any(curves) or any(row["name"] == AREA for row in scores):
        return []
    tasks = {row["task"] for row in scores}
    row = {**_row(runs, AREA, TITLES[AREA]), "task": tasks.pop() if len(tasks) == 1 else ""}
    return [{**row, "after": [fmean(curve) if curve else None for curve in curves]}]


def _score_rows(runs: Sequence[Run]) -> list[Json]:
    found: dict[tuple[str, str], Json] = {}
    for i, run in enumerate(runs):
        for entry in run.scores:
            scores = entry.get("scores")
            scores = scores if isinstance(scores, dict) else {}
            for name in _shown(scores):
                row = found.setdefault((str(entry.get("task")), name), _row(runs, name, ""))
                row["task"], when = str(entry.get("task")), "before" if entry.get("when") == "before" else "after"
                scored = f"{entry.get('n_problems')} problems × {entry.get('k')} answers"
                row["note"] = f"{entry.get('task')}: {TITLES.get(name, scored)}"
                score = scores[name] if isinstance(scores[name], dict) else {}
                row[when][i] = _number(score.get("value"))
                if when == "after":
                    row["low"][i], row["high"][i] = _number(score.get("low")), _number(score.get("high"))
    return list(found.values())


def _shown(scores: Mapping[str, Any]) -> list[str]:
    """The main scores; if there is no pass@k, the first scores."""
    known = [name for name in scores if name in TITLES or re.fullmatch(r"pass@\d{1,6}", name)]
    return main_scores(known) or list(scores)[:4]


def _metric_rows(runs: Sequence[Run], scores: Sequence[Json]) -> list[Json]:
    names = {name for run in runs for line in (*run.metrics[:1], *run.metrics[-1:]) for name in line}
    evals = {name for run in runs for line in run.metrics for name in line if EVAL_PASS.match(name)}
    if any(row["name"] == "final" for row in scores):  # then both ends of these curves are among the scores
        names, evals = names - {"accuracy"}, set()
    sets = sorted({match[1] for name in evals if (match := EVAL_PASS.match(name))})
    picked = [of + n for of in sets for n in _shown({n.removeprefix(of): 0 for n in evals})]
    rows = []
    for name in [*picked, *(name for name in METRICS if name in names)]:
        row = _row(runs, name, METRICS.get(name, "held-out problems, during training"))
        for i, run in enumerate(runs):
            if values := _values(run, name):
                first, row["after"][i] = ends(values)
                row["before"][i] = first if len(values) > 1 else None
        if any(x is not None for x in row["after"]):
            rows.append(row)
    same = [r for r in rows if r["name"] == "reward" and any(r["after"] == q["after"] for q in rows if q is not r)]
    return [row for row in rows if row not in same]  # an outcome reward alone is the accuracy


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
    """From the first arm: by seed where both have several seeds, by problem where each has one run."""
    found = []
    for arm in arms:
        reference = _reference(arms, arm)
        if reference is arm:
            continue
        names = {"arm": arm["label"], "baseline": reference["label"]}
        both = [_by_seed(runs, a, row["after"]) for a in (arm, reference)]
        if len(both[0].keys() & both[1].keys()) > 1:
            found.append(paired(*both, score=row["name"], task=row.get("task", ""), **names))
        elif "task" in row and len(reference["runs"]) == len(arm["runs"]) == 1:
            one, other = (answers_of(runs[a["runs"][0]].folder) for a in (arm, reference))
            found.append(by_problem(one, other, row["name"], **names))
    return corrected(d for d in found if d is not None)


def _reference(arms: Sequence[Json], arm: Json) -> Json:
    """The first arm with the same data, at the same learning rate if it was trained at that."""
    same = [a for a in arms if a["data"] == arm["data"]]
    rate = [a for a in same if a["learning_rate"] == arm["learning_rate"] and a["algorithm"] == same[0]["algorithm"]]
    return rate[0] if rate and rate[0] is not arm else same[0]


def _by_seed(runs: Sequence[Run], arm: Json, values: Sequence[float | None]) -> dict[str, float]:
    return {str(runs[i].facts.get("seed", i)): x for i in arm["runs"] if (x := values[i]) is not None}
