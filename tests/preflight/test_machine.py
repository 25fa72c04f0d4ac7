"""Versions against the supported releases, and the checks of `doctor`."""

import tomllib
from pathlib import Path

import pytest

from dew.engines import compat
from dew.engines.compat import SUPPORTED
from dew.errors import EngineError
from dew.preflight import machine

ROOT = Path(__file__).parents[2]
TRL = {"transformers": "5.23.0", "trl": "1.16.0", "accelerate": "1.15.0", "datasets": "5.2.0"}
VERL = {"verl": "0.9.1", "ray": "2.56.0", "TransferQueue": "0.1.10"}


def test_the_tried_releases_are_those_of_pyproject_and_the_locks():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, lock in (("trl", "core"), ("transformers", "core"), ("verl", "verl")):
        releases, newest = SUPPORTED[package]
        assert f"{package}{releases}" in extras["verl" if package == "verl" else "trl"]
        assert f"{package}=={newest}" in (ROOT / "locks" / f"{lock}.txt").read_text().splitlines()


@pytest.mark.parametrize(("package", "found"), [("trl", "1.14.2"), ("trl", "2.0.0"), ("transformers", "4.57.6")])
def test_another_release_is_one_clear_error(monkeypatch, package, found):
    monkeypatch.setattr(compat, "version", lambda name: found)
    with pytest.raises(EngineError, match=rf"{package} {found} is installed.*works with {package}.*pip install"):
        compat.require(package)


@pytest.mark.parametrize(
    ("there", "status", "says"),
    [
        (TRL, "ok", "tested up to transformers 5.23.0, trl 1.16.0."),
        ({**TRL, "trl": "1.15.1"}, "ok", "trl 1.15.1"),
        ({**TRL, "trl": "1.17.0"}, "warning", "trl 1.17.0"),
        ({**TRL, "trl": "1.14.2"}, "failed", "trl 1.14.2"),
        ({**TRL, "trl": "2.0.0"}, "failed", "trl 2.0.0"),
        ({**TRL, "trl": None}, "warning", "install: trl"),
        (VERL, "ok", "verl 0.9.1"),
        ({**VERL, "verl": "0.10.0"}, "failed", "verl 0.10.0"),
        ({**VERL, "TransferQueue": None}, "warning", "install: TransferQueue"),
    ],
)
def test_versions(monkeypatch, there, status, says):
    monkeypatch.setattr(machine, "installed", there.get)
    found = machine.check_versions()
    assert any(x["supported"] == ">=5.17" for x in machine.versions()) == (not there.get("verl"))  # TRL's range
    assert found.status == status and says in found.says
    assert bool(found.remedy) == (status != "ok")


def test_advice_about_threads(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = machine.check_torch()
    assert found.status == "warning" and "8 threads" in found.says and "OMP_NUM_THREADS=1" in found.remedy
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert machine.check_torch().status == "ok"


def test_little_memory_and_disk_are_warnings(monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 10**9)
    monkeypatch.setattr(machine, "free_disk", lambda _: 10**8)
    memory, disk = machine.check_free()
    assert memory.status == disk.status == "warning" and "100 MB" in disk.says


def test_a_folder_with_nothing_but_a_lock_is_empty(tmp_path):
    (tmp_path / ".lock").touch()
    assert machine.check_folder(tmp_path).status == "ok"
    (tmp_path / "config.yaml").touch()  # of another program: not even --overwrite deletes it
    found = machine.check_folder(tmp_path)
    assert found.status == "warning" and "does not hold a run" in found.says and "overwrite" not in found.remedy
    (tmp_path / "run.json").touch()  # a run that failed before its first step
    assert machine.check_folder(tmp_path).status == "ok"
    (tmp_path / "metrics.jsonl").touch()
    assert machine.check_folder(tmp_path).status == "warning"
    assert machine.check_folder(tmp_path / "config.yaml" / "run").status == "failed"
