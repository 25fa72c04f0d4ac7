"""95 % intervals by resampling problems, not answers: sixteen answers to one problem are not independent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A mean over problems and the bounds between which it would fall for other problems of the same kind."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(
    values: Sequence[float], *, span: tuple[float, float] = (0.0, 1.0), seed: int = 0
) -> Interval:
    """The mean of one value per problem with its percentile bootstrap interval.

    Where all n problems agree on an end of `span` a bootstrap sees no spread at all; there the bound is the
    exact binomial one: had the true share been farther off, n out of n had a chance below 2.5 %.
    """
    from scipy.stats import bootstrap

    x = np.asarray(values, dtype=float)
    value, (least, most) = float(x.mean()), span
    if np.ptp(x) == 0:
        reach = (most - least) * (1 - ((1 - CONFIDENCE) / 2) ** (1 / len(x)))
        low = max(least, value - reach) if value == most or least < 0 else value
        high = min(most, value + reach) if value == least or least < 0 else value
        return Interval(value, low, high)
    result = bootstrap(
        (x,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=500,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=seed,
    )
    return Interval(value, float(result.confidence_interval.low), float(result.confidence_interval.high))
