"""Versions against the lock files and the supported releases, and the checks of `doctor`."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from dew.engines import compat
from dew.engines.compat import SUPPORTED
from dew.errors import EngineError
from dew.preflight import machine

ROOT = Path(__file__).parents[2]
VERL = {**dict.fromkeys(machine.PACKAGES), **machine.pins("verl")}
LOCK_FILES = [ROOT / "locks" / f"{name}.txt" for name in machine.LOCKS]


@pytest.mark.parametrize("path", LOCK_FILES, ids=lambda path: path.stem)
def test_the_matrix_agrees_with_the_lock_files(path):
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(), flags=re.MULTILINE))
    table = machine.pins(path.stem)
    assert {name: pins.get(name, pins.get(f"{name}-cpu")) for name in table} == table


def test_the_versions_that_verl_requires_on_gpus():
    found = machine.pins("verl", machine.ON_GPUS)
    assert found == {"torch": "2.11.0", "transformers": "5.9.0", "vllm": "0.24.0"}


def test_the_locks_travel_in_the_wheel():
    assert 'locks = "dew/locks"' in (ROOT / "pyproject.toml").read_text()


def test_the_tried_releases_are_those_of_pyproject_and_the_locks():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, lock in (("trl", "core"), ("transformers", "core"), ("verl", "verl")):
        releases, oldest, newest, _ = SUPPORTED[package]
        assert f"{package}{releases}" in extras["verl" if package == "verl" else "trl"]
        assert oldest in SpecifierSet(releases) and newest == machine.pins(lock)[package]


@pytest.mark.parametrize(("package", "found"), [("trl", "1.14.2"), ("trl", "2.0.0"), ("transformers", "4.57.6")])
def test_another_release_is_one_clear_error(monkeypatch, package, found):
    monkeypatch.setattr(compat, "version", lambda name: found)
    with pytest.raises(EngineError, match=rf"{package} {found} is installed.*tried with {package}.*pip install"):
        compat.require(package)


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({}, "ok", "Tried with trl 1.15.0 to 1.16.0, transformers 5.17.0 to 5.22.2."),
        ({"torch": "2.13.0+cu130"}, "ok", "2.13.0+cu130"),
        ({"trl": "1.15.1"}, "warning", "trl 1.15.1 (tested: 1.16.0)"),
        ({"trl": "1.14.2"}, "failed", "trl 1.14.2"),
        ({"trl": "2.0.0"}, "failed", "trl 2.0.0"),
        ({"trl": None}, "warning", "needs trl"),
        ({"peft": None}, "ok", "lock core"),
        ({"vllm": "0.32.0"}, "warning", "transformers 5.22.2 (tested: 5.19.0)"),
        (VERL, "ok", "verl 0.9.1"),
        ({**VERL, "torch": "2.11.0+cu130", "vllm": "0.24.0"}, "ok", "lock verl"),
        ({**VERL, "verl": "0.10.0"}, "failed", "verl 0.10.0"),
        ({**VERL, "TransferQueue": None}, "warning", "needs TransferQueue"),
    ],
)
def test_versions(monkeypatch, change, status, says):
    there = {**machine.pins("core"), **change}
    monkeypatch.setattr(machine, "installed", there.get)
    found = machine.check_versions()
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
    assert machine.check_memory().status == machine.check_disk().status == "warning"
    assert "100 MB" in machine.check_disk().says


def test_a_kernel_with_a_wrong_result_fails(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [{"name": "a GPU"}])
    monkeypatch.setattr(machine, "installed", lambda _: "3.9.0")
    monkeypatch.setattr(machine, "_kernel_error", lambda: 0.5)
    assert machine.check_triton().status == "failed"
    monkeypatch.setattr(machine, "_kernel_error", lambda: 1e-3)
    assert machine.check_triton().status == "ok"


def test_machine():
    assert machine.size(1.5e9) == "1.5 GB" and machine.size(2e6) == "2 MB" and machine.size(10) == "0.01 kB"
    assert machine.free_disk(ROOT / "no" / "such" / "folder") > 0


def test_a_folder_with_nothing_but_a_lock_is_empty(tmp_path):
    (tmp_path / ".lock").touch()
    assert machine.check_folder(tmp_path).status == "ok"
    (tmp_path / "config.yaml").touch()
    assert machine.check_folder(tmp_path).status == "warning"
    assert machine.check_folder(tmp_path / "config.yaml" / "run").status == "failed"
