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


def mean_interval(values: Sequence[float], *, span: tuple[float, float] = (0.0, 1.0), seed: int = 0) -> Interval:
    """The mean of one value per problem with its percentile bootstrap interval.

    Where all n problems agree a bootstrap sees no spread. But if a share p of all problems differed, n of n
    would agree with chance (1 − p)ⁿ; so p up to 1 − 0.025^(1/n) stays possible, anywhere within `span`.
    """
    from scipy.stats import bootstrap

    x = np.asarray(values, dtype=float)
    value, (least, most) = float(x.mean()), span
    if np.ptp(x) == 0:
        p = 1 - ((1 - CONFIDENCE) / 2) ** (1 / len(x))
        return Interval(value, value - p * (value - least), value + p * (most - value))
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
