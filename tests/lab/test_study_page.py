"""docs/study.md and README.md have the tables of the committed runs."""

import importlib.util
import json
import tarfile
from pathlib import Path

from dew.engines.lab import load_study

ROOT = Path(__file__).parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_and_the_figure_are_those_of_the_runs():
    study_tables = script("study_tables")
    study, readme = (page.read_text() for page in study_tables.PAGES)
    for name, table in study_tables.tables().items():
        for page in (study, readme) if name == "pooled" else (study,):
            assert f"<!-- {name} -->\n\n{table}\n\n<!-- end -->" in page, (
                f"run scripts/study_tables.py --write ({name})"
            )
    assert (ROOT / "docs" / "images" / "study-effect.svg").read_text() == study_tables.figure()


def test_the_archives_hold_run_folders(tmp_path):
    study_tables = script("study_tables")
    with tarfile.open(study_tables.RESULTS / "grpo_s-1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    found = [(r.task, r.arm, r.learning_rate, r.seed, r.scores) for r in load_study(tmp_path)]
    assert found == [(r.task, r.arm, r.learning_rate, r.seed, r.scores) for r in study_tables.read("grpo_s-1")]
    assert len(found) == 24


def test_a_study_of_version_0_2_is_converted(tmp_path):
    settings = {"prompts": 2, "group_size": 4, "generations": 4, "eval_problems": 8, "eval_k": 2}
    scores = {"area": 0.4, "final": 0.5, "pass@1": 0.3, "pass@k": 0.6, "entropy": 1.0, "length": 9.0, "flipped": 0.1}
    run = {
        "task": "t", "arm": "gone(x=1)", "learning_rate": 1e-4, "seed": 3, "algorithm": "gone", "source": "",
        "algorithm_settings": {"x": 1}, "control": None, "warm_start": "abc", "scores": scores,
        "curves": {"accuracy": [0.3, 0.4, 0.4, 0.5], "gradient": [1.0, None, 1.0, 1.0]},
        "evaluations": [{"generation": 4, "pass@1": 0.3, "pass@k": 0.6}],
    }  # fmt: skip
    old = {"format": 1, "settings": settings, "arms": ["gone(x=1)"], "runs": [run], "versions": {"dew": "0.2.0"}}
    old["tasks"] = {"t": {"warm_start": "abc", "pass@1": 0.1, "pass@16": 0.5, "steps": 9}}
    convert_study = script("convert_study")
    convert_study.convert(old, tmp_path / "new")
    (found,) = load_study(tmp_path / "new")
    assert (found.arm, found.seed, found.task, found.learning_rate) == ("gone(x=1)", 3, "t", 1e-4)
    assert found.scores == {name.replace("@k", "@2"): x for name, x in scores.items()}
    lines = [json.loads(line) for line in (found.folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[1] == {"step": 2, "accuracy": 0.4, "grad_norm": None}
    assert lines[3] == {"step": 4, "accuracy": 0.5, "grad_norm": 1.0, "eval/pass@1": 0.3, "eval/pass@2": 0.6}
    assert convert_study.archive(tmp_path / "new") == convert_study.archive(tmp_path / "new")
