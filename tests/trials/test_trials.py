"""Trials: scripts that use an installed dew as a new user would. Tests of the wheel can run the same scripts."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["switch_from_trl", "faults"])
def test_trial(name, tmp_path):
    script = Path(__file__).with_name(f"{name}.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
