"""examples/real_model_seeds.py: its tables from counts, and a whole small comparison."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from examples import real_model_seeds as script

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "real-model-seeds"


def run(arm, seed, correct, accuracy=(0.25, 0.75)):
    curves = {"accuracy": accuracy, "entropy": [0.5], "length": [20.0], "cut_off": [0.0, 0.5], "flipped": []}
    return {"arm": arm, "seed": seed, "sets": {"sums": {"correct": correct, "cut_off": 0.5, "tokens": 20}}} | (
        {} if arm == script.START else {"curves": curves}
    )


def counts(*runs):
    return {"settings": {"k": 2, "sets": {"sums": 2}}, "choice": {}, "runs": list(runs)}


def rows(text):
    return {line.split(" | ")[0].removeprefix("| "): line.strip("| ").split(" | ")[1:] for line in text.splitlines()}


def test_differences_are_paired_by_seed():
    """gtpo gains 0.5 in pass@1 on seed 0 and 0.25 on seed 1, whatever their level: +0.375, t = 12.7, error 0.125."""
    text = script.table(
        counts(
            run("dapo", 0, [1, 0]), run("dapo", 1, [0, 1]),
            run("gtpo", 0, [2, 1], accuracy=[0.5, 1.0]), run("gtpo", 1, [1, 1], accuracy=[0.5, 1.0]),
            run("gtpo", 7, [0, 0]),  # its pair is still to be trained
        )
    )  # fmt: skip
    seeds, area, first, _ = rows(text)["gtpo − dapo"]
    assert (seeds, area, first) == ("2", "+0.250 [+0.250, +0.250]", "+0.375 [-1.213, +1.963]")


def test_every_arm_is_also_compared_with_its_control_and_one_seed_by_problem():
    control = "gtpo(alpha1=1.1,alpha2=0.0)"
    text = script.table(counts(run("dapo", 0, [0, 1]), run(control, 0, [1, 1]), run("gtpo", 0, [1, 2])))
    found = rows(text)
    assert found[f"gtpo − {control}"][:3] == ["1", "+0.000", "+0.250 [-1.000, +1.000]"]
    # both +0.5: 1 − 0.025^(1/2) = 0.842 of the problems may still be anywhere from −1 to 1
    assert found["gtpo − dapo"][2] == "+0.500 [-0.763, +0.921]"
    assert "With one seed" in text and "**" not in text


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
    given += " --micro-batch 2 --sets countdown:6 -k 2"
    words = [
        sys.executable,
        script.__file__,
        tmp_path,
        *given.split(),
        "--arms",
        "dapo",
        "gtpo",
        "--logging_steps",
        "1",
    ]

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
