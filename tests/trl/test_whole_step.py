"""docs/images/whole-step.svg shows the committed measurements."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
whole_step = pytest.importorskip("whole_step", reason="benchmarks/ is not here")

TABLE = """# on an X100, today

## 2 B: a model

| | step, s | sample | reward | score | credit | update |
|---|---|---|---|---|---|---|
| fast | 2.000 | 1.000 | 0.100 | 0.200 | 0.100 | 0.600 |
| slow | 9.500 | 9.000 | 0.000 | 0.000 | 0.000 | 0.500 |

| | step, s |
|---|---|
| another table | 1 |
"""


def test_the_figure_is_that_of_the_table():
    table = (ROOT / "benchmarks/results/whole_step-h200.md").read_text()
    assert (ROOT / "docs/images/whole-step.svg").read_text() == whole_step.figure(table)


def test_bars_are_to_scale_and_the_longest_is_cut():
    # 360 wide for 1.25 · 2 s: 144 a second. fast: 144, .4 · 144 = 57.6, 86.4. slow: 360 − 72 are left of its sampling
    drawn = whole_step.figure(TABLE)
    assert [word.split('"')[1] for word in drawn.split() if word.startswith("width=")][5:] == [
        "288.0", "0.0", "72.0", "144.0", "57.6", "86.4"
    ]  # fmt: skip
    assert "a 2 B model on an X100" in drawn and ">9.5, bar cut<" in drawn and ">2.0<" in drawn
    assert "another" not in drawn
