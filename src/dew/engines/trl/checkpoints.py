"""What a checkpoint must keep besides TRL's, so that a run that was killed goes on as if it had not been.

TRL and transformers keep weights, optimizer, schedule and random numbers. They lose the generation that is being
trained on, the place in it, and in later epochs the order of the prompts.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from dew.errors import ConfigError

STATE = "trainer_state.json"
"""Written last by transformers: a checkpoint without it, or with half of it, was cut off."""


def last_complete(folder: str) -> str:
    """The newest checkpoint that was written to its end."""
    found = {
        int(match[1]): path
        for path in Path(folder).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and _complete(path)
    }
    if not found:
        raise ConfigError(
            f"resume: {folder} holds no complete checkpoint. Start without resume_from_checkpoint, and set save_steps "
            "so that there is one before the run can be cut off."
        )
    return str(found[max(found)])


def _complete(path: Path) -> bool:
    try:
        return isinstance(json.loads((path / STATE).read_text()), dict)
    except (OSError, ValueError):
        return False


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
    return os.path.join(folder, f"dew_state_{process}.pt")
