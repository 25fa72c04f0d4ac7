"""One row per metric: every run before and after training, and paired differences between arms with their intervals."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import nan
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from dew.compare import Scores
from dew.compare.comparison import MIN_SEEDS
from dew.compare.scores import check_comparable
from dew.compare.statistics import Interval, holm, mean_interval, paired_interval, t_test
from dew.errors import DewError
from dew.files import is_plain
from dew.report.readers import Run
from dew.run.records import Json

MAX_ANSWERS = 64 << 20
"""Bytes of one file of evaluated answers."""
METRICS = {
    "accuracy": "share of correct answers in training",
    "reward": "mean reward in training",
    "entropy": "nats per token",
    "length/mean": "tokens per answer",
    "length/truncated_share": "share of truncated answers",
    "groups/mixed_share": "share of groups with correct and wrong answers",
    "credit/flipped_share": "share of tokens with credit of the wrong sign",
    "rewards/accuracies": "share of pairs whose chosen answer has the larger reward",
    "rewards/margins": "mean reward of the chosen minus the rejected answer",
}
"""Metrics with a row of their own, after the scores."""
EVAL_PASS = re.compile(r"(eval/(?:.+_)?)pass@\d")
"""pass@k during training; the group is the same for all k of an evaluation set, `eval/` or `eval/<set>_`."""
OF_CURVE = {"area": "mean accuracy over training", "final": "mean accuracy in the last sixth of training"}
"""Scores that a study computes from the training accuracy."""


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last tenth."""
    tenth = max(1, round(len(values) / 10))
    return float(np.mean(values[:tenth])), float(np.mean(values[-tenth:]))


def rows_of(runs: Sequence[Run], arms: Sequence[Json], given: Sequence[Json] = ()) -> list[Json]:
    """Scores, then metrics: {name, note, link, before, after, low, high (one per run), differences}.

    Differences are from the first arm: those that `dew compare` or a study computed if `given`, else paired by seed, or
    by problem if each arm has one run.
    """
    _answers.cache_clear()
    rows = [*_score_rows(runs), *_metric_rows(runs)]
    for row in rows:
        known = [d for d in given if d["score"] == row["name"] or (d["score"], row["name"]) == ("area", "accuracy")]
        row["differences"] = known or _differences(runs, arms, row)
    return rows


def _score_rows(runs: Sequence[Run]) -> list[Json]:
    found: dict[tuple[str, str], Json] = {}
    for i, run in enumerate(runs):
        for entry in run.scores:
            scores = entry.get("scores")
            scores = scores if isinstance(scores, dict) else {}
            for name in _ends_of_pass(scores):
                row = found.setdefault((str(entry.get("task")), name), _row(runs, name, ""))
                row["task"], when = str(entry.get("task")), "before" if entry.get("when") == "before" else "after"
                scored = f"{entry.get('n_problems')} problems × {entry.get('k')} answers"
                row["note"] = f"{entry.get('task')}: {OF_CURVE.get(name, scored)}"
                score = scores[name] if isinstance(scores[name], dict) else {}
                row[when][i] = _number(score.get("value"))
                if when == "after":
                    row["low"][i], row["high"][i] = _number(score.get("low")), _number(score.get("high"))
    return list(found.values())


def _ends_of_pass(scores: Mapping[str, Any]) -> list[str]:
    """The scores of the training accuracy, pass@1 and the largest pass@k; if there is none, the first scores."""
    passes = sorted((int(m[1]), n) for n in scores if (m := re.fullmatch(r"pass@(\d{1,6})", n)))
    found = dict.fromkeys([passes[0][1], passes[-1][1]]) if passes else dict.fromkeys(list(scores)[:4])
    return list(dict.fromkeys([*(name for name in OF_CURVE if name in scores), *found]))


def _metric_rows(runs: Sequence[Run]) -> list[Json]:
    names = {name for run in runs for line in (*run.metrics[:1], *run.metrics[-1:]) for name in line}
    evals = {name for run in runs for line in run.metrics for name in line if EVAL_PASS.match(name)}
    if runs[0].kind == "study":  # has them among its scores
        names, evals = names - {"accuracy"}, set()
    sets = sorted({match[1] for name in evals if (match := EVAL_PASS.match(name))})
    picked = [of + n for of in sets for n in _ends_of_pass({n.removeprefix(of): 0 for n in evals})]
    rows = []
    for name in [*picked, *(name for name in METRICS if name in names)]:
        row = _row(runs, name, METRICS.get(name, "held-out problems, during training"))
        for i, run in enumerate(runs):
            values = [x for line in run.metrics if (x := _number(line.get(name))) is not None]
            if values:
                first, row["after"][i] = ends(values)
                row["before"][i] = first if len(values) > 1 else None
        if any(x is not None for x in row["after"]):
            rows.append(row)
    same = [r for r in rows if r["name"] == "reward" and any(r["after"] == q["after"] for q in rows if q is not r)]
    return [row for row in rows if row not in same]  # an outcome reward alone is the accuracy


def _row(runs: Sequence[Run], name: str, note: str) -> Json:
    link = f"#{'curves' if note else 'overview'}&chart={quote(name, safe='', errors='replace')}"
    values = {key: [None] * len(runs) for key in ("before", "after", "low", "high")}
    return {"name": name, "note": note, "link": link, **values}


def _number(x: Any) -> float | None:
    good = isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e300
    return float(x) if good else None


def _differences(runs: Sequence[Run], arms: Sequence[Json], row: Json) -> list[Json]:
    """From the first arm: by seed where both have several seeds, by problem where each has one run."""
    found = []
    for arm in arms:
        reference = _reference(arms, arm)
        if reference is arm:
            continue
        both = [_by_seed(runs, a, row["after"]) for a in (reference, arm)]
        seeds = sorted(both[0].keys() & both[1].keys())
        entry = {"arm": arm["label"], "baseline": reference["label"], "score": row["name"], "pairs": len(seeds)}
        if len(seeds) > 1:
            D = [both[1][seed] - both[0][seed] for seed in seeds]
            if runs[0].kind == "study":  # as `dew lab` computes it
                interval, p = t_test(D)
                found.append({**entry, "unit": "seeds", **vars(interval), "p": p})
            else:
                found.append({**entry, "unit": "seeds", **vars(paired_interval(np.array(D)[:, None]))})
        elif "task" in row and len(reference["runs"]) == len(arm["runs"]) == 1:
            first, second = runs[reference["runs"][0]], runs[arm["runs"][0]]
            change = by_problem((first, "after"), (second, "after"), row["name"])
            if change is not None:
                found.append({**entry, "unit": "problems", **vars(change)})
    tested = [d for d in found if "p" in d]
    for d, p in zip(tested, holm([d["p"] for d in tested]), strict=True):
        d["p"] = p
    return [_judged(d) for d in found]


def _reference(arms: Sequence[Json], arm: Json) -> Json:
    """The first arm with the same data, at the same learning rate if it was trained at that."""
    same = [a for a in arms if a["data"] == arm["data"]]
    rate = [a for a in same if a["learning_rate"] == arm["learning_rate"] and a["algorithm"] == same[0]["algorithm"]]
    return rate[0] if rate and rate[0] is not arm else same[0]


def _judged(d: Json) -> Json:
    few = d["unit"] == "seeds" and d["pairs"] < MIN_SEEDS
    noise = few or (d["p"] >= 0.05 if "p" in d else d["low"] <= 0 <= d["high"])
    if few:
        verdict = f"too few seeds ({d['pairs']} of at least {MIN_SEEDS})"
    else:
        verdict = "within noise" if noise else f"{d['arm'] if d['value'] > 0 else d['baseline']} higher"
    return {**d, "within_noise": noise, "verdict": verdict}


def _by_seed(runs: Sequence[Run], arm: Json, values: Sequence[float | None]) -> dict[str, float]:
    return {str(runs[i].facts.get("seed", i)): x for i in arm["runs"] if (x := values[i]) is not None}


@cache
def _answers(folder: Path | None, when: str) -> Scores | None:
    """The evaluated answers of a run; None if it kept none."""
    path = None if folder is None else folder / f"answers-{when}.json"
    if path is None or not path.exists() or not is_plain(path) or path.stat().st_size > MAX_ANSWERS:
        return None
    try:
        return Scores.read(path)
    except DewError:
        return None


def by_problem(first: tuple[Run, str], second: tuple[Run, str], score: str) -> Interval | None:
    """The second evaluation minus the first, (run, "before" or "after") each, if they can be compared."""
    a, b = (_answers(run.folder, when) for run, when in (first, second))
    if a is None or b is None:
        return None
    try:
        check_comparable(a, b.task, b.scored_by, b.by_problem)
    except DewError:
        return None
    changes = [b.by_problem[key].scores.get(score, nan) - p.scores.get(score, nan) for key, p in a.by_problem.items()]
    return mean_interval(changes, span=(-1.0, 1.0)) if np.isfinite(changes).all() else None
