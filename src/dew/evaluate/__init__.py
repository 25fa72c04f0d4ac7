"""pass@k, mean@k and maj@k on held-out problems, with intervals, judged as in training."""

from dew.evaluate.evaluate import evaluate
from dew.evaluate.intervals import Interval, mean_interval
from dew.evaluate.metrics import maj_at_k, mean_at_k, pass_at_k
from dew.evaluate.sampling import Sampling, sample
from dew.evaluate.scores import Difference, Scores, compare

__all__ = [
    "Difference",
    "Interval",
    "Sampling",
    "Scores",
    "compare",
    "evaluate",
    "maj_at_k",
    "mean_at_k",
    "mean_interval",
    "pass_at_k",
    "sample",
]
