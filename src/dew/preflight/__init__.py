"""Checks before a run: settings, data, rewards, a sample of the model's answers, memory and disk.

    from dew.preflight import passed, preflight

    checks = preflight(read_run("my.yaml"), answers=128)

Each `Check` has a name, a status, one sentence and one remedy. `doctor` checks the machine and the installation.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dew.preflight.check import Check, passed
from dew.preflight.machine import doctor
from dew.run.config import Run

if TYPE_CHECKING:
    from dew.engines.trl.trainer import DewTrainer

__all__ = ["Check", "doctor", "passed", "preflight"]


def preflight(
    run: "Run | DewTrainer",
    typed: Mapping[str, str] | None = None,
    *,
    answers: int = 128,
    untrusted: bool = False,
    say: Callable[[str], None] = print,
) -> list[Check]:
    """Every check of a run, or of a TRL trainer, before it trains.

    `answers`: how many to sample (0: none; verl samples none). `typed`, `untrusted`: see engines/permission.py.
    """
    if isinstance(run, Run) and run.engine == "verl":
        from dew.preflight.verl import preflight_verl

        return preflight_verl(run, typed or {}, untrusted)
    from dew.preflight.run import check_run, check_trainer

    if isinstance(run, Run):
        return check_run(run, typed, answers, untrusted, say)
    return check_trainer(run, answers, say)
