"""The quickstart's tables in docs/results.md are those of the committed runs."""

import json
from pathlib import Path

import pytest
from scripts import quickstart_evidence as script

from dew.compare import Result
from dew.run.folder import RunFolder

ROOT = Path(__file__).parents[2]


def test_tables_in_the_docs_are_recomputed_from_the_runs():
    assert script.tables(json.loads(script.FILE.read_text())) in (ROOT / "docs" / "results.md").read_text()


def test_tables_by_hand():
    values = {"dapo": [0.2, 0.4], "dew": [0.3, 0.4]}
    runs = [Result(name, i, {"area": x}) for name, xs in values.items() for i, x in enumerate(xs)]
    row = script.tables([script.entry("two", "Two seeds", runs)]).splitlines()[-1]
    # dapo: (0.2 + 0.4) / 2 = 0.3, √(0.1² + 0.1²) = 0.141; dew: 0.35, √(2 · 0.05²) = 0.071; (0.1 + 0) / 2 = 0.05
    assert row.startswith("| Two seeds | accuracy, averaged over training | 0.300 ± 0.141 | 0.350 ± 0.071 | +0.050 [")
    assert row.endswith("| 1 of 2 |")


@pytest.mark.parametrize("rate", [1e-4, 3e-4])
def test_the_runs_of_a_comparison_and_of_a_study(tmp_path, rate):
    for arm in ("dapo", "dew", "gtpo"):
        for seed in (4, 5):
            runs = {"compare": {}}
            runs |= {f"study/{task}": {"data": task} for task in ("countdown-6", "countdown-8")}
            for folder, facts in runs.items():
                for r in (1e-4, 3e-4) if facts else (0,):
                    run = RunFolder(tmp_path / folder / f"{arm}-{r}-{seed}")
                    run.write_run({**facts, "arm": arm, "seed": seed, **({"learning_rate": r} if facts else {})})
                    run.append_metrics({"step": 1, "accuracy": r})
    found = script.measured_in(tmp_path / "study", rate)
    assert [(r["arm"], r["seed"]) for r in found["runs"]] == [("dapo", 4), ("dew", 4), ("dapo", 5), ("dew", 5)]
    assert all(r["scores"] == {"area": rate} for r in found["runs"]) and "2 seeds" in found["what"]
    for home in (tmp_path / "study").glob("*/*"):
        RunFolder(home).write_run({**RunFolder(home).run(), "warm_start": {"model": "some/model"}})
    assert script.measured_in(tmp_path / "study", rate)["what"].startswith("model with LoRA, countdown")
    found = script.measured_in(tmp_path / "compare", rate)
    assert len(found["runs"]) == 4 and found["what"] == "The quickstart, 2 seeds"
