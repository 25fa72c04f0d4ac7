"""dew doctor: the matrix of versions agrees with the locks, and only what is required can fail."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dew.cli.preflight  # noqa: F401 adds the command
from dew.cli.app import app
from dew.preflight import installation, machine, passed, versions

ROOT = Path(__file__).parents[2]
VERL = {**dict.fromkeys(versions.PACKAGES), **versions.LOCKS["verl"]}
LOCK_FILES = sorted((ROOT / "locks").glob("*.txt"))


@pytest.mark.parametrize("path", LOCK_FILES, ids=lambda path: path.stem)
def test_the_matrix_is_what_the_lock_files_say(path):
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(), flags=re.MULTILINE))
    table = versions.LOCKS[path.stem]
    assert {name: pins.get(name, pins.get(f"{name}-cpu")) for name in table} == table


def test_versions_that_verl_requires_on_gpus():
    assert versions.ON_GPUS == {"torch": "2.11.0", "transformers": "5.9.0", "vllm": "0.24.0"}


def test_the_locks_travel_in_the_wheel():
    assert 'locks = "dew/locks"' in (ROOT / "pyproject.toml").read_text()


def test_the_bounds_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    for name, (low, high) in versions.BOUNDS.items():
        assert f'"{name}>={low}{f",<{high}" if high else ""}"' in text
    low, high = (".".join(map(str, bound)) for bound in installation.PYTHON)
    assert f'requires-python = ">={low},<{high}"' in text


def test_every_lock_is_within_the_bounds_that_it_can_be_held_to():
    for lock in ("core", "vllm", "verl"):
        assert all(versions.supported(name, number, lock) for name, number in versions.LOCKS[lock].items())


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({}, "ok", "lock core"),
        ({"torch": "2.13.0+cu130"}, "ok", "2.13.0+cu130"),
        ({"trl": "1.15.1"}, "warning", "trl 1.15.1 (tested: 1.16.0)"),
        ({"trl": "1.13.0"}, "failed", "trl 1.13.0"),
        ({"trl": "2.0.0"}, "failed", "trl 2.0.0"),
        ({"trl": None}, "warning", "trl not installed"),
        ({"peft": None}, "ok", "lock core"),
        ({"vllm": "0.32.0"}, "warning", "transformers 5.22.2 (tested: 5.19.0)"),
        (VERL, "ok", "verl 0.9.1"),
        ({**VERL, "torch": "2.11.0+cu130", "vllm": "0.24.0"}, "ok", "lock verl"),
        ({**VERL, "verl": "0.10.0"}, "failed", "verl 0.10.0"),
        ({**VERL, "TransferQueue": None}, "warning", "TransferQueue not installed"),
    ],
)
def test_versions(monkeypatch, change, status, says):
    there = {**versions.LOCKS["core"], **change}
    monkeypatch.setattr(versions, "installed", there.get)
    found = versions.check()
    assert found.status == status and says in found.says
    assert bool(found.remedy) == (status != "ok")


def test_numbers():
    assert versions.numbers("2.13.0+cpu") == (2, 13, 0)
    assert versions.numbers("5.0.1rc2") == (5, 0, 1)
    assert versions.numbers("1.14") < versions.numbers("1.16.0") < versions.numbers("2")


def test_what_is_required_and_broken_fails(monkeypatch):
    monkeypatch.setattr(installation, "PYTHON", ((3, 99), (4, 0)))
    monkeypatch.setattr(installation, "NEEDED", ("numpy", "no_such_package"))
    checks = {check.name: check for check in installation.doctor()}
    assert checks["python"].status == checks["packages"].status == "failed"
    assert "no_such_package" in checks["packages"].says and not passed(list(checks.values()))


def test_advice_about_threads(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = installation.check_threads()
    assert found.status == "warning" and "8 threads" in found.says and "OMP_NUM_THREADS=1" in found.remedy
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert installation.check_threads().status == "ok"


def test_little_memory_and_disk_are_warnings(monkeypatch):
    monkeypatch.setattr(installation, "free_host_memory", lambda: 10**9)
    monkeypatch.setattr(installation, "free_disk", lambda _: 10**8)
    assert installation.check_memory().status == installation.check_disk().status == "warning"
    assert "100 MB" in installation.check_disk().says


def test_a_kernel_that_computes_something_else_is_found(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(versions, "installed", lambda _: "3.9.0")
    monkeypatch.setattr(installation, "_kernel_error", lambda: 0.5)
    assert installation.check_triton().status == "failed"
    monkeypatch.setattr(installation, "_kernel_error", lambda: 1e-3)
    assert installation.check_triton().status == "ok"


def test_machine():
    assert machine.size(1.5e9) == "1.5 GB" and machine.size(2e6) == "2 MB" and machine.size(10) == "0.01 kB"
    assert machine.free_host_memory() > 0
    assert machine.existing(ROOT / "no" / "such" / "folder") == ROOT
    assert machine.free_disk(ROOT / "no" / "such" / "folder") > 0


def test_command():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    value = json.loads(result.stdout)
    assert result.exit_code == (0 if value["ok"] else 1)
    assert [row["package"] for row in value["versions"]] == list(versions.PACKAGES)
    assert {check["status"] for check in value["checks"]} <= {"ok", "warning", "failed"}
    table = CliRunner().invoke(app, ["doctor"])
    assert "lock verl" in table.stdout and "python" in table.stdout


def printed_by(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_doctor_and_help_import_nothing_heavy():
    heavy = "{'transformers', 'trl', 'datasets', 'peft'}"
    doctor = "import sys; from dew.preflight import doctor; doctor()"
    assert printed_by(f"{doctor}; print({heavy} & set(sys.modules))") == "set()"
    commands = "from importlib import import_module; from dew.cli.app import COMMANDS"
    every = "[import_module(f'dew.cli.{name}') for name in COMMANDS]"
    assert printed_by(f"import sys; {commands}; {every}; print('torch' in sys.modules)") == "False"
