"""Evaluate models and compare runs: pass@k with intervals, paired differences, verdicts and grids of paired runs."""

from dew.compare.grid import Result, compare_runs, read_result
from dew.compare.sampling import Sampling, load_vllm, sample
from dew.compare.scores import Scores, compare_scores, evaluate
from dew.compare.statistics import Difference, Interval, corrected, paired
from dew.compare.verdicts import verdicts

__all__ = [
    "Difference", "Interval", "Result", "Sampling", "Scores", "compare_runs", "compare_scores", "corrected", "evaluate",
    "load_vllm", "paired", "read_result", "sample", "verdicts",
]  # fmt: skip
