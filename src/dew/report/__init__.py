"""The report: metrics and token records of runs as one self-contained HTML page, and as report.json (docs/report.md
documents its fields)."""

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from typing import Any

from dew import __version__
from dew.compare.grid import read_grid
from dew.errors import ConfigError, Problem
from dew.report.readers import Run, arms_of, evenly, read_records_file, read_runs, runs_at
from dew.report.results import findings_of, headline, rows_of
from dew.report.rules import Values, credit_by_rule, method_of
from dew.report.tokens import above_mean, around_divergence, nearest_correct, statistics, summary
from dew.report.write import write_report
from dew.run.records import SIGNALS, AnswerRecord, GroupRecord, Json, finite

__all__ = ["build", "build_from_records"]

SCHEMA = 1
MAX_STEPS = 4000
"""Maximum number of points of a curve in the page."""
MAX_POINTS = 40_000
"""Maximum number of points of one metric over all runs."""
log = logging.getLogger(__name__)


def build(folders: Sequence[Path], out: Path | None = None, rules: Sequence[str] = ()) -> Path:
    """Write report.html and report.json for the runs in `folders` and return the path of the page.

    Runs may come from dew or plain TRL. A folder may also hold several runs, e.g. from `dew compare`, `dew lab` or
    `dew demo`. By default, files are written to the folder if there is only one, else to the current one. `rules`, such
    as `gtpo(alpha2=0.5)` or `rules.py:Mine`, are compared on recorded groups in addition to the registered ones.
    """
    folders = [Path(folder) for folder in folders]
    return _write(read_content(folders, rules), out, folders[0] if len(folders) == 1 else Path())


def build_from_records(file: Path, out: Path | None = None, rules: Sequence[str] = ()) -> Path:
    """Write a report for one file of token records (docs/records.md), which may come from any trainer."""
    file = Path(file)
    return _write(content_of([read_records_file(file)], rules), out, file.parent)


def read_content(folders: Sequence[Path], rules: Sequence[str] = ()) -> Json:
    if not folders:
        raise ConfigError(Problem("No run given.", remedy="Give at least one run folder, such as runs/NAME."))
    found = {run.resolve(): run for folder in folders for run in runs_at(folder)}  # each once
    runs = read_runs(list(found.values()))
    arms = [arm for folder in folders for arm in read_grid(folder).get("arms", [])]
    tasks = list(dict.fromkeys(run.data for run in runs))

    def place(run: Run) -> tuple[int, int]:  # puts the baseline first
        arm = run.facts.get("arm")
        return tasks.index(run.data), arms.index(arm) if arm in arms else len(arms)

    return content_of(sorted(runs, key=place) if arms else runs, rules)


def _write(content: Json, out: Path | None, folder: Path) -> Path:
    for notice in (notice for run in content["runs"] for notice in run["notices"]):
        log.warning(notice)
    out = Path(out or folder)
    if out.is_dir():
        out = out / "report.html"
    return write_report(content, out if out.suffix == ".html" else out.with_name(f"{out.name}.html"))


def content_of(runs: Sequence[Run], rules: Sequence[str] = ()) -> Json:
    """Return the content of the page. Tasks of a study have separate results, as their scores are not comparable."""
    summaries = [[summary(group) for group in run.groups] for run in runs]
    tasks = dict.fromkeys(run.data for run in runs) if all("arm" in run.facts for run in runs) else {}
    columns = [_columns(_thin_steps(run.metrics, min(MAX_STEPS, max(100, MAX_POINTS // len(runs))))) for run in runs]
    if len(tasks) > 1:
        results: Json = {"tasks": _tasks(runs, tasks)}
        for found in results["tasks"]:
            found["charts"] = charts_of(list(compress(columns, (run.data == found["task"] for run in runs))))
        title = f"{_title(list(dict.fromkeys(str(run.facts['arm']) for run in runs)))} on {len(tasks)} tasks"
    else:
        results = {**_results(runs, summaries), "charts": charts_of(columns)}
        title = _title([run.name for run in runs] if len(runs) <= 3 else [arm["label"] for arm in results["arms"]])
    compared, credit = credit_by_rule([run.groups for run in runs], rules)
    other = iter(credit.get(n, {}) for n in range(sum(len(run.groups) for run in runs)))
    return {
        "schema": SCHEMA,
        "title": title,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "dew": __version__,
        **results,
        "rules": finite(compared),
        "runs": [_run(*each, other) for each in zip(runs, summaries, columns, strict=True)],
    }


def _results(runs: Sequence[Run], summaries: Sequence[Sequence[Json]] = ()) -> Json:
    arms, settings = arms_of(runs)
    rows = rows_of(runs, arms)
    findings = findings_of(runs, arms, rows, summaries)
    rows = [{**row, "differences": [d.to_json() for d in row["differences"]]} for row in rows]
    said = headline(runs, arms, rows)
    return {"headline": said, "findings": finite(findings), "rows": finite(rows), "arms": arms, "settings": settings}


def _tasks(runs: Sequence[Run], tasks: Iterable[str]) -> list[Json]:
    """Return the results of each task. An arm has the same colour in all of them."""
    of_task = {task: [run for run in runs if run.data == task] for task in tasks}
    found = [{"task": task, **_results(of_task[task])} for task in tasks]
    colours: dict[tuple[str, int], int] = {}
    for results in found:
        rules = [arm["algorithm"] for arm in results["arms"]]
        for i, arm in enumerate(results["arms"]):
            rate = rules[:i].count(rules[i])  # a rule at several learning rates has several colours
            arm["colour"] = colours.setdefault((rules[i], rate), len(colours))
    return found


def _title(names: Sequence[str]) -> str:
    return " · ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _run(run: Run, groups: Sequence[Json], columns: Json, other: Iterator[Mapping[int, Values]]) -> Json:
    return {
        "name": run.name,
        "kind": run.kind,
        "facts": finite(_shareable(run.facts)),
        "config": run.config,
        "notices": run.notices,
        "alarms": finite(run.alarms),
        "scores": finite([_shareable(line) for line in run.scores]),
        "metrics": columns,
        "sample": {**run.sample, "steps": len(columns.get("step", ())), "steps_of": len(run.metrics)},
        "credit": finite(statistics(run.groups)),
        "groups": [_group(group, numbers, next(other)) for group, numbers in zip(run.groups, groups, strict=True)],
    }


def _thin_steps(metrics: Sequence[Json], points: int) -> Sequence[Json]:
    """Return at most `points` lines, each with the latest value of every metric since the previous line."""
    if len(metrics) <= points:
        return metrics
    thin: list[Json] = []
    since = 0
    for i in evenly(len(metrics), points):
        thin.append({name: value for line in metrics[since : i + 1] for name, value in line.items()})
        since = i + 1
    return thin


def _columns(metrics: Sequence[Json]) -> Json:
    """Convert lines to columns of equal length, with null if a step lacks a metric."""
    rounded = [{name: _short_number(x, 12 if name == "time" else 6) for name, x in line.items()} for line in metrics]
    names = dict.fromkeys(name for line in rounded for name, value in line.items() if value is not None)
    return {name: [line.get(name) for line in rounded] for name in names}


def _short_number(x: Any, digits: int) -> float | int | None:
    """Round a number to `digits` significant digits; None if it is not a finite number."""
    if not isinstance(x, int | float) or isinstance(x, bool) or not math.isfinite(x):
        return None
    return x if isinstance(x, int) else float(f"{x:.{digits}g}")


def _group(group: GroupRecord, numbers: Json, other: Mapping[int, Values]) -> Json:
    return {
        **{name: getattr(group, name) for name in ("step", "group", "prompt", "gold", "algorithm")},
        "summary": finite(numbers),
        "settings": finite(dict(group.settings)),
        "method": method_of(group.algorithm, group.settings),
        "rules": other,
        "answers": [
            _answer(answer, above, nearest_correct(group, answer))
            for answer, above in zip(group.answers, above_mean(group).tolist(), strict=True)
        ],
    }


def _answer(answer: AnswerRecord, above: float, nearest: tuple[int, int] | None) -> Json:
    names = ("correct", "reward", "extra", "truncated", "extracted", "verdict", "guided")
    out: Json = {name: finite(getattr(answer, name)) for name in names} | {"above": finite(above)}
    if nearest:
        around = around_divergence(answer, nearest[0])
        out["nearest"] = [*nearest, *(round(share, 3) for share in around[0])] if around else list(nearest)
    if answer.rewards:
        out["rewards"] = finite(dict(answer.rewards))
    out["tokens"] = list(answer.tokens)
    if answer.live is not None and not all(answer.live):
        out["live"] = [int(alive) for alive in answer.live]
    for name in SIGNALS:
        values = getattr(answer, name)
        if values is not None:
            out[name] = _short(values, 5 if name == "entropy" else 4)  # the page computes with the entropy
    return out


def _short(values: Sequence[float], digits: int) -> list[float | None] | float | None:
    """Round to `digits` significant digits. If all values are equal, as in GRPO, return a single number."""
    short = [float(f"{x:.{digits}g}") if math.isfinite(x) else None for x in values]
    same = len(short) > 1 and short[0] is not None and len(set(short)) == 1
    return short[0] if same else short


def _shareable(facts: dict[str, Any]) -> dict[str, Any]:
    """Remove local paths, because people share reports."""
    model = str(facts.get("model", ""))
    return {**facts, "model": Path(model).name} if model.startswith(("/", "~")) else facts


# ── which charts the page draws, and which metrics are in each ──────────────────────────────────────────────
CHARTS = (  # title, metrics, note, whether its axis is logarithmic
    ("Reward", r"(reward|accuracy)$", "mean reward, and the share of correct answers", False),
    ("Parts of the reward", r"reward/(?!.*/std$)", "each reward function separately", False),
    ("Pass@k", r"eval/(pass|mean)@", "on held-out problems", False),
    ("Flipped tokens", r"credit/flipped_share$", "share of tokens with credit of the wrong sign", False),
    ("Entropy", r"entropy(/(correct|wrong))?$", "a slow decrease is normal; near 0 all answers are the same", False),
    ("Length", r"length/(mean|correct|wrong)$", "tokens per answer", False),
    ("Truncated answers", r"length/truncated_share$", "share that reached the length limit", False),
    ("Groups", r"groups/(sampled|kept|dropped|refilled)$", "prompts per step", False),
    ("Groups with signal", r"groups/mixed_share$", "share with different outcomes", False),
    ("Concentration of credit", r"credit/top\d+_share$", "share of |credit| on the top 20% and the top token", False),
    ("Clipped tokens", r"clip/(low|high)$", "share outside the trust region", False),
    ("Ratio", r"ratio/(mean|max)$", "new policy / old policy", True),
    ("KL", r"kl/", "distance from the old policy or the reference", False),
    ("Tokens per second", r"tokens_per_second$", "of the whole loop", False),
    ("Seconds per phase", r"seconds/", "where the time goes", False),
    ("Loss", r"loss$", "not a measure of progress here", False),
    ("Gradient norm", r"grad_norm$", "0 means that nothing is learned", True),
)


def charts_of(runs: Sequence[Json]) -> list[Json]:
    """Return {title, names, note, log, folded} of each chart, from the metrics of the runs as columns.

    A metric that repeats an earlier one in every run, such as the only part of a reward, has no chart. One that never
    changes or belongs to no chart has a folded one.
    """
    names: list[str] = []
    for name in dict.fromkeys(["accuracy", *(name for metrics in runs for name in metrics)]):
        repeats = any(all(metrics.get(name) == metrics.get(other) for metrics in runs) for other in names)
        if name not in ("step", "time") and any(name in metrics for metrics in runs) and not repeats:
            names.append(name)
    rest = [name for name in names if _is_flat(runs, name) or not any(re.match(chart[1], name) for chart in CHARTS)]
    found = []
    for title, pattern, note, log in CHARTS:
        shown = [name for name in names if re.match(pattern, name) and name not in rest]
        found += [{"title": title, "names": shown, "note": note, "log": log, "folded": False}] if shown else []
    return found + [{"title": name, "names": [name], "note": "", "log": False, "folded": True} for name in rest]


def _is_flat(runs: Sequence[Json], name: str) -> bool:
    known = [[x for x in metrics.get(name, ()) if x is not None] for metrics in runs]
    return all(len(set(values)) < 2 for values in known) and max(map(len, known)) > 2
