"""What can be known before a run: arithmetic, data, reward, a sample of answers, memory, disk.

    from dew.preflight import passed, preflight

    checks = preflight(read_run("my.yaml"), answers=128)

Each `Check` has a name, a status, one sentence and one remedy. `doctor` looks at the machine and the installation.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dew.preflight.check import Check, passed

if TYPE_CHECKING:
    from dew.preflight.installation import doctor
    from dew.preflight.run import preflight

__all__ = ["Check", "doctor", "passed", "preflight"]


WHERE = {"doctor": "dew.preflight.installation", "preflight": "dew.preflight.run"}


def __getattr__(name: str) -> Any:
    """Each when it is asked for: `doctor` does without TRL, which takes ten seconds to import."""
    if name in WHERE:
        return getattr(import_module(WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
