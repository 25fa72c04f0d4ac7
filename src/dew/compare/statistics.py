"""Scores of one problem (pass@k, mean@k, maj@k), 95 % intervals over problems and seeds, corrected p-values."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
from jaxtyping import Float

from dew.errors import ConfigError, Problem
from dew.rewards import Verdict

CONFIDENCE = 0.95
RESAMPLES = 4000
PAIRED_RESAMPLES = 20_000


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that k of n answers, drawn without replacement, include one of the c correct ones.

        pass@k = 1 − C(n−c, k) / C(n, k)

    An unbiased estimate of the probability that k new answers include a correct one (Chen et al., 2021, Eq. 1).
    """
    if not (0 <= c <= n and 1 <= k <= n):
        what = f"pass_at_k(n={n}, c={c}, k={k}): needs 0 ≤ c ≤ n and 1 ≤ k ≤ n."
        raise ConfigError(Problem(what, remedy="Sample at least k answers per problem."))
    return 1 - comb(n - c, k) / comb(n, k)


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
    """All scores of one problem: pass@1, 2, 4, ... up to the number of answers, mean@k, and maj@k or, from a reward
    function, which extracts no answer to vote on, the mean reward."""
    n, c = len(verdicts), sum(verdict.correct for verdict in verdicts)
    ks = sorted({2**i for i in range(n.bit_length())} | {n})
    scores = {f"pass@{k}": pass_at_k(n, c, k) for k in ks} | {f"mean@{n}": c / n}
    if any(verdict.extracted is not None for verdict in verdicts) or all(verdict.value is None for verdict in verdicts):
        return {**scores, f"maj@{n}": maj_at_k(verdicts)}
    return {**scores, "reward": sum(verdict.reward for verdict in verdicts) / n}


def area(steps: Sequence[float], values: Sequence[float]) -> float:
    """The area under a curve divided by its width, i.e. its mean height.

    area = Σᵢ (xᵢ₊₁ − xᵢ) · (yᵢ + yᵢ₊₁) / 2  /  (x_last − x_first)
    """
    if len(values) == 1:
        return float(values[0])
    return float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(values: Sequence[float], *, span: tuple[float, float] = (0.0, 1.0)) -> Interval:
    """The mean of one value per problem with its percentile bootstrap interval.

    Problems are resampled, not answers: answers to one problem are not independent. If all n problems agree, a
    bootstrap sees no variance. But if a share p of all problems differed, n of n would agree with probability
    (1 − p)ⁿ; so p up to 1 − 0.025^(1/n) remains possible, anywhere within `span`.
    """
    from scipy.stats import bootstrap

    x = np.asarray(values, dtype=float)
    value, (minimum, maximum) = float(x.mean()), span
    if np.ptp(x) == 0:
        p = 1 - ((1 - CONFIDENCE) / 2) ** (1 / len(x))
        return Interval(value, value - p * (value - minimum), value + p * (maximum - value))
    settings = {"confidence_level": CONFIDENCE, "method": "percentile", "batch": 500, "rng": 0}
    bounds = bootstrap((x,), np.mean, n_resamples=RESAMPLES, **settings).confidence_interval
    return Interval(value, float(bounds.low), float(bounds.high))


def paired_interval(differences: Float[np.ndarray, "S P"]) -> Interval:
    """The mean of paired differences of S seeds on P problems, with its bootstrap interval.

    Seeds and problems are both resampled with replacement. Use P = 1 if there are no problems, as for the area under
    a training curve.

    A percentile interval of few seeds is too narrow. It is expanded (Hesterberg 2015, arXiv:1411.5279) so that its
    width is that of Student's t:   α'/2 = Φ(−√(S/(S−1)) · t_{α/2, S−1})
    For five normal differences it then covers the true mean in 93 % of cases, the plain one in 85 %.
    """
    from scipy.stats import norm, t

    D = differences
    S, P = D.shape
    value = float(D.mean())
    if S == 1:  # a single seed says nothing about the variance between seeds
        return Interval(value, -1.0, 1.0)
    by_seed, by_problem = _drawn(S, P)
    means = (by_problem.astype(float) @ D.T * by_seed).sum(axis=1) / (S * P)
    tail = norm.cdf(-np.sqrt(S / (S - 1)) * t.ppf((1 + CONFIDENCE) / 2, S - 1))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def t_test(differences: Sequence[float]) -> tuple[Interval, float]:
    """The mean of paired differences with its 95 % interval, and its two-sided p-value, by Student's t."""
    from scipy.stats import t

    D = np.asarray(differences, dtype=float)
    n, value = len(D), float(D.mean())
    if n == 1:
        return Interval(value, -np.inf, np.inf), 1.0
    error = float(D.std(ddof=1)) / n**0.5
    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    p = 1.0 if value == 0 else float(2 * t.sf(abs(value) / error, n - 1)) if error else 0.0
    return Interval(value, value - half, value + half), p


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for many comparisons: the i-th smallest of n times n − i + 1, and never less than that of a
    smaller one (Holm 1979)."""
    corrected, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        corrected[i] = least = max(least, min(1.0, p[i] * (len(p) - rank)))
    return corrected


@lru_cache(maxsize=2)  # tables have many differences of two shapes: areas (P = 1) and scores
def _drawn(S: int, P: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each seed and each problem is drawn, in every resample."""
    rng = np.random.default_rng(0)
    by_seed, by_problem = (rng.multinomial(n, np.full(n, 1 / n), size=PAIRED_RESAMPLES) for n in (S, P))
    return by_seed.astype(np.uint16), by_problem.astype(np.uint16)
