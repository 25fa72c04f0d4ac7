"""The published tables match the stored counts."""

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from dew.compare.statistics import paired_interval

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


PAIRS = {
    "select": range(100, 103),
    "confirm": range(8),
    "beta 0.1, first": range(200, 208),
    "beta 0.1, second": range(300, 316),
    "0.5 B": range(2),
}


@pytest.mark.parametrize("part", PAIRS)
def test_table_of_preference_pairs(part):
    """Scores and paired differences from the counts of correct answers, by seed and problem."""
    stored, table = json.loads((DOCS / "results" / "preferences.json").read_text()), published(f"α, {part}")
    k = (stored["gsm8k"] if part == "0.5 B" else stored)["setup"]["evaluation"]["k"]
    runs = {}
    for run in stored["gsm8k"]["runs"] if part == "0.5 B" else stored[part]:
        arm = f"{run['alpha']:g}{' shuffled' * run.get('shuffled', False)}"
        runs[arm, run["seed"]] = np.array(run["correct"])
    for arm in {arm for arm, _ in runs}:
        for j, column in ((1, 0), (k, 1)):
            own = np.stack([pass_at(j, k)[runs[arm, seed]] for seed in PAIRS[part]])
            assert float(table[arm][column]) == pytest.approx(own.mean(), abs=5.1e-4)
            if part != "select" and arm != "0":
                found = paired_interval(own - np.stack([pass_at(j, k)[runs["0", seed]] for seed in PAIRS[part]]))
                numbers = [float(x.replace("−", "-")) for x in re.findall(r"[+−-]\d\.\d+", table[arm][column + 2])]
                assert numbers == pytest.approx([found.value, found.low, found.high], abs=5.1e-4)


def test_table_of_preference_pairs_over_beta():
    stored, table = json.loads((DOCS / "results" / "preferences.json").read_text()), published("β, sweep")
    assert len(table) == 5
    for beta, cells in table.items():
        runs = {(run["alpha"], run["seed"]): np.array(run["correct"]) for run in stored[f"beta {beta}, sweep"]}
        for j, (plain, weighted, difference) in ((16, cells[4:]), (1, cells[:3])):
            a, b = (np.stack([pass_at(j, 16)[runs[alpha, seed]] for seed in range(400, 408)]) for alpha in (0, 0.25))
            assert [float(plain), float(weighted)] == pytest.approx([a.mean(), b.mean()], abs=5.1e-4)
            found, numbers = paired_interval(b - a), re.findall(r"[+−]\d\.\d+", difference)
            assert [float(x.replace("−", "-")) for x in numbers] == pytest.approx(
                [found.value, found.low, found.high], abs=5.1e-4
            )
        assert cells[3] == f"{(b.mean(1) > a.mean(1)).sum()} of 8"  # in pass@1


def test_all_seeds_at_the_default_beta():
    stored = json.loads((DOCS / "results" / "preferences.json").read_text())
    runs = [
        run for part in ("first", "second", "sweep") for run in stored[f"beta 0.1, {part}"] if not run.get("shuffled")
    ]
    a, b = (np.array([run["correct"] for run in runs if run["alpha"] == alpha]) / 16 for alpha in (0, 0.25))
    found = paired_interval(b - a)
    shown = f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    assert len(a) == 32 and shown in (DOCS / "preferences.md").read_text("utf-8")
