"""Scores of one problem (pass@k, mean@k, maj@k), 95% intervals, and paired differences between two arms."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import comb
from typing import Any, Literal

import numpy as np

from dew.rewards import Verdict

CONFIDENCE = 0.95
SIGNIFICANT = 0.05
MIN_SEEDS = 5
"""Without a true difference, n seeds all differ in the same direction with probability 2^(1−n): 12% for 4, 6% for 5."""
Unit = Literal["seeds", "problems"]


# ── scores of a problem ─────────────────────────────────────────────────────────────────────────────────────
def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that k of n answers, drawn without replacement, include one of the c correct ones.

        pass@k = 1 − C(n−c, k) / C(n, k)

    An unbiased estimate of the probability that k new answers include a correct one (Chen et al., 2021, Eq. 1).
    """
    return 1 - comb(n - c, k) / comb(n, k)


def passes(n: int, c: int) -> dict[str, float]:
    """pass@1, 2, 4, ... up to n, if c of n answers are correct."""
    return {f"pass@{k}": pass_at_k(n, c, k) for k in sorted({2**i for i in range(n.bit_length())} | {n})}


def maj_at_k(verdicts: Sequence[Verdict]) -> float:
    """1 if the most frequent extracted answer is correct; in a tie, the share of tied answers that are.

    Answers from which nothing could be extracted do not vote.
    """
    votes: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.extracted is not None:
            votes[verdict.extracted].append(verdict)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    winners = [same[0].correct for same in votes.values() if len(same) == most]
    return sum(winners) / len(winners)


def score_problem(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """All scores of one problem: pass@1, 2, 4, ... up to the number of answers, mean@k, and maj@k. A reward function
    extracts no answer to vote on, so its mean reward replaces maj@k."""
    n, c = len(verdicts), sum(verdict.correct for verdict in verdicts)
    scores = passes(n, c) | {f"mean@{n}": c / n}
    if any(verdict.extracted is not None for verdict in verdicts) or all(verdict.value is None for verdict in verdicts):
        return {**scores, f"maj@{n}": maj_at_k(verdicts)}
    return {**scores, "reward": sum(verdict.reward for verdict in verdicts) / n}


# ── intervals ───────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(values: Sequence[float], *, span: tuple[float, float] = (0.0, 1.0)) -> Interval:
    """The mean of one value per problem with its 95% interval. Problems are the unit, because answers to one problem
    are not independent. `span`: the range of possible values."""
    return t_test(values, span)[0]


def t_test(values: Sequence[float], span: tuple[float, float] | None = None) -> tuple[Interval, float]:
    """The mean with its 95% interval by Student's t, within `span` if given, and the two-sided p-value of mean 0.

    With a `span`, n equal values get an exact interval, because they have no variance for Student's t. If a share p of
    all problems had another value, all n would still agree with probability (1 − p)ⁿ. So any p up to 1 − 0.025^(1/n) is
    possible, with values anywhere within `span`.
    """
    from scipy.stats import t

    x = np.asarray(values, dtype=float)
    n, value = len(x), float(x.mean())
    low, high = span or (-np.inf, np.inf)
    if span and np.ptp(x) == 0:
        share = 1 - ((1 - CONFIDENCE) / 2) ** (1 / n)
        needed = value / (value - low) if value > 0 else value / (value - high) if value < 0 else 0.0
        interval = Interval(value, value - share * (value - low), value + share * (high - value))
        return interval, min(1.0, 2 * (1 - needed) ** n)
    if n == 1:
        return Interval(value, low, high), 1.0
    error = float(x.std(ddof=1)) / n**0.5
    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    p = 1.0 if value == 0 else float(2 * t.sf(abs(value) / error, n - 1)) if error else 0.0
    return Interval(value, max(low, value - half), min(high, value + half)), p


def seeds_needed(deviation: float, difference: float = 0.01, power: float = 0.8) -> int:
    """Seed pairs needed to detect `difference` with probability `power`, given the standard deviation over pairs."""
    from scipy.stats import nct, t

    for n in range(2, 10_000):
        limit, shift = t.ppf((1 + CONFIDENCE) / 2, n - 1), difference * n**0.5 / max(deviation, 1e-9)
        if nct.sf(limit, n - 1, shift) >= power:
            return n
    return 10_000


def holm(p: Sequence[float]) -> list[float]:
    """p-values with Holm's correction for multiple comparisons (Holm 1979): the i-th smallest of n is multiplied by
    n − i + 1, and raised to the largest corrected value before it."""
    corrected, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        corrected[i] = least = max(least, min(1.0, p[i] * (len(p) - rank)))
    return corrected


# ── differences ─────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Difference:
    """The mean difference in a score between an arm and the baseline, over the seeds or problems that both have."""

    task: str
    arm: str
    baseline: str
    score: str
    unit: Unit
    """What is paired: seeds, or problems if each arm has one run, which says nothing about other seeds."""
    pairs: int
    by_pair: tuple[float, ...]
    value: float
    low: float
    high: float
    """`low` and `high`: the 95% interval by Student's t; infinite for a single seed."""
    p: float
    """Two-sided p-value of the paired t-test."""
    holm: float
    """The p-value after Holm's correction over all arms compared in this score (`corrected`)."""

    @property
    def too_few(self) -> bool:
        return self.unit == "seeds" and self.pairs < MIN_SEEDS

    @property
    def within_noise(self) -> bool:
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
        return {**asdict(self), "within_noise": self.within_noise, "verdict": self.verdict}


def paired(
    values: Mapping[Any, float], baseline_values: Mapping[Any, float], *, arm: str, baseline: str, score: str,
    task: str = "", unit: Unit = "seeds",
) -> Difference | None:  # fmt: skip
    """The difference between an arm and the baseline, paired by seed or by problem; None if there are no pairs.

    A single seed has an infinite interval, because it says nothing about the variance between seeds.
    """
    both = [key for key in values if key in baseline_values]
    if not both:
        return None
    by_pair = tuple(values[key] - baseline_values[key] for key in both)
    span = None
    if unit == "problems":  # all differences may be equal by chance, e.g. 0 if no problem is ever solved
        every = [0.0, 1.0, *(scores[key] for key in both for scores in (values, baseline_values))]
        span = (min(every) - max(every), max(every) - min(every))
    found, p = t_test(by_pair, span)
    return Difference(task, arm, baseline, score, unit, len(both), by_pair, found.value, found.low, found.high, p, p)


def corrected(differences: Iterable[Difference | None]) -> list[Difference]:
    """Set `holm` of each difference, correcting over those with the same task, score and unit. None (no pairs) is left
    out."""
    found = [d for d in differences if d is not None]
    families: dict[tuple[str, str, str], list[int]] = {}
    for i, d in enumerate(found):
        families.setdefault((d.task, d.score, d.unit), []).append(i)
    for members in families.values():
        for i, p in zip(members, holm([found[i].p for i in members]), strict=True):
            found[i] = replace(found[i], holm=p)
    return found
