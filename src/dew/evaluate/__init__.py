"""pass@k, mean@k and maj@k on held-out problems, with intervals, scored by the verifier used in training."""

from dew.evaluate.comparison import compare_runs, read_result
from dew.evaluate.pairs import preference_pairs
from dew.evaluate.sampling import Sampling, load_vllm, sample, token_entropy
from dew.evaluate.scores import Scores, compare, evaluate

__all__ = [
    "Sampling", "Scores", "compare", "compare_runs", "evaluate", "load_vllm", "preference_pairs", "read_result",
    "sample", "token_entropy",
]  # fmt: skip
