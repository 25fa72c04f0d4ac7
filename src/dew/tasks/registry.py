"""Tasks by name, or by the path of a JSONL file."""

from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from dew.errors import ConfigError
from dew.tasks.base import Task
from dew.tasks.chain import Chain
from dew.tasks.countdown import Countdown
from dew.tasks.files import ENDINGS
from dew.tasks.jsonl import Jsonl
from dew.tasks.presets import PRESETS, NamedSet, OwnSet

TASKS: dict[str, type[Countdown] | type[Chain]] = {"countdown": Countdown, "chain": Chain}


def task(name: str, **settings: Any) -> Task:
    """`task("countdown", numbers=3)`, or `task("problems.jsonl", answer="gold")`."""
    if name.endswith(".jsonl") and not {"problem", "template", "without", "keep"} & settings.keys():
        return _build(Jsonl, name, settings, path=name)
    if name in PRESETS:
        return _build(NamedSet, name, settings, name=name)
    if name not in TASKS and (name.endswith(ENDINGS) or "/" in name):
        return _build(OwnSet, name, settings, path=name)
    if name not in TASKS:
        known = (*TASKS, *PRESETS)
        near = get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}, and any file.jsonl."
        raise ConfigError(f"No task is called {name!r}. {hint}")
    return _build(TASKS[name], name, settings)


def _build(kind: Callable[..., Task], name: str, settings: dict[str, Any], /, **given: Any) -> Task:
    known = [field.name for field in fields(kind) if field.name not in given]  # type: ignore[arg-type]
    for key in settings:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It has: {', '.join(known)}."
            raise ConfigError(f"Task {name} has no setting {key!r}. {hint}")
    return kind(**given, **settings)
