"""The published tables match the stored counts."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs"
K = 8


def correct_counts(name):
    with (DOCS / "results" / "gsm8k-0.5b" / f"{name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {model: [int(row[model]) for row in rows] for model in rows[0] if model != "problem"}


def published(title):
    """Rows of the table under this heading: model -> its cells."""
    lines = (DOCS / "results.md").read_text("utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {title}"))
    rows = {}
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return rows
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows["start" if name == "before" else name] = cells
    return rows


def pass_at(j, k):
    """pass@j of a problem with 0, 1, ..., k correct answers of k."""
    return np.array([1 - math.comb(k - c, j) / math.comb(k, j) for c in range(k + 1)])


@pytest.mark.parametrize("name, title, problems", [("gsm8k", "GSM8K test", 1319), ("math500", "MATH-500", 500)])
def test_table_of_the_real_model(name, title, problems):
    counts, table = correct_counts(name), published(title)
    assert counts.keys() == table.keys()
    for model, correct in counts.items():
        assert len(correct) == problems
        mean = sum(correct) / K / problems
        pass4, pass8 = (pass_at(k, K)[correct].mean() for k in (4, 8))
        shown = [float(cell.split()[0]) for cell in table[model][:3]]
        assert shown == pytest.approx([mean, pass4, pass8], abs=5.1e-4)
