"""What a checkpoint must keep besides TRL's, so that a run that was killed goes on as if it had not been.

TRL and transformers keep weights, optimizer, schedule and random numbers. They lose the generation that is being
trained on, the place in it, and in later epochs the order of the prompts.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from dew.engines.trl.manifest import SEAL, damage
from dew.errors import ConfigError

logger = logging.getLogger("dew")

STATE = "trainer_state.json"
"""Written last by transformers: a checkpoint of plain TRL's without it, or with half of it, was cut off."""
OWN_STATE = "dew_state_{}.pt"
"""Written first by dew, one per process: a checkpoint with it and without a seal was cut off."""
CUT_OFF = "the run was cut off while it was written"


def last_good(folder: str) -> str | None:
    """The newest checkpoint that is whole, or None. Newer ones are told of, for the run will write them again.

    What was cut off goes; what was whole and is damaged is put aside as `damaged-checkpoint-120`.
    """
    checkpoints = {
        int(match[1]): path
        for path in Path(folder).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    for step in sorted(checkpoints, reverse=True):
        path = checkpoints[step]
        problem = flaw(path)
        if problem is None:
            return str(path)
        if problem == CUT_OFF:
            logger.warning("%s is removed: %s. The one before it is tried.", path, problem)
        else:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            logger.warning(
                "%s is damaged: %s. It is now %s, and the one before it is tried.", path, problem, aside.name
            )
        shutil.rmtree(path, ignore_errors=True)
    return None


def flaw(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be gone on from; None where it can."""
    if (checkpoint / SEAL).exists():
        return damage(checkpoint)
    if (checkpoint / OWN_STATE.format(0)).exists():
        return CUT_OFF
    try:
        return None if isinstance(json.loads((checkpoint / STATE).read_text()), dict) else f"{STATE} is not whole"
    except (OSError, ValueError):
        return f"{STATE} is missing or not whole"


def require_good(checkpoint: str) -> str:
    """A checkpoint that somebody named."""
    problem = flaw(Path(checkpoint))
    if problem is not None:
        raise ConfigError(
            f"resume_from_checkpoint: {checkpoint} cannot be used: {problem}. Write True to take the newest that is "
            "whole."
        )
    return checkpoint


def no_checkpoint(folder: str) -> ConfigError:
    return ConfigError(
        f"resume: {folder} holds no complete checkpoint. Start without resume_from_checkpoint, and set save_steps "
        "so that there is one before the run can be cut off."
    )


def save_state(folder: str, process: int, state: dict[str, Any]) -> None:
    os.makedirs(folder, exist_ok=True)
    torch.save(state, _path(folder, process))


def load_state(folder: str, process: int) -> dict[str, Any] | None:
    """None for a checkpoint that plain TRL wrote."""
    path = _path(folder, process)
    return torch.load(path, map_location="cpu", weights_only=True) if os.path.exists(path) else None


def epochs_done(folder: str) -> int:
    return int(json.loads((Path(folder) / STATE).read_text()).get("epoch") or 0)


def _path(folder: str, process: int) -> str:
    return os.path.join(folder, OWN_STATE.format(process))
