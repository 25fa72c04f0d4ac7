"""Checks before a run: settings, data, rewards, a sample of the model's answers, memory and disk.

    from dew.preflight import passed, preflight

    checks = preflight(read_run("my.yaml"), answers=128)

Each `Check` has a name, a status, one sentence and one remedy. `doctor` checks the machine and the installation.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dew.preflight.check import Check, passed

if TYPE_CHECKING:
    from dew.preflight.installation import doctor
    from dew.preflight.run import preflight

__all__ = ["Check", "doctor", "passed", "preflight"]

LAZY = {"doctor": "dew.preflight.installation", "preflight": "dew.preflight.run"}


def __getattr__(name: str) -> Any:
    """Import on first use: `doctor` works without TRL, which takes ten seconds to import."""
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
