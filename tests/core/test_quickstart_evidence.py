"""The quickstart's tables in docs/results.md are those of the committed runs."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("quickstart_evidence", ROOT / "scripts" / "quickstart_evidence.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_tables_in_the_docs_are_recomputed_from_the_runs():
    assert script.tables(json.loads(script.FILE.read_text())) in (ROOT / "docs" / "results.md").read_text()


def test_tables_by_hand():
    values = {"dapo": [0.2, 0.4], "dew": [0.3, 0.4]}
    runs = [
        {"algorithm": name, "seed": i, "scores": {"area": x}} for name, xs in values.items() for i, x in enumerate(xs)
    ]
    row = script.tables([script.entry("two", "Two seeds", runs)]).splitlines()[-1]
    # dapo: (0.2 + 0.4) / 2 = 0.3, √(0.1² + 0.1²) = 0.141; dew: 0.35, √(2 · 0.05²) = 0.071; (0.1 + 0) / 2 = 0.05
    assert row.startswith("| Two seeds | accuracy, averaged over training | 0.300 ± 0.141 | 0.350 ± 0.071 | +0.050 [")
    assert row.endswith("| 1 of 2 |")


@pytest.mark.parametrize("rate", [1e-4, 3e-4])
def test_a_study_gives_the_runs_of_one_rate(tmp_path, rate):
    runs = [
        {"task": task, "arm": arm, "learning_rate": r, "seed": seed, "scores": {"area": r, "final": 1.0}}
        for task in ("countdown-6", "countdown-8")
        for arm in ("dapo", "dew", "gtpo")
        for r in (1e-4, 3e-4)
        for seed in (4, 5)
    ]
    (tmp_path / "study.json").write_text(json.dumps({"runs": runs}))
    found = script.from_study(tmp_path / "study.json", rate)
    assert [(r["algorithm"], r["seed"]) for r in found["runs"]] == [("dapo", 4), ("dew", 4), ("dapo", 5), ("dew", 5)]
    assert all(r["scores"] == {"area": rate} for r in found["runs"]) and "2 seeds" in found["what"]


def test_a_comparison_gives_its_runs(tmp_path):
    runs = [{"algorithm": a, "seed": s, "groups": 9, "scores": {"area": 0.1, "pass@1": 0.2, "pass@2": 0.3}}
            for a in ("dapo", "dew", "grpo") for s in (1, 2)]  # fmt: skip
    (tmp_path / "compare.json").write_text(json.dumps({"runs": runs}))
    found = script.from_comparison(tmp_path)
    assert [r["seed"] for r in found["runs"]] == [1, 1, 2, 2]
    assert found["runs"][0]["scores"] == {"area": 0.1, "pass@1": 0.2} and found["what"] == "2 further pairs of runs"
