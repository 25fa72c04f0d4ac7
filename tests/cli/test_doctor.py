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


HEAVY = """
import sys
from importlib import import_module
from dew.cli.app import COMMANDS
from dew.preflight import doctor
[import_module(f"dew.cli.{name}") for name in COMMANDS]
print("torch" in sys.modules)
doctor()
print({"transformers", "trl", "datasets", "peft"} & set(sys.modules))
"""


def test_commands_and_doctor_import_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "set()"]
