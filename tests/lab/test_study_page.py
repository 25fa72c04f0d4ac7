"""docs/study.md says what the committed runs say."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("study_tables", ROOT / "scripts" / "study_tables.py")
study_tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(study_tables)


def test_the_tables_are_those_of_the_runs():
    page = (ROOT / "docs" / "study.md").read_text()
    for name, table in study_tables.tables().items():
        assert f"<!-- {name} -->\n\n{table}\n\n<!-- end -->" in page, f"run scripts/study_tables.py --write ({name})"


def test_the_figure_is_that_of_the_runs():
    assert (ROOT / "docs" / "images" / "study-effect.svg").read_text() == study_tables.figure()
