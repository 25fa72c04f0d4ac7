"""The scores of a run, which docs/lab.md defines: answers to held-out problems, and means over its metrics."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dew.engines.lab.tasks import Answers, GeneratedTask, Problems
from dew.run.records import Json

if TYPE_CHECKING:
    from dew.engines.lab.text import TextTask

CORRECT = 0.5
"""An answer with a larger reward counts as correct in metrics and evaluations."""


def solve(
    task: "GeneratedTask | TextTask", sample: Callable[[Tensor, Tensor], Answers], problems: Problems, k: int,
    rows: int, noise: Callable[[str, int], Tensor],
) -> Tensor:  # fmt: skip
    """(R, N, k) whether k answers to each of N problems are correct, about `rows` answers of a replica at once.

    `noise`: a purpose and a number of answers -> the uniform numbers that decide their tokens.
    """
    found = []
    each = max(1, rows // k)
    for i in range(0, len(problems.facts), each):
        part = problems[i : i + each]
        drawn = noise(f"held-out/{i}", len(part.facts) * k)
        prompt, facts = (x.expand(len(drawn), *x.shape) for x in (part.prompt, part.facts))
        found.append((task.rewards(sample(prompt, drawn), facts) > CORRECT).unflatten(1, (-1, k)))
    return torch.cat(found, 1)


def scores_of(metrics: Sequence[Json], averaged: bool = False) -> dict[str, float]:
    """The scores of a run; docs/lab.md defines them. `averaged`: over all evaluations, else of the last."""
    last = metrics[-max(1, len(metrics) // 6) :]

    def mean(lines: Sequence[Json], name: str) -> float:
        return round(fmean(line[name] for line in lines if name in line), 6)

    scores = {"area": mean(metrics, "accuracy"), "final": mean(last, "accuracy")}
    passes = [name for name in metrics[-1] if name.startswith("eval/")]
    scores |= {name.removeprefix("eval/"): mean(metrics if averaged else metrics[-1:], name) for name in passes}
    others = {"entropy": "entropy", "length": "length/mean", "truncated": "length/truncated_share", "kl": "kl"}
    scores |= {score: mean(last, name) for score, name in others.items() if name in metrics[-1]}
    return scores | {"flipped": mean(metrics, "credit/flipped_share")}
