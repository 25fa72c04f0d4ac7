"""Algorithms against each other over several seeds: areas under curves, and differences paired by seed and problem."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from dew.errors import ShapeError
from dew.evaluate.intervals import CONFIDENCE, Interval

RESAMPLES = 20_000
FEWEST_SEEDS = 5
"""With n seeds and no true difference all n point the same way with chance 2^(1−n): 12 % for four, 6 % for five."""


def area(steps: Sequence[float], values: Sequence[float]) -> float:
    """The area under a curve over its width, which is its mean height.

    area = Σᵢ (xᵢ₊₁ − xᵢ) · (yᵢ + yᵢ₊₁) / 2  /  (x_last − x_first)
    """
    if len(steps) != len(values) or not values:
        raise ShapeError(f"area: {len(steps)} steps and {len(values)} values. Give one value per step, at least one.")
    if len(values) == 1:
        return float(values[0])
    return float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))


def paired_interval(differences: Float[np.ndarray, "S P"], *, seed: int = 0) -> Interval:
    """The mean of paired differences of S seeds on P problems, with its bootstrap interval.

    Seeds and problems are drawn anew, each with replacement: other seeds and other problems would have come out
    differently. Give P = 1 where there are no problems, as for an area under a training curve.

    A percentile interval of few seeds is too narrow. It is expanded (Hesterberg 2015, arXiv:1411.5279) so that its
    width is that of Student's t:   α'/2 = Φ(−√(S/(S−1)) · t_{α/2, S−1})
    Of five normal differences it then covers the truth in 93 % of cases, the plain one in 85 %.
    """
    from scipy.stats import norm, t

    D = np.asarray(differences, dtype=float)
    if D.ndim != 2 or D.size == 0:
        raise ShapeError(f"paired_interval: differences of shape {D.shape}. Give (seeds, problems), at least one each.")
    S, P = D.shape
    value = float(D.mean())
    if S == 1:  # one seed tells nothing about another
        return Interval(value, -1.0, 1.0)
    rng = np.random.default_rng(seed)
    by_seed = rng.multinomial(S, np.full(S, 1 / S), size=RESAMPLES) / S
    by_problem = rng.multinomial(P, np.full(P, 1 / P), size=RESAMPLES) / P
    means = ((by_seed @ D) * by_problem).sum(axis=1)
    tail = norm.cdf(-np.sqrt(S / (S - 1)) * t.ppf((1 + CONFIDENCE) / 2, S - 1))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(value, float(low), float(high))
