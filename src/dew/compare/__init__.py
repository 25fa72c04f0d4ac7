"""pass@k, mean@k and maj@k on held-out problems, with intervals, scored by the verifier used in training."""

from dew.compare.comparison import compare_runs, read_result
from dew.compare.pairs import preference_pairs
from dew.compare.sampling import Sampling, load_vllm, sample, token_entropy
from dew.compare.scores import Scores, compare, evaluate

__all__ = [
    "Sampling", "Scores", "compare", "compare_runs", "evaluate", "load_vllm", "preference_pairs", "read_result",
    "sample", "token_entropy",
]  # fmt: skip
