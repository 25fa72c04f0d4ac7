"""docs/images/whole-step.svg shows the committed measurements."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
whole_step = pytest.importorskip("whole_step", reason="benchmarks/ is not here")


def test_the_figure_is_that_of_the_table():
    table = (ROOT / "benchmarks/results/whole_step-h200.md").read_text()
    assert (ROOT / "docs/images/whole-step.svg").read_text() == whole_step.figure(table)
