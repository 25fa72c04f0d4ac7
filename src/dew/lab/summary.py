"""What a study says: differences paired by seed, with 95 % intervals and a correction for many comparisons."""

from dataclasses import dataclass, replace
from statistics import mean

from dew.evaluate.comparison import MIN_SEEDS
from dew.evaluate.metrics import holm, t_test
from dew.lab.study import Study

SCORES = ("area", "final", "pass@1", "pass@k")
SIGNIFICANT = 0.05

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
    best: dict[str, tuple[float, float]] = {}
    for arm, rate in points(study, task):
        area = mean(values(study, task, (arm, rate), "area").values())
        best[arm] = max(best.get(arm, (-1.0, rate)), (area, rate))
    return {arm: rate for arm, (_, rate) in best.items()}


def pairs(study: Study, task: str, compare: str) -> list[tuple[Point, Point]]:
    """What is compared with what.

    baseline   every arm with the baseline at the same learning rate, or at the baseline's best if it has no such runs
    best       every arm at its best learning rate with the baseline at its best
    control    every arm that weights tokens with its control, at the same learning rate
    """
    found, best, first = points(study, task), best_rates(study, task), study.arms[0]
    if first not in best:
        return []
    if compare == "control":
        controls = {run["arm"]: run["control"] for run in study.runs if run["control"]}
        both = [((arm, rate), (controls[arm], rate)) for arm, rate in found if arm in controls]
        return [(a, b) for a, b in both if b in found]
    if compare == "best":
        return [((arm, rate), (first, best[first])) for arm, rate in best.items() if arm != first]
    same = [(x, (first, x[1]) if (first, x[1]) in found else (first, best[first])) for x in found]
    return [(a, b) for a, b in same if a[0] != first]


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
    s, facts, several = study.settings, study.tasks[task], len(points(study, task)) > len(best_rates(study, task))
    seeds = sorted({run["seed"] for run in study.runs if run["task"] == task})
    found = [
        f"## {task}\n\nSeeds {seeds[0]} to {seeds[-1]}, {s.generations} generations of {s.answers} "
        f"answers, start pass@1 {facts['pass@1']:.3f}. Differences are paired by seed; ± is the 95 % interval, * marks "
        "p < 0.05 after Holm's correction within the column."
    ]
    found.append(_table(study, task, "baseline", f"difference from {study.arms[0]}"))
    if several:
        found.append(_table(study, task, "best", f"each at its best rate, difference from {study.arms[0]}"))
        found.append("The best rates were chosen on these same seeds: confirm them on others (`--first-seed`).")
    if pairs(study, task, "control"):
        found.append(_table(study, task, "control", "difference from its control"))
    return [*found, _verdict(study, task, "best" if several else "baseline")]


def _table(study: Study, task: str, compare: str, heading: str) -> str:
    columns = {score: {d.arm: d for d in differences(study, task, score, compare)} for score in SCORES}
    others = ("entropy", "length", "flipped")
    names = [score.replace("@k", f"@{study.settings.eval_k}") for score in (*SCORES, *others)]
    lines = [f"| {heading} | rate | seeds | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    compared = pairs(study, task, compare)
    references = list(dict.fromkeys(b for _, b in compared)) if compare != "control" else []
    for point in references or ([] if compared else points(study, task)):
        every = [values(study, task, point, score) for score in (*SCORES, *others)]
        cells = [f"{mean(x.values()):.3f}" for x in every]
        lines.append(f"| {point[0]} (its own values) | {point[1]:g} | {len(every[0])} | {' | '.join(cells)} |")
    for point, _ in compared:
        if point not in columns["area"]:
            continue
        cells = [_cell(columns[score][point]) for score in SCORES]
        cells += [f"{mean(values(study, task, point, score).values()):.3f}" for score in others]
        lines.append(f"| {point[0]} | {point[1]:g} | {columns['area'][point].seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(d: Difference) -> str:
    star = "*" if d.holm < SIGNIFICANT and d.seeds >= MIN_SEEDS else ""
    return f"{d.value:+.3f} ± {d.high - d.value:.3f}{star}" if d.seeds > 1 else f"{d.value:+.3f}"


def _verdict(study: Study, task: str, compare: str) -> str:
    found = differences(study, task, "area", compare)
    if not found:
        return f"Only {study.arms[0]} was trained: there is nothing to compare."
    at = " at its best rate" if compare == "best" else ""
    kinds: dict[str, list[Difference]] = {}
    for d in found:
        entropy = difference(study, task, d.arm, d.reference, "entropy")
        equal = d.low == d.high == 0 and entropy is not None and entropy.low == entropy.high == 0
        kinds.setdefault("equal" if equal else d.verdict if d.seeds >= MIN_SEEDS else "few", []).append(d)
    names = {kind: ", ".join(dict.fromkeys(d.arm[0] for d in group)) for kind, group in kinds.items()}
    words = []
    for d in [*kinds.get("ahead", []), *kinds.get("behind", [])]:
        rate = f" ({d.arm[1]:g})" if compare == "best" or d.arm[1] != d.reference[1] else ""
        words.append(f"{d.arm[0]}{rate} is {d.verdict} by {abs(d.value):.3f} (p = {d.holm:.2g})")
    if noise := kinds.get("within noise"):
        limit = max(d.high - d.value for d in noise)
        words.append(f"within noise: {names['within noise']} (differences above about {limit:.3f} would show)")
    if "equal" in kinds:
        why = "its credit is the same, or differs by a constant factor, which Adam cancels"
        words.append(f"every run of {names['equal']} is identical to that of {study.arms[0]}: {why}")
    if few := kinds.get("few"):
        seeds = min(d.seeds for d in few)
        words.append(f"too few seeds ({seeds}) to judge {names['few']}: train with --seeds {MIN_SEEDS} or more")
    return f"**Verdict** on mean accuracy during training, compared with {study.arms[0]}{at}: {'; '.join(words)}."
