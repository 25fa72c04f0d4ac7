"""Runs -> one JSON-able object: what report.json holds and the page shows (docs/report.md names its fields)."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dew.records import SIGNALS, AnswerRecord, GroupRecord, Json
from dew.report.remarks import remarks
from dew.report.run import Run
from dew.report.statistics import statistics

SCHEMA = 1


def content(runs: Sequence[Run]) -> Json:
    return {
        "schema": SCHEMA,
        "title": " · ".join(run.name for run in runs),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "dew": _version(),
        "runs": [_run(run) for run in runs],
    }


def _version() -> str:
    try:
        return version("dew-rl")
    except PackageNotFoundError:
        return "unreleased"


def _run(run: Run) -> Json:
    return {
        "name": run.name,
        "kind": run.kind,
        "facts": run.facts,
        "config": run.config,
        "notices": run.notices,
        "alarms": run.alarms,
        "remarks": remarks(run.metrics, run.alarms),
        "scores": run.scores,
        "metrics": _columns(run.metrics),
        "sample": run.sample,
        "credit": statistics(run.groups),
        "groups": [_group(group) for group in run.groups],
    }


def _columns(metrics: Sequence[Json]) -> Json:
    """Lines -> columns of equal length, null where a step lacks a metric."""
    names = dict.fromkeys(name for line in metrics for name, v in line.items() if _is_number(v))
    return {name: [_six(line.get(name)) for line in metrics] for name in names}


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _six(x: Any) -> float | int | None:
    """Six significant digits of a float are more than a curve shows."""
    return (x if isinstance(x, int) else float(f"{x:.6g}")) if _is_number(x) else None


def _group(group: GroupRecord) -> Json:
    return {
        "step": group.step,
        "group": group.group,
        "prompt": group.prompt,
        "gold": group.gold,
        "algorithm": group.algorithm,
        "settings": dict(group.settings),
        "answers": [_answer(answer) for answer in group.answers],
    }


def _answer(answer: AnswerRecord) -> Json:
    names = ("correct", "reward", "extra", "truncated", "extracted", "verdict", "guided")
    out: Json = {name: getattr(answer, name) for name in names}
    out["tokens"] = list(answer.tokens)
    if answer.live is not None and not all(answer.live):
        out["live"] = [int(alive) for alive in answer.live]
    for name in SIGNALS:
        values = getattr(answer, name)
        if values is not None:
            out[name] = _short(values, 5 if name == "entropy" else 4)  # the page computes with entropy
    return out


def _short(values: Sequence[float], digits: int) -> list[float | None] | float | None:
    """Rounded to so many significant digits; one number where all are alike, as GRPO's are."""
    short = [float(f"{x:.{digits}g}") if math.isfinite(x) else None for x in values]
    return short[0] if len(short) > 1 and all(x == short[0] for x in short) else short
