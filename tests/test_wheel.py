"""The wheel and the sdist, installed into new environments and used outside the repository, as a user would."""

import os
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCH = next(line for line in (ROOT / "locks" / "core.txt").read_text().splitlines() if line.startswith("torch=="))

pytestmark = pytest.mark.slow


def run(*words, cwd, fails=False):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """A new environment with the wheel and these extras: its folder of commands, and a folder to work in."""

    @cache
    def make(extras, lock="core"):
        folder = tmp_path_factory.mktemp(extras.replace(",", "-") or "core")
        run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
        bin, locks = folder / "venv" / "bin", ROOT / "locks" / f"{lock}.txt"
        run(bin / "pip", "install", "-q", TORCH, "-c", locks, cwd=folder)
        run(bin / "pip", "install", "-q", "-c", locks, f"{built[0]}[{extras}]" if extras else built[0], cwd=folder)
        return bin, folder

    return make


def test_what_is_in_the_archives(built):
    wheel, sdist = built
    names = zipfile.ZipFile(wheel).namelist()
    assert "dew/recipes/tiny/countdown.yaml" in names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "src/dew/__init__.py"} <= inside
    assert not [name for name in inside if name.startswith((".venv", "runs", "build/"))]


def test_the_core_alone(environment):
    bin, folder = environment("")
    assert "gtpo: loss" in run(bin / "python", "-W", "error", ROOT / "examples" / "logits_to_loss.py", cwd=folder)
    run(bin / "python", "-W", "error", "-c", "import dew.kernels", cwd=folder)
    assert "typer" not in run(bin / "pip", "list", cwd=folder)
    assert "pip install 'dew-rl[cli]'" in run(bin / "dew", "--help", cwd=folder, fails=True)


def test_the_commands_without_an_engine(environment):
    bin, folder = environment("cli")
    assert "dew 0." in run(bin / "dew", "--version", cwd=folder)
    assert "Train" in run(bin / "dew", "--help", cwd=folder)
    assert "GTPO" in run(bin / "python", ROOT / "examples" / "one_group.py", cwd=folder)
    said = run(bin / "dew", "train", "tiny/countdown", cwd=folder, fails=True)
    assert "pip install" in said and "trl" in said


@pytest.mark.parametrize("extras", ["trl,math", "trl,math,kernels"])
def test_training(environment, extras):
    bin, folder = environment(extras)
    run(bin / "dew", "train", "tiny/countdown", "--max_steps", "2", "--output_dir", "mine", cwd=folder)
    assert "mine" in run(bin / "dew", "report", "mine", cwd=folder)
    run(bin / "dew", "explain", "mine", cwd=folder)
    run(bin / "dew", "doctor", cwd=folder)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="verl refuses Python 3.13")
def test_the_verl_extra(environment):
    bin, folder = environment("verl", lock="verl")
    run(bin / "python", "-c", "import verl, ray, dew.engines.verl.trainer", cwd=folder)
    said = run(bin / "dew", "train", "paper/qwen2.5-7b", "--engine", "verl", "--dry-run", cwd=folder)
    assert "dew.engines.verl.main" in said and "verl is not installed" not in said
