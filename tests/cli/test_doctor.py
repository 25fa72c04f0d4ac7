"""The command `dew doctor`: its output, and that it imports nothing heavy."""

import json
import subprocess
import sys

from typer.testing import CliRunner

import dew.cli.preflight  # noqa: F401 adds the command
from dew.cli.app import app
from dew.preflight.machine import PACKAGES


def test_command():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    value = json.loads(result.stdout)
    assert result.exit_code == (0 if value["ok"] else 1)
    assert [row["package"] for row in value["versions"]] == list(PACKAGES)
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
