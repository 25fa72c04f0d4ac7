"""Run triton_cases.py and hopper_cases.py in separate processes: Triton reads TRITON_INTERPRET at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_cases(name, *words, **environment):
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        HERE / name,
        *words,
    ]
    environment |= {"OMP_NUM_THREADS": "1"}  # small products: threads only wait for one another
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_in_the_interpreter():
    run_cases("triton_cases.py", TRITON_INTERPRET="1")


def test_some_cases_in_the_interpreter():
    run_cases(
        "triton_cases.py",
        "-k",
        "entropy_gradients or frozen or ignored or unlikely or drawn or squares or single_tokens "
        "or fused_parts and (qwen2 or gemma)",
        TRITON_INTERPRET="1",
    )


def test_the_hopper_kernel_compiles():
    pytest.importorskip("triton.experimental.gluon")
    run_cases("hopper_cases.py", TRITON_INTERPRET="0")


@pytest.mark.gpu
def test_on_a_gpu():
    run_cases("triton_cases.py", TRITON_INTERPRET="0")
