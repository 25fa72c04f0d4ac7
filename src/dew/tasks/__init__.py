"""Problems with gold answers: two generated games, well-known data sets by name, and files."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from dew.errors import ConfigError, unknown
from dew.tasks.base import Row, Task
from dew.tasks.datasets import PRESETS, custom, named
from dew.tasks.files import SUFFIXES, has_prompts
from dew.tasks.games import TINY, Chain, Countdown, model_folder
from dew.tasks.overlap import overlap

__all__ = ["TINY", "Chain", "Countdown", "Row", "Task", "model_folder", "overlap", "task"]

GAMES: dict[str, type[Countdown] | type[Chain]] = {"countdown": Countdown, "chain": Chain}


def task(name: str, **settings: Any) -> Task:
    """`task("countdown", numbers=3)`, `task("gsm8k")`, or `task("problems.jsonl", prompt="question", answer="gold")`.

    A file or folder with a column `prompt` and none named `problem` has ready-made prompts, unless settings of the
    `problem` form are given.
    """
    if name in GAMES:
        return _build(GAMES[name], name, settings)
    if name in PRESETS:
        return _build(named, name, settings, name=name)
    if name.endswith(SUFFIXES) or "/" in name or Path(name).is_dir():
        changed = {"problem", "template", "without", "keep"} & settings.keys()
        if not changed and has_prompts(name, settings.get("train") or "train"):
            settings = {"prompt": "prompt", **settings}
        return _build(custom, name, settings, path=name)
    raise ConfigError(unknown(f"Unknown task {name!r}: neither built in nor a file.", name, (*GAMES, *PRESETS)))


def _build(kind: Callable[..., Task], name: str, settings: dict[str, Any], /, **given: Any) -> Task:
    known = [key for key in signature(kind).parameters if key not in given]
    wrong = [key for key in settings if key not in known]
    if wrong:
        raise ConfigError([unknown(f"Task {name} has no setting {key!r}.", key, known) for key in wrong])
    return kind(**given, **settings)
