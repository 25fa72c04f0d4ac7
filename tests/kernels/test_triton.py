"""Run and compile Triton's kernels in processes of their own: Triton reads TRITON_INTERPRET at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CASES = [TESTS / "kernels" / "triton_cases.py", TESTS / "lab" / "kernel_cases.py"]
FEW = (
    "entropy_gradients and dtype0 or frozen and shape1 or unlikely and True or drawn and 1.0"
    " or to_pages and 24 or fused_parts and qwen2 and 32 or kernel_cases and not 65 and not a_policy and not adapters"
    " or adapters and 130 and True or gpu_stay"
)
"""Each kernel once; the interpreter is slow."""


def run_cases(interpret, *words):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--noconftest", "-p", "no:cacheprovider", *CASES, *words]
    environment = os.environ | {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_some_cases_in_the_interpreter():
    run_cases("1", "-k", FEW)


@pytest.mark.slow
def test_in_the_interpreter():
    run_cases("1")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["75", "80", "89", "90", "100", "120"])
def test_all_compile_without_a_gpu(architecture):
    pytest.importorskip("triton")
    command = [sys.executable, TESTS / "kernels" / "compile_cases.py", architecture]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.gpu
def test_on_a_gpu():
    run_cases("0")
