"""What a study says: differences paired by seed, with 95 % intervals and a correction for many comparisons."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from dew.compare.statistics import MIN_SEEDS, holm, t_test
from dew.engines.lab.study import Study
from dew.errors import ConfigError, unknown

SCORES = ("area", "final", "pass@1", "pass@k")
SIGNIFICANT = 0.05
OTHERS = ("entropy", "length", "flipped")
"""Shown without differences."""
COMPARE = ("baseline", "best", "control")

Point = tuple[str, float]
"""An arm's label and its learning rate."""


@dataclass(frozen=True)
class Difference:
    """The mean difference of a score between two arms over the seeds that both have."""

    task: str
    arm: Point
    reference: Point
    score: str
    seeds: int
    value: float
    low: float
    high: float
    """The 95 % interval of Student's t."""
    p: float
    """Two-sided p-value of the paired t-test."""
    holm: float = 1.0
    """The same after Holm's correction for all arms that are compared in this score."""

    @property
    def verdict(self) -> str:
        if self.seeds < MIN_SEEDS:
            return f"too few seeds ({self.seeds} of at least {MIN_SEEDS})"
        if self.holm < SIGNIFICANT:
            return "ahead" if self.value > 0 else "behind"
        return "within noise"


def points(study: Study, task: str) -> list[Point]:
    """The arms of a task at their learning rates, in the order of the study."""
    found = {(run["arm"], run["learning_rate"]) for run in study.runs if run["task"] == task}
    return sorted(found, key=lambda x: (study.arms.index(x[0]), x[1]))


def values(study: Study, task: str, point: Point, score: str) -> dict[int, float]:
    """Seed -> score."""
    return {
        run["seed"]: run["scores"][score]
        for run in study.runs
        if run["task"] == task and (run["arm"], run["learning_rate"]) == point
    }


def best_rates(study: Study, task: str) -> dict[str, float]:
    """The learning rate at which each arm has the largest mean area."""
    best: dict[str, float] = {}
    areas = {point: mean(values(study, task, point, "area").values()) for point in points(study, task)}
    for (arm, rate), area in areas.items():
        if arm not in best or area >= areas[arm, best[arm]]:
            best[arm] = rate
    return best


def pairs(study: Study, task: str, compare: str) -> list[tuple[Point, Point]]:
    """What is compared with what.

    baseline   every arm with the baseline at the same learning rate, or at the baseline's best if it has no such runs
    best       every arm at its best learning rate with the baseline at its best
    control    every arm that weights tokens with its control, at the same learning rate
    """
    if compare not in COMPARE:
        raise ConfigError(unknown(f"compare={compare!r} is not known.", compare, COMPARE))
    found, best, first = points(study, task), best_rates(study, task), study.arms[0]
    if compare == "control":
        controls = {run["arm"]: run["control"] for run in study.runs if run["control"]}
        both = [((arm, rate), (controls.get(arm), rate)) for arm, rate in found]
        return [(a, b) for a, b in both if b in found]
    if first not in best:
        return []
    if compare == "best":
        return [((arm, rate), (first, best[first])) for arm, rate in best.items() if arm != first]
    return [
        ((arm, rate), (first, rate if (first, rate) in found else best[first])) for arm, rate in found if arm != first
    ]


def differences(study: Study, task: str, score: str = "area", compare: str = "baseline") -> list[Difference]:
    """Paired differences; Holm's correction is over this list."""
    found = [d for a, b in pairs(study, task, compare) if (d := difference(study, task, a, b, score)) is not None]
    return [replace(d, holm=p) for d, p in zip(found, holm([d.p for d in found]), strict=True)]


def difference(study: Study, task: str, arm: Point, reference: Point, score: str) -> Difference | None:
    a, b = values(study, task, arm, score), values(study, task, reference, score)
    D = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    if not D:
        return None
    found, p = t_test(D)
    return Difference(task, arm, reference, score, len(D), found.value, found.low, found.high, p)


def markdown(study: Study) -> str:
    """For each task: the tables of differences, and a verdict in words."""
    return "\n\n".join(text for task in study.tasks if points(study, task) for text in _task(study, task))


def _task(study: Study, task: str) -> list[str]:
    s, baseline, every = study.settings, study.arms[0], points(study, task)
    several_rates = len(every) > len({arm for arm, _ in every})
    seeds = sorted({run["seed"] for run in study.runs if run["task"] == task})
    found = [
        f"## {task}\n\nSeeds {seeds[0]} to {seeds[-1]}, {s.generations} generations of {s.answers} "
        f"answers, start pass@1 {study.tasks[task]['pass@1']:.3f}. Differences are paired by seed; ± is the 95 % "
        "interval, * marks p < 0.05 after Holm's correction within the column."
    ]
    found.append(_table(study, task, "baseline", f"difference from {baseline}"))
    if several_rates:
        found.append(_table(study, task, "best", f"each at its best rate, difference from {baseline}"))
        found.append("The best rates were chosen on these same seeds: confirm them on others (`--first-seed`).")
    if pairs(study, task, "control"):
        found.append(_table(study, task, "control", "difference from its control"))
    return [*found, _verdict(study, task, "best" if several_rates else "baseline")]


def _table(study: Study, task: str, compare: str, heading: str) -> str:
    """The differences in SCORES and the arms' own values of the others; above them the values of the references."""
    columns = {score: {d.arm: d for d in differences(study, task, score, compare)} for score in SCORES}
    names = [score.replace("@k", f"@{study.settings.eval_k}") for score in (*SCORES, *OTHERS)]
    lines = [f"| {heading} | rate | seeds | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]

    def own(point: Point, scores: Sequence[str]) -> list[str]:
        return [f"{mean(values(study, task, point, score).values()):.3f}" for score in scores]

    compared = pairs(study, task, compare)
    shown = [reference for _, reference in compared if compare != "control"] if compared else points(study, task)
    for point in dict.fromkeys(shown):
        seeds, cells = len(values(study, task, point, "area")), own(point, (*SCORES, *OTHERS))
        lines.append(f"| {point[0]} (its own values) | {point[1]:g} | {seeds} | {' | '.join(cells)} |")
    for point, d in columns["area"].items():
        cells = [_cell(columns[score][point]) for score in SCORES] + own(point, OTHERS)
        lines.append(f"| {point[0]} | {point[1]:g} | {d.seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(d: Difference) -> str:
    star = "*" if d.verdict in ("ahead", "behind") else ""
    return f"{d.value:+.3f} ± {d.high - d.value:.3f}{star}" if d.seeds > 1 else f"{d.value:+.3f}"


def _verdict(study: Study, task: str, compare: str) -> str:
    found, baseline = differences(study, task, "area", compare), study.arms[0]
    if not found:
        return f"Nothing to compare: no other arm was trained with the seeds of {baseline}, the baseline, on {task}."
    kinds: defaultdict[str, list[Difference]] = defaultdict(list)
    for d in found:
        entropy = difference(study, task, d.arm, d.reference, "entropy")
        if d.low == d.high == 0 and entropy is not None and entropy.low == entropy.high == 0:
            kinds["equal"].append(d)
        else:
            kinds["few seeds" if d.seeds < MIN_SEEDS else d.verdict].append(d)
    names = {kind: ", ".join(dict.fromkeys(d.arm[0] for d in group)) for kind, group in kinds.items()}
    words = []
    for d in kinds["ahead"] + kinds["behind"]:
        rate = f" ({d.arm[1]:g})" if compare == "best" or d.arm[1] != d.reference[1] else ""
        words.append(f"{d.arm[0]}{rate} is {d.verdict} by {abs(d.value):.3f} (p = {d.holm:.2g})")
    if noise := kinds["within noise"]:
        limit = max(d.high - d.value for d in noise)
        words.append(f"within noise: {names['within noise']} (differences above about {limit:.3f} would show)")
    if kinds["equal"]:
        why = "its credit is the same, or differs by a constant factor, which Adam cancels"
        words.append(f"every run of {names['equal']} is identical to that of {baseline}: {why}")
    if few := kinds["few seeds"]:
        seeds = min(d.seeds for d in few)
        words.append(f"too few seeds ({seeds}) to judge {names['few seeds']}: train with --seeds {MIN_SEEDS} or more")
    at = " at its best rate" if compare == "best" else ""
    return f"**Verdict** on mean accuracy during training, compared with {baseline}{at}: {'; '.join(words)}."
