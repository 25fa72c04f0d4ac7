"""The pages of the study have the tables of the committed runs."""

from pathlib import Path

import pytest
from scripts import study_tables

from dew.compare import Result

ROOT = Path(__file__).parents[2]


def test_the_tables_and_the_figure_are_those_of_the_runs():
    pages = "".join(page.read_text() for page in study_tables.PAGES)
    for name, table in study_tables.tables().items():
        text = f"<!-- {name} -->\n\n{table}\n<!-- end -->"
        assert text in pages, f"run scripts/study_tables.py --write ({name})"
    assert (ROOT / "docs" / "images" / "study-effect.svg").read_text() == study_tables.figure()


def test_differences_over_several_warm_starts():
    """Means of 0.01, 0.02, 0.03, 0.02 over four starts: 0.02 ± 3.182 · 0.008165 / √4 = 0.013. Seeds differ by 0.001
    within a start, so that starts differ; placebos are 0.01 ahead of DAPO everywhere."""
    gains = {"dapo": (0,) * 4, "gtpo": (0.01, 0.02, 0.03, 0.02), "dew": (-0.02, 0.02, 0.02, -0.02)}
    gains |= {f"{rule}(placebo=True)": (0.01,) * 4 for rule in ("gtpo", "dew")}

    def run(arm, task, start, seed):
        value = 0.5 + gains[arm][start] + (0.001 * (-1) ** seed if arm != "dapo" else 0)
        return Result(arm, seed, {"area": value, "pass@1": value}, task)

    each = [(arm, task) for task in study_tables.TASKS for arm in gains]
    by_start = [[run(*of, start, seed) for of in each for seed in range(8)] for start in range(4)]
    rows = [line.split(" | ") for line in study_tables.starts(by_start).splitlines()[2:]]
    assert len(rows) == 2 * 4 * 2 and {row[2] for row in rows} == {"gtpo", "dew"}
    _, task, rule, n, over, p, every, apart, placebo = rows[0]
    assert (task, rule, n, over, apart) == ("countdown-4", "gtpo", "4", "+0.020 [+0.007, +0.033]", "0.000")
    assert float(p) == pytest.approx(8 * 0.0163, abs=0.001)  # Holm's, the smallest of eight: t = 4.90, p = 0.0163
    assert placebo == "+0.010 [-0.003, +0.023] |" and every.startswith("+0.020 [+0.017")
    assert rows[1][4].startswith("+0.000") and rows[1][5] == "1.000"
    by_start[3] = [r for r in by_start[3] if r.task != "addition-8"]
    assert [line.split(" | ")[3] for line in study_tables.starts(by_start).splitlines()[2:10]] == [*"44444433"]
