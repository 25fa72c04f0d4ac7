"""Compare runs of several algorithms and seeds with a baseline algorithm."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dew.compare.scores import Scores
from dew.compare.statistics import Interval, area, paired_interval
from dew.errors import ConfigError, Problem
from dew.run.folder import RunFolder

AREA = "area"
MIN_SEEDS = 5
"""Without a true difference, n seeds all have the same sign with probability 2^(1−n): 12 % for 4, 6 % for 5."""


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    algorithm: str
    seed: int
    groups: int
    """Groups sampled, including those dropped: dynamic sampling needs more of them for the same number of steps."""
    problems: Mapping[str, Mapping[str, float]]
    """Score -> problem -> value. The area under the training curve is not per problem: its key is ''."""

    def __getitem__(self, score: str) -> float:
        values = self.problems[score].values()
        return sum(values) / len(values)


def read_result(folder: Path | str, algorithm: str, seed: int) -> Result:
    """The area under the training accuracy, and each problem's scores after training."""
    run = RunFolder(folder)
    metrics = run.metrics()
    curve = [(m["step"], m["accuracy"]) for m in metrics if isinstance(m.get("accuracy"), int | float)]
    if not curve:
        raise ConfigError(f"{folder}: the metrics contain no accuracy, so there is nothing to compare.")
    steps, accuracy = zip(*curve, strict=True)
    sampled = [m.get("groups/sampled") for m in metrics]
    groups = sum(int(n) for n in sampled if isinstance(n, int | float) and abs(n) < 1e18)
    after = run.path / "answers-after.json"
    problems = Scores.read(after).problems if after.exists() else []
    names = problems[0].scores if problems else ()
    scores = {name: {json.dumps(p.prompt): p.scores[name] for p in problems} for name in names}
    return Result(algorithm, seed, groups, {AREA: {"": area(steps, accuracy)}, **scores})


@dataclass(frozen=True)
class Paired:
    """Difference between an algorithm and the baseline in one score, over the seeds and problems that both have."""

    algorithm: str
    baseline: str
    score: str
    seeds: tuple[int, ...]
    by_seed: tuple[float, ...]
    difference: Interval

    @property
    def within_noise(self) -> bool:
        """Too few seeds, or an interval that contains 0."""
        return len(self.seeds) < MIN_SEEDS or self.difference.low <= 0 <= self.difference.high

    @property
    def verdict(self) -> str:
        if len(self.seeds) < MIN_SEEDS:
            return f"too few seeds ({len(self.seeds)} of at least {MIN_SEEDS})"
        if self.within_noise:
            return "within noise"
        return f"{self.algorithm} ahead" if self.difference.value > 0 else f"{self.baseline} ahead"


def difference(results: Sequence[Result], algorithm: str, baseline: str, score: str) -> Paired:
    """Paired by seed, and within a seed by problem."""
    a = {r.seed: r.problems[score] for r in results if r.algorithm == baseline and score in r.problems}
    b = {r.seed: r.problems[score] for r in results if r.algorithm == algorithm and score in r.problems}
    seeds = tuple(sorted(a.keys() & b.keys()))
    if not seeds:
        raise ConfigError(f"{algorithm} and {baseline} have no seed in common for {score}.")
    problems = list(a[seeds[0]])
    if any(runs[s].keys() != set(problems) for runs in (a, b) for s in seeds):
        what = f"{algorithm} and {baseline} were scored on different problems."
        raise ConfigError(Problem(what, remedy="Use the same recipe for both."))
    D = np.array([[b[s][p] - a[s][p] for p in problems] for s in seeds])
    by_seed = tuple(float(x) for x in D.mean(axis=1))
    return Paired(algorithm, baseline, score, seeds, by_seed, paired_interval(D))


@dataclass(frozen=True)
class Comparison:
    """All results, and the differences from the baseline."""

    results: tuple[Result, ...]
    baseline: str
    scores: tuple[str, ...]
    differences: tuple[Paired, ...]

    @property
    def algorithms(self) -> list[str]:
        return list(dict.fromkeys(r.algorithm for r in self.results))

    def of(self, algorithm: str, score: str) -> list[float]:
        return [r[score] for r in self.results if r.algorithm == algorithm and score in r.problems]

    def groups(self, algorithm: str) -> float:
        return float(np.mean([r.groups for r in self.results if r.algorithm == algorithm]))

    def to_json(self) -> dict[str, Any]:
        runs = [
            {"algorithm": r.algorithm, "seed": r.seed, "groups": r.groups, "scores": {s: r[s] for s in r.problems}}
            for r in self.results
        ]
        found = [{**asdict(d), "within_noise": d.within_noise, "verdict": d.verdict} for d in self.differences]
        return {"baseline": self.baseline, "runs": runs, "differences": found}


def compare_runs(results: Sequence[Result], baseline: str) -> Comparison:
    """Compare every algorithm with the baseline: by area, and by pass@1 and the largest pass@k if available."""
    shared = set.intersection(*(set(r.problems) for r in results))
    passes = sorted((s for s in shared if s.startswith("pass@")), key=lambda s: int(s.removeprefix("pass@")))
    scores = tuple(dict.fromkeys([AREA, *passes[:1], *passes[-1:]]))
    others = [a for a in dict.fromkeys(r.algorithm for r in results) if a != baseline]
    found = tuple(difference(results, a, baseline, score) for a in others for score in scores)
    return Comparison(tuple(results), baseline, scores, found)
