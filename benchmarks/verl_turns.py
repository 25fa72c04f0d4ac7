"""verl runs that take turns, step by step, so that a machine that gets faster or slower does not favour one of them.

A run that imports this module (VERL_USE_EXTERNAL_MODULES=verl_turns) with VERL_TURNS=FOLDER/NAME in its environment
writes FOLDER/NAME.ready before each step and after the last one, and waits there for FOLDER/NAME.go, outside verl's
timing of the step. `take_turns` gives these signals.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

WAIT = 0.02


def wait_for_turn(path: str) -> None:
    ready, go = Path(f"{path}.ready"), Path(f"{path}.go")
    ready.touch()
    while not go.exists():
        time.sleep(WAIT)
    ready.unlink()
    go.unlink()


def take_turns(folder: Path, ended: Mapping[str, Callable[[], bool]]) -> None:
    """Wait until every run is ready, then let them train one step each, in order, until all have ended."""

    def settle(name: str) -> bool:
        """Wait until the run waits for its turn or has ended; whether it waits."""
        ready, go = folder / f"{name}.ready", folder / f"{name}.go"
        while not ended[name]():
            if ready.exists() and not go.exists():
                return True
            time.sleep(WAIT)
        return False

    running = [name for name in ended if settle(name)]
    while running:
        for name in running:
            (folder / f"{name}.go").touch()
            settle(name)
        running = [name for name in running if not ended[name]()]


if "VERL_TURNS" in os.environ:
    from verl.utils.skip import SkipManager

    set_step = SkipManager.set_step

    def set_step_in_turn(step: int) -> None:
        """verl calls this before every step and after the last."""
        wait_for_turn(os.environ["VERL_TURNS"])
        set_step(step)

    SkipManager.set_step = set_step_in_turn
