"""pass@k, mean@k and maj@k on held-out problems, with intervals, judged as in training."""

from dew.evaluate.comparison import Comparison, Paired, Result, compare_runs, read_result
from dew.evaluate.evaluate import evaluate
from dew.evaluate.hesitation import token_entropy
from dew.evaluate.intervals import Interval, mean_interval
from dew.evaluate.metrics import maj_at_k, mean_at_k, pass_at_k
from dew.evaluate.paired import area, paired_interval
from dew.evaluate.sampling import Sampling, sample
from dew.evaluate.scores import Difference, Scores, compare
from dew.evaluate.vllm import load_vllm

__all__ = [
    "Comparison",
    "Difference",
    "Interval",
    "Paired",
    "Result",
    "Sampling",
    "Scores",
    "area",
    "compare",
    "compare_runs",
    "evaluate",
    "load_vllm",
    "maj_at_k",
    "mean_at_k",
    "mean_interval",
    "paired_interval",
    "pass_at_k",
    "read_result",
    "sample",
    "token_entropy",
]
