"""Problems with gold answers: two generated games, reasoning-gym, named data sets, and files."""

import os
from collections.abc import Callable
from inspect import signature
from typing import Any

from dew.errors import ConfigError, Problem, unknown
from dew.tasks.datasets import PRESETS, Task, custom, named
from dew.tasks.games import PREFIX, TINY, Countdown, Gym, Sums, model_folder
from dew.tasks.rows import SUFFIXES, Row, first_columns

__all__ = ["TINY", "Countdown", "Row", "Sums", "Task", "model_folder", "task"]

GAMES: dict[str, Callable[..., Task]] = {"countdown": Countdown, "sums": Sums}


def task(name: str, **settings: Any) -> Task:
    """Return a task by name or path, with its settings.

    E.g. `task("countdown", numbers=3)`, `task("gsm8k")`, `task("reasoning_gym:leg_counting")` or
    `task("problems.jsonl", problem="question", answer="gold")`. If a file or folder has a column `prompt` and none
    named `problem`, its prompts are used as they are, unless settings for `problem` are given.
    """
    settings |= {x: [settings[x]] for x in ("keep", "without") if isinstance(settings.get(x), str)}
    if name in GAMES:
        return _build(GAMES[name], name, settings)
    if name.startswith(PREFIX):
        return Gym(name, **settings)
    if name in PRESETS:
        return _build(named, name, settings, name=name)
    if name.endswith(SUFFIXES) or "/" in name or os.path.exists(name):
        changed = {"problem", "template", "without", "keep"} & settings.keys()
        if not changed and {"prompt", "problem"} & first_columns(name, settings.get("train") or "train") == {"prompt"}:
            settings = {"prompt": "prompt", **settings}
        return _build(custom, name, settings, path=name)
    raise ConfigError(unknown(f"Unknown task {name!r}: neither built in nor a file.", name, (*GAMES, *PRESETS)))


def _build(kind: Callable[..., Task], name: str, settings: dict[str, Any], /, **given: Any) -> Task:
    known = [key for key in signature(kind).parameters if key not in given]
    if wrong := [unknown(f"Task {name} has no setting {key!r}.", key, known) for key in settings if key not in known]:
        raise ConfigError(wrong)
    try:
        return kind(**given, **settings)
    except (TypeError, AttributeError) as error:  # a number instead of text, ...
        what = f"Task {name}: {settings} cannot be used ({error})."
        raise ConfigError(Problem(what, remedy="docs/data.md and docs/tasks.md describe the settings.")) from None
