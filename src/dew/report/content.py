"""Runs -> the JSON object in report.json, which the page shows (docs/report.md documents its fields)."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from dew import __version__
from dew.alarms import Alarms
from dew.records import SIGNALS, AnswerRecord, GroupRecord, Json, finite
from dew.report.readers import Run, evenly
from dew.report.statistics import statistics

SCHEMA = 1
MAX_STEPS = 4000
"""Points of a curve in the page."""
MIN_STEPS = 20
"""Shorter runs are not checked for a flat reward."""
MAX_CHECKED = 2000
"""Steps checked again for alarms; of a longer run, the first and the last ones."""


def content_of(runs: Sequence[Run]) -> Json:
    return {
        "schema": SCHEMA,
        "title": " · ".join(run.name for run in runs),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "dew": __version__,
        "runs": [_run(run) for run in runs],
    }


def _run(run: Run) -> Json:
    return {
        "name": run.name,
        "kind": run.kind,
        "facts": finite(run.facts),
        "config": run.config,
        "notices": run.notices,
        "alarms": finite(run.alarms),
        "remarks": finite(remarks(run.metrics, run.alarms)),
        "scores": finite(run.scores),
        "metrics": _columns(_thin_steps(run.metrics)),
        "sample": {**run.sample, "steps": min(len(run.metrics), MAX_STEPS), "steps_of": len(run.metrics)},
        "credit": finite(statistics(run.groups)),
        "groups": [_group(group) for group in run.groups],
    }


def _thin_steps(metrics: Sequence[Json]) -> Sequence[Json]:
    """At most MAX_STEPS lines, each with the latest value of every metric since the previous one, so none is lost."""
    if len(metrics) <= MAX_STEPS:
        return metrics
    thin: list[Json] = []
    since = 0
    for i in evenly(len(metrics), MAX_STEPS):
        thin.append({name: value for line in metrics[since : i + 1] for name, value in line.items()})
        since = i + 1
    return thin


def _columns(metrics: Sequence[Json]) -> Json:
    """Lines -> columns of equal length, null if a step lacks a metric."""
    names = dict.fromkeys(name for line in metrics for name, v in line.items() if _is_number(v))
    return {name: [_six(line.get(name)) for line in metrics] for name in names}


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _six(x: Any) -> float | int | None:
    """Floats with six significant digits, enough for a curve."""
    return (x if isinstance(x, int) else float(f"{x:.6g}")) if _is_number(x) else None


def _group(group: GroupRecord) -> Json:
    names = ("step", "group", "prompt", "gold", "algorithm")
    out = {name: getattr(group, name) for name in names}
    return {**out, "settings": finite(dict(group.settings)), "answers": [_answer(a) for a in group.answers]}


def _answer(answer: AnswerRecord) -> Json:
    names = ("correct", "reward", "extra", "truncated", "extracted", "verdict", "guided")
    out: Json = {name: finite(getattr(answer, name)) for name in names}
    out["tokens"] = list(answer.tokens)
    if answer.live is not None and not all(answer.live):
        out["live"] = [int(alive) for alive in answer.live]
    for name in SIGNALS:
        values = getattr(answer, name)
        if values is not None:
            out[name] = _short(values, 5 if name == "entropy" else 4)  # the page computes with the entropy
    return out


def _short(values: Sequence[float], digits: int) -> list[float | None] | float | None:
    """Rounded to `digits` significant digits; a single number if all are equal, as in GRPO."""
    short = [float(f"{x:.{digits}g}") if math.isfinite(x) else None for x in values]
    return short[0] if len(short) > 1 and all(x == short[0] for x in short) else short


def remarks(metrics: Sequence[Json], alarms: Sequence[Json]) -> list[Json]:
    """The first alarm of each rule, checked afterwards (other trainers have no alarms), and a flat reward."""
    rules = Alarms()
    checked = [*metrics[:MIN_STEPS], *metrics[MIN_STEPS:][-MAX_CHECKED:]]
    found = [alarm for line in checked for alarm in rules.update(line["step"], line)]
    raised = {str(alarm.get("alarm")) for alarm in alarms}
    first: dict[str, Json] = {}
    for remark in [*found, *_flat_reward(metrics)]:
        if remark["alarm"] not in raised:
            first.setdefault(remark["alarm"], remark)
    return list(first.values())


def _flat_reward(metrics: Sequence[Json]) -> list[Json]:
    """A remark if the last fifth is not above the first by twice the standard error of the difference."""
    reward = np.array([m["reward"] for m in metrics if isinstance(m.get("reward"), int | float)], float)
    if len(reward) < MIN_STEPS:
        return []
    fifth = len(reward) // 5
    first, last = reward[:fifth], reward[-fifth:]
    error = np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / fifth)
    if last.mean() - first.mean() > max(2 * error, 1e-9):
        return []
    message = f"The reward does not rise: {first.mean():.3f} in the first fifth, {last.mean():.3f} in the last."
    remedy = "Read some answers under Groups: is the reward right, and are answers both correct and wrong?"
    return [{"alarm": "reward_flat", "message": message, "remedy": remedy}]
