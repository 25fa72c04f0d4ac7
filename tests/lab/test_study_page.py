"""The pages of the study have the tables of the committed runs."""

import tarfile
from pathlib import Path

from scripts import study_tables

from dew.engines.lab import load_study

ROOT = Path(__file__).parents[2]


def test_the_tables_and_the_figure_are_those_of_the_runs():
    pages = "".join(page.read_text() for page in study_tables.PAGES)
    for name, table in study_tables.tables().items():
        text = f"<!-- {name} -->\n\n{table}\n\n<!-- end -->"
        assert text in pages, f"run scripts/study_tables.py --write ({name})"
    assert (ROOT / "docs" / "images" / "study-effect.svg").read_text() == study_tables.figure()


def test_the_archives_hold_run_folders(tmp_path):
    with tarfile.open(study_tables.RESULTS / "grpo_s-1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    found = [(r.task, r.arm, r.learning_rate, r.seed, r.scores) for r in load_study(tmp_path)]
    assert found == [(r.task, r.arm, r.learning_rate, r.seed, r.scores) for r in study_tables.read("grpo_s-1")]
    assert len(found) == 24
