"""Checks before a run: settings, data, rewards, a sample of the model's answers, memory and disk.

    from dew.preflight import passed, preflight

    checks = preflight(read_run("my.yaml"), answers=128)

Each `Check` has a name, a status, one sentence and one remedy. `doctor` checks the machine and the installation.
"""

from typing import TYPE_CHECKING, Any

from dew.preflight.check import Check, passed
from dew.preflight.machine import doctor

if TYPE_CHECKING:
    from dew.preflight.run import preflight

__all__ = ["Check", "doctor", "passed", "preflight"]


def __getattr__(name: str) -> Any:
    """Import `preflight` on first use: `doctor` works without TRL, which takes ten seconds to import."""
    if name != "preflight":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dew.preflight.run import preflight

    return preflight
