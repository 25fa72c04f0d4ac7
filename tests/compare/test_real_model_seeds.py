"""examples/real_model_seeds.py: its tables from counts, and a whole small comparison."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from examples import real_model_seeds as script

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "real-model-seeds"


@pytest.mark.parametrize("name", ["counts-1.5b.json", "counts.json"])
def test_the_committed_tables(name):
    table = script.table(json.loads((RESULTS / name).read_text()))
    assert table.strip() in (ROOT / "docs" / "real-models.md").read_text()


def test_the_committed_figure():
    content = json.loads((RESULTS / "counts.json").read_text())
    assert (ROOT / "docs" / "images" / "real-model-seeds.svg").read_text() == script.figure(content)


@pytest.mark.slow
def test_a_whole_comparison(tmp_path):
    """Two arms, then a further seed: finished runs are not trained again."""
    given = "--recipe tiny/countdown --limit 24 --steps 4 --optimizer-steps 2 --group-size 4 --prompts 2"
    given += " --micro-batch 2 --sets countdown:6 -k 2 --arms dapo gtpo --logging_steps 1"
    words = [sys.executable, script.__file__, tmp_path, *given.split()]

    def seeds(*wanted):
        return subprocess.run([*words, "--seeds", *wanted], capture_output=True, text=True, check=True).stdout

    text = seeds("0")
    assert "0 finished, 3 to do" in text and "| gtpo − dapo | 1 |" in text
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-seed0/metrics.jsonl")}
    assert len(made) == 2
    text = seeds("0", "1")
    assert "3 finished, 2 to do" in text and "| gtpo − dapo | 2 |" in text
    assert made == {path: path.stat().st_mtime_ns for path in made}
    content = json.loads((tmp_path / "counts.json").read_text())
    assert [(entry["arm"], entry["seed"]) for entry in content["runs"]] == [
        ("start", 0), ("dapo", 0), ("gtpo", 0), ("dapo", 1), ("gtpo", 1),
    ]  # fmt: skip
    assert len(content["runs"][-1]["sets"]["countdown"]["correct"]) == 6
    assert len(content["runs"][-1]["curves"]["accuracy"]) == 2
    assert content["runs"][0]["ended"] <= content["runs"][-1]["began"] < content["runs"][-1]["ended"]
    assert script.table(content) in text
