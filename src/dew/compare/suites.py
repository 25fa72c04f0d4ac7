"""Evaluation suites of papers: data sets, sampling settings and published results."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dew.compare.scores import Scores


@dataclass(frozen=True)
class Suite:
    """Data sets that are evaluated together."""

    tasks: Mapping[str, int]
    """Task -> number of held-out problems."""
    sampling: Mapping[str, Any]
    columns: tuple[tuple[str, str], ...]
    """(task, score) of each column of the table."""
    published: Mapping[str, tuple[float, ...]]
    """Row -> scores in percent, in column order."""

    def table(self, model: str, scores: Mapping[str, Scores]) -> list[list[str]]:
        """Heading, published rows, and this model's scores with intervals, all in percent."""
        heading = ["", *(f"{task} {score}" for task, score in self.columns)]
        published = [[row, *(f"{x:.2f}" for x in numbers)] for row, numbers in self.published.items()]
        own = []
        for task, score in self.columns:
            x = scores[task].scores.get(score)
            own.append(f"{100 * x.value:.2f} [{100 * x.low:.1f}, {100 * x.high:.1f}]" if x else "not sampled")
        return [heading, *published, [model, *own]]


PAPER = Suite(
    tasks={"math500": 500, "aime24": 30, "aime25": 30},
    sampling={"k": 32, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 4096},
    columns=(
        *((task, score) for task in ("aime24", "aime25") for score in ("mean@32", "pass@4", "pass@32")),
        ("math500", "mean@32"),
    ),
    # arXiv:2508.04349: maxima over training, one run each, no intervals.
    published={
        "7B GRPO": (28.36, 36.15, 46.01, 15.00, 19.03, 20.00, 78.62),
        "7B DAPO": (21.20, 30.04, 35.51, 13.33, 16.28, 16.67, 78.85),
        "7B DAPO + forking tokens": (30.77, 41.34, 54.16, 15.21, 19.82, 21.67, 79.25),
        "7B GTPO": (34.23, 48.03, 64.89, 16.67, 25.51, 26.67, 80.16),
        "7B GRPO-S": (34.67, 47.18, 64.76, 18.33, 22.76, 23.33, 80.07),
        "32B GRPO": (29.17, 37.18, 46.30, 17.71, 25.95, 28.85, 84.16),
        "32B DAPO": (34.06, 46.64, 59.02, 21.67, 25.76, 26.67, 84.45),
        "32B DAPO + forking tokens": (34.68, 47.81, 64.12, 23.19, 27.99, 32.02, 85.21),
        "32B GTPO": (35.21, 49.41, 68.91, 26.89, 33.49, 36.67, 85.72),
        "32B GRPO-S": (35.52, 51.12, 67.19, 25.11, 29.75, 34.33, 85.79),
    },
)

SUITES = {"paper": PAPER}
