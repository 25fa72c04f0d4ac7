"""kill -9 at any moment: the resumed run ends with the weights, metrics, records and scores of one without kills."""

import json
import os
import signal
import subprocess
import sys
import warnings

import pytest

import killing
import trl_tiny as tiny
from dew.engines.trl.checkpoints import find_damage
from dew.run.folder import RunFolder

FILES = ("model/model.safetensors", "model/tokenizer.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about forking with threads
        assert killing.run(folder) == 0
    assert all(line["grad_norm"] > 0 for line in RunFolder(folder).metrics()), "a run without a gradient proves nothing"
    return folder


def scores(folder):
    return [{k: v for k, v in entry.items() if not k.startswith(tiny.TIMES)} for entry in RunFolder(folder).scores()]


def assert_same(folder, whole):
    for name in FILES:
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    assert tiny.lasting_metrics(folder) == tiny.lasting_metrics(whole)
    assert scores(folder) == scores(whole)
    records, expected = (RunFolder(one).record_files() for one in (folder, whole))
    assert [path.name for path in records] == [path.name for path in expected]
    assert [path.read_bytes() for path in records] == [path.read_bytes() for path in expected]
    assert RunFolder(folder).alarms() == RunFolder(whole).alarms()
    assert RunFolder(folder).run()["status"] == "done"
    report = json.loads((folder / "report.json").read_text())
    assert report["runs"][0]["notices"] == []
    assert "6" in (folder / "report.html").read_text()
    assert find_damage(folder / "checkpoint-6") is None
    assert not [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".part"))]


CHAIN = ["a torn line of metrics", "the model before its name"]


def test_a_run_that_is_killed_again_and_again(whole, tmp_path):
    for moment in CHAIN:
        assert killing.run(tmp_path / "run", killing.MOMENTS[moment]) == -signal.SIGKILL, moment
    assert killing.run(tmp_path / "run") == 0
    assert_same(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("moment", killing.MOMENTS)
def test_killed_once(moment, whole, tmp_path):
    assert killing.run(tmp_path / "run", killing.MOMENTS[moment]) == -signal.SIGKILL
    assert killing.run(tmp_path / "run") == 0
    assert_same(tmp_path / "run", whole)


@pytest.mark.slow
def test_killed_at_fifty_random_moments(whole, tmp_path):
    runs = killing.kill_at_random(tmp_path, 50, seed=1, check=lambda folder: assert_same(folder, whole))
    assert runs > 1


@pytest.mark.slow
def test_two_runs_with_the_same_seed_are_identical(whole, tmp_path):
    """In another Python process with another hash seed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dew", "train", str(killing.configuration(tmp_path / "again"))]
    subprocess.run(command, check=True, env={**environment, "PYTHONHASHSEED": "7"}, stdout=subprocess.DEVNULL)
    assert_same(tmp_path / "again", whole)
