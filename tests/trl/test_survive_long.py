"""A long run does not use more memory, file handles, seconds per step or files than a short one.

pytest tests/trl/test_survive_long.py -m slow                     400 steps
DEW_LONG_STEPS=2000 pytest tests/trl/test_survive_long.py -m slow      as in docs/reliability.md
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

import pytest

from dew.run.folder import RunFolder

STEPS = int(os.environ.get("DEW_LONG_STEPS", "400"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long") / "run"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).parents[1] / "support" / "long_run.py"
    subprocess.run([sys.executable, str(script), str(folder), str(STEPS)], check=True, env=environment)
    return folder


def halves(run, name):
    values = [sample[name] for sample in json.loads((run / "watched.json").read_text())]
    return values[: len(values) // 2], values[len(values) // 2 :]


@pytest.mark.slow
def test_memory_is_flat(run):
    first, last = halves(run, "memory")
    assert mean(last) < 1.02 * mean(first)
    assert max(last) < 1.02 * max(first)


@pytest.mark.slow
def test_file_handles_are_flat(run):
    first, last = halves(run, "files")
    assert max(last) <= max(first)


@pytest.mark.slow
def test_the_work_of_a_step_is_flat(run):
    """CPU seconds, which do not depend on other load on the machine."""
    first, last = halves(run, "cpu_seconds")
    assert median(last) < 1.25 * median(first)


@pytest.mark.slow
def test_what_is_written_is_bounded(run):
    folder = RunFolder(run)
    assert len(folder.metrics()) == STEPS
    assert (run / "metrics.jsonl").stat().st_size < 1500 * STEPS
    assert (run / "alarms.jsonl").stat().st_size < 300 * STEPS
    assert len(folder.record_files()) <= 40
    assert len(list(run.glob("checkpoint-*"))) == 2
