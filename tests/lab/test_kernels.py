"""Run kernel_cases.py in a separate process: Triton reads TRITON_INTERPRET at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("kernel_cases.py")


@pytest.mark.parametrize("interpret", ["1", pytest.param("0", marks=pytest.mark.gpu)])
def test_kernels(interpret):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", CASES]
    environment = os.environ | {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
