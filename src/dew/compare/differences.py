"""Paired differences between two arms, over seeds or, with one run each, over problems."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dew.compare.statistics import holm, t_test

MIN_SEEDS = 5
"""Without a true difference, n seeds all have the same sign with probability 2^(1−n): 12% for 4, 6% for 5."""
SIGNIFICANT = 0.05

Unit = Literal["seeds", "problems"]


@dataclass(frozen=True)
class Difference:
    """The mean of a score of one arm minus that of the baseline, over the seeds or problems that both have."""

    task: str
    arm: str
    baseline: str
    score: str
    unit: Unit
    """What is paired; problems if each arm has one run, which says nothing about other seeds."""
    pairs: int
    by_pair: tuple[float, ...]
    value: float
    low: float
    high: float
    """The 95% interval of Student's t; infinite for a single seed."""
    p: float
    """Two-sided p-value of the paired t-test."""
    holm: float
    """The same after Holm's correction for all arms compared in this score (`corrected`)."""

    @property
    def too_few(self) -> bool:
        return self.unit == "seeds" and self.pairs < MIN_SEEDS

    @property
    def within_noise(self) -> bool:
        """Too few seeds, or no significant difference."""
        return self.too_few or self.holm >= SIGNIFICANT

    @property
    def equal(self) -> bool:
        return not any(self.by_pair)

    @property
    def verdict(self) -> str:
        if self.too_few:
            return f"too few seeds ({self.pairs} of at least {MIN_SEEDS})"
        return "within noise" if self.within_noise else "ahead" if self.value > 0 else "behind"

    def to_json(self) -> dict[str, Any]:
        """All fields, the verdict and whether it is within noise."""
        return {**asdict(self), "within_noise": self.within_noise, "verdict": self.verdict}


def paired(
    values: Mapping[Any, float],
    baseline_values: Mapping[Any, float],
    *,
    arm: str,
    baseline: str,
    score: str,
    task: str = "",
    unit: Unit = "seeds",
) -> Difference | None:
    """Values of an arm minus those of the baseline, by seed or by problem; None if they have no pair in common.

    A single seed has an infinite interval: it says nothing about the variance between seeds.
    """
    both = [key for key in values if key in baseline_values]
    if not both:
        return None
    by_pair = tuple(values[key] - baseline_values[key] for key in both)
    span = None
    if unit == "problems":  # all problems may have the same difference by chance, as 0 if none is ever solved
        every = [0.0, 1.0, *(scores[key] for key in both for scores in (values, baseline_values))]
        span = (min(every) - max(every), max(every) - min(every))
    found, p = t_test(by_pair, span)
    return Difference(task, arm, baseline, score, unit, len(both), by_pair, found.value, found.low, found.high, p, p)


def corrected(differences: Iterable[Difference]) -> list[Difference]:
    """The same with Holm's correction over those of the same task, score and unit."""
    found = list(differences)
    families: dict[tuple[str, str, str], list[int]] = {}
    for i, d in enumerate(found):
        families.setdefault((d.task, d.score, d.unit), []).append(i)
    for members in families.values():
        for i, p in zip(members, holm([found[i].p for i in members]), strict=True):
            found[i] = replace(found[i], holm=p)
    return found
