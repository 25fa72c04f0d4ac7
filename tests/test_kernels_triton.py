"""Runs triton_cases.py in a process of its own: Triton decides at import whether it interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("triton_cases.py")


def run_cases(**environment):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_under_the_interpreter():
    run_cases(TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_on_a_gpu():
    run_cases(TRITON_INTERPRET="0")
