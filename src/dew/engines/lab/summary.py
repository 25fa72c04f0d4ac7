"""Summarise a study: the differences between its arms, paired by seed, at each learning rate."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, variance

from dew.compare import Difference, Result, corrected, paired, read_result, verdicts
from dew.compare.grid import main_scores, read_grid, runs_inside
from dew.compare.statistics import seeds_needed
from dew.compare.verdicts import difference_table, listed, markdown_table, table_note
from dew.errors import ConfigError, Problem, RecordError, unknown
from dew.run.folder import RunFolder
from dew.run.records import Json

COMPARE = {
    "baseline": "",
    "best": "Each arm at its best learning rate:\n\n",
    "control": "Against the same rule without weights:\n\n",
    "placebo": "Against the same weights on permuted tokens:\n\n",
}
"""What arms are compared with, and the heading of that table."""
OTHERS = ("entropy", "length", "flipped")
"""Scores for which only means are shown, not differences."""
LEGEND = """area: mean accuracy in training; final: accuracy at its end; entropy in nats; length in tokens;
flipped: share of trained tokens with credit of the wrong sign."""


def load_study(*folders: Path | str) -> list[Result]:
    """Load the finished runs of a study, the baseline's first. Several studies with the same settings are merged."""
    grids = {folder: read_grid(folder) for folder in map(Path, folders)}
    if missing := [folder for folder, grid in grids.items() if not grid]:
        raise ConfigError(Problem(f"{missing[0]}: holds no study.", remedy="Give a folder that `dew lab` wrote."))
    if any(grid["settings"] != other["settings"] for grid in grids.values() for other in grids.values()):
        raise ConfigError(Problem("The studies have different settings.", remedy="Load them one by one."))
    codes = {x for grid in grids.values() for x in grid["sources"].items()}
    if len(codes) > len(dict(codes)):
        raise ConfigError(Problem("The code of a rule differs between the studies.", remedy="Load them one by one."))
    arms = list(dict.fromkeys(arm for grid in grids.values() for arm in grid["arms"]))
    runs = (read_result(home) for folder in grids for home in runs_inside(folder))
    found = {(r.task, r.arm, r.learning_rate, r.seed): r for r in runs}
    starts: dict[str, str] = {}
    for result in found.values():
        facts = RunFolder(str(result.folder)).run().get("warm_start")
        if result.arm not in arms or not isinstance(facts, dict):
            what = f"{result.folder}: {result.arm!r:.60} is no arm of this study, or run.json has no warm start."
            raise RecordError(Problem(what, remedy="Copy it again, or delete the run."))
        start = str(facts.get("digest"))
        if starts.setdefault(result.task, start) != start:
            what = f"{result.folder}: started from policy {start}, others from {starts[result.task]}."
            raise ConfigError(Problem(what, "They cannot be paired.", "Load the studies one by one."))
    return sorted(found.values(), key=lambda r: (arms.index(r.arm), r.seed))


def by_point(results: Sequence[Result], task: str) -> dict[str, list[Result]]:
    """The runs of a task by arm or, if it has several learning rates, by arm and rate: `gtpo @ 3e-05`."""
    chosen = [r for r in results if r.task == task]
    several = len({r.learning_rate for r in chosen}) > 1
    found: dict[str, list[Result]] = {}
    for r in sorted(chosen, key=lambda r: r.learning_rate or 0):
        found.setdefault(f"{r.arm} @ {r.learning_rate:g}" if several else r.arm, []).append(r)
    order = list(dict.fromkeys(r.arm for r in chosen))
    return dict(sorted(found.items(), key=lambda x: order.index(x[1][0].arm)))


def pairs(results: Sequence[Result], task: str, compare: str) -> list[tuple[str, str]]:
    """Pairs to compare, as keys of `by_point`. The arm of the first result is the baseline.

    baseline   every arm with the baseline at the same learning rate, or at the baseline's best if it has no such runs
    best       every arm at its best learning rate (largest mean area) with the baseline at its best
    control    every arm that weights tokens with the same rule without weights, at the same learning rate
    placebo    every arm that weights tokens with the same weights on permuted tokens, at the same learning rate
    """
    if compare not in COMPARE:
        raise ConfigError(unknown(f"compare={compare!r} is not known.", compare, COMPARE))
    points, baseline = by_point(results, task), results[0].arm
    at = {(runs[0].arm, runs[0].learning_rate): name for name, runs in points.items()}
    ranked = sorted(points.items(), key=lambda x: fmean(r.scores["area"] for r in x[1]))
    best = {runs[0].arm: name for name, runs in ranked}  # the last of an arm counts
    found = []
    for name, (run, *_) in points.items():
        if compare in ("control", "placebo"):
            other = at.get((str(getattr(run, compare)), run.learning_rate))
        elif run.arm == baseline or (compare == "best" and best[run.arm] != name):
            other = None
        else:
            same = at.get((baseline, run.learning_rate)) if compare == "baseline" else None
            other = same or best.get(baseline)
        if other:
            found.append((name, other))
    return found


def differences(
    results: Sequence[Result], task: str, score: str = "area", compare: str = "baseline"
) -> list[Difference]:
    """Paired differences of a score, with Holm's correction over the returned list."""
    points = by_point(results, task)
    values = {name: {r.seed: r.scores[score] for r in runs if score in r.scores} for name, runs in points.items()}
    both = pairs(results, task, compare)
    return corrected(paired(values[a], values[b], arm=a, baseline=b, score=score, task=task) for a, b in both)


def markdown(results: Sequence[Result]) -> str:
    """A Markdown summary with, for each task, the verdicts, the means of the arms and the tables of differences."""
    return "\n\n".join(text.strip() for task in dict.fromkeys(r.task for r in results) for text in _task(results, task))


def _task(results: Sequence[Result], task: str) -> Iterator[str]:
    points = by_point(results, task)
    scores = main_scores(dict.fromkeys(score for r in results for score in r.scores))
    several_rates = len(points) > len({runs[0].arm for runs in points.values()})
    yield f"## {task}"
    compare = "best" if several_rates else "baseline"
    judged = [d for score in [*scores, "entropy"] for d in differences(results, task, score, compare)]
    alone = [name for name, _ in pairs(results, task, compare) if name not in {d.arm for d in judged}]
    nothing = f"Nothing to compare: no other arm was trained with the seeds of {results[0].arm}, the baseline."
    yield from verdicts(judged) if judged else [nothing]
    if judged and alone:
        yield f"No seed in common with {results[0].arm}, so not compared: {listed(alone)}."
    if several_rates:
        yield "The best rates were chosen on these same seeds: confirm them on others (`--first-seed`)."
    rows = []
    for name, runs in points.items():  # a run lacks scores that are not finite
        means = {s: fmean(r.scores[s] for r in runs) for s in [*scores, *OTHERS] if all(s in r.scores for r in runs)}
        rows.append([name, str(len(runs)), *(f"{means[s]:.3f}" if s in means else "" for s in [*scores, *OTHERS])])
    yield markdown_table(["arm", "seeds", *scores, *OTHERS], rows)
    yield LEGEND
    for compare, heading in COMPARE.items():
        found = [d for score in scores for d in differences(results, task, score, compare)]
        if found and (several_rates or compare != "best"):
            yield heading + difference_table(found)
    if judged:
        found = differences(results, task, "pass@1") if "pass@1" in scores else []
        yield from [table_note(judged), *noise(found, [r for r in results if r.task == task])]


def noise(found: Sequence[Difference], results: Sequence[Result]) -> Iterator[str]:
    """A sentence on the noise of differences in pass@1, and the seeds needed to detect a difference of 0.01."""
    found = [d for d in found if not (d.too_few or d.equal)]
    sampled = [x for r in results if (x := _sampling_variance(r)) is not None]
    if not found or not sampled:
        return
    total = fmean(variance(d.by_pair) for d in found) ** 0.5
    sampling = (2 * fmean(sampled)) ** 0.5
    yield (
        f"Noise: over seeds, differences in pass@1 have a standard deviation of {total:.4f}; the sampling of the "
        f"evaluation alone gives {sampling:.4f}. A difference of 0.01 needs about {seeds_needed(total)} seeds for a "
        "power of 80%."
    )


def _sampling_variance(result: Result) -> float | None:
    """The variance of a run's pass@1 due to sampling, from the number of correct answers to each problem."""
    entry: Json = next((x for x in RunFolder(str(result.folder)).scores() if x.get("solved")), {})
    k, evaluations = entry.get("k", 1), entry.get("solved") or []
    if k < 2 or not evaluations:
        return None
    each = [sum(c / k * (1 - c / k) / (k - 1) for c in solved) / len(solved) ** 2 for solved in evaluations]
    return fmean(each) / len(each)
