"""Runs of several algorithms and seeds, read from their folders and held against one of the algorithms."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dew.errors import ConfigError
from dew.evaluate.intervals import Interval
from dew.evaluate.paired import FEWEST_SEEDS, area, paired_interval
from dew.evaluate.scores import Scores
from dew.records import RunFolder

AREA = "area"


@dataclass(frozen=True)
class Result:
    """What one run came to."""

    algorithm: str
    seed: int
    groups: int
    """Groups that it sampled, dropped ones included: dynamic sampling takes more of them for the same steps."""
    problems: Mapping[str, Mapping[str, float]]
    """Score -> problem -> value. The area under the training curve has no problems: it stands under ''."""

    def __getitem__(self, score: str) -> float:
        values = self.problems[score].values()
        return sum(values) / len(values)


def read_result(folder: Path | str, algorithm: str, seed: int) -> Result:
    """The area under the accuracy of every answer sampled in training, and each problem's scores afterwards."""
    run = RunFolder(folder)
    metrics = run.metrics()
    curve = [(m["step"], m["accuracy"]) for m in metrics if isinstance(m.get("accuracy"), int | float)]
    if not curve:
        raise ConfigError(f"{folder}: its metrics have no accuracy, so there is nothing to compare.")
    steps, accuracy = zip(*curve, strict=True)
    sampled = [m.get("groups/sampled") for m in metrics]
    groups = sum(int(n) for n in sampled if isinstance(n, int | float) and abs(n) < 1e18)
    return Result(algorithm, seed, groups, {AREA: {"": area(steps, accuracy)}, **_after(run.path)})


def _after(folder: Path) -> dict[str, dict[str, float]]:
    path = folder / "answers-after.json"
    if not path.exists():
        return {}
    problems = Scores.read(path).problems
    if not problems:
        return {}
    return {name: {json.dumps(p.prompt): p.scores[name] for p in problems} for name in problems[0].scores}


@dataclass(frozen=True)
class Paired:
    """An algorithm minus the baseline in one score, over the seeds and problems that both have."""

    algorithm: str
    baseline: str
    score: str
    seeds: tuple[int, ...]
    by_seed: tuple[float, ...]
    difference: Interval

    @property
    def within_noise(self) -> bool:
        """Too few seeds to tell, or an interval that contains 0."""
        return len(self.seeds) < FEWEST_SEEDS or self.difference.low <= 0 <= self.difference.high

    @property
    def verdict(self) -> str:
        if len(self.seeds) < FEWEST_SEEDS:
            return f"too few seeds to tell ({len(self.seeds)}; at least {FEWEST_SEEDS})"
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
        raise ConfigError(f"{algorithm} and {baseline} were scored on different problems. Use one recipe for both.")
    D = np.array([[b[s][p] - a[s][p] for p in problems] for s in seeds])
    by_seed = tuple(float(x) for x in D.mean(axis=1))
    return Paired(algorithm, baseline, score, seeds, by_seed, paired_interval(D))


@dataclass(frozen=True)
class Comparison:
    """All results with the differences from one algorithm."""

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
        return {
            "baseline": self.baseline,
            "runs": [
                {"algorithm": r.algorithm, "seed": r.seed, "groups": r.groups, "scores": {s: r[s] for s in r.problems}}
                for r in self.results
            ],
            "differences": [
                {**asdict(d), "within_noise": d.within_noise, "verdict": d.verdict} for d in self.differences
            ],
        }


def compare_runs(results: Sequence[Result], baseline: str) -> Comparison:
    """Every algorithm against the baseline: in the area, and in pass@1 and the largest pass@k where there are any."""
    shared = set.intersection(*(set(r.problems) for r in results))
    passes = sorted((s for s in shared if s.startswith("pass@")), key=lambda s: int(s.removeprefix("pass@")))
    scores = tuple(dict.fromkeys([AREA, *passes[:1], *passes[-1:]]))
    others = [a for a in dict.fromkeys(r.algorithm for r in results) if a != baseline]
    found = tuple(difference(results, a, baseline, score) for a in others for score in scores)
    return Comparison(tuple(results), baseline, scores, found)
