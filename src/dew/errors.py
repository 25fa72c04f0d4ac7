"""Errors as data: each lists `Problem`s, and a problem says what was given, why it cannot work, and what to do.

Each error is a `DewError` and also the standard-library class that fits, so `except ValueError` works too.
"""

import difflib
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. Printed as one paragraph: what, why, remedy."""

    what: str
    """What was given or found."""
    why: str = ""
    """Why that cannot work; empty if it is obvious."""
    remedy: str = ""
    """What to write or do instead; may be empty."""

    @property
    def says(self) -> str:
        """What and why, where the remedy is shown separately."""
        return f"{self.what} {self.why}".strip()

    def __str__(self) -> str:
        return f"{self.says} {self.remedy}".strip()


class DewError(Exception):
    """Base class of dew's errors. `problems` lists what is wrong, why, and what to do; the text needs no traceback."""

    problems: list[Problem]
    source: str | None
    """The file or command that the problems are in, printed above their list."""

    def __init__(self, problems: str | Problem | Iterable[str | Problem], *, source: str | None = None) -> None:
        self.source = source
        listed = [problems] if isinstance(problems, str | Problem) else list(problems)
        self.problems = [problem if isinstance(problem, Problem) else Problem(problem) for problem in listed]
        if source is None and len(self.problems) == 1:
            text = str(self.problems[0])
        else:
            text = "\n".join([*([f"{source}:"] if source else []), *(f"- {problem}" for problem in self.problems)])
        super().__init__(text)


class ConfigError(DewError, ValueError):
    """A setting that cannot work."""


class ShapeError(DewError, ValueError):
    """A tensor whose shape, type or values cannot be what was meant."""


class RewardError(DewError, RuntimeError):
    """A reward function that failed or returned something that is not a reward."""


class EngineError(DewError, RuntimeError):
    """A training engine (TRL, verl) that is missing, of the wrong version, or set up wrongly."""


class RecordError(DewError, ValueError):
    """A file of a run that cannot be read."""


type_hints: Callable[[type], dict[str, Any]] = cache(get_type_hints)
TYPE_NAMES: dict[Any, str] = {float: "a number", int: "a whole number", bool: "true or false", type(None): "null"}


def wrong_types(settings: Any) -> list[str]:
    """Errors for settings whose type is not the annotated one; they may come from a file or the command line."""
    found = []
    for name, hint in type_hints(type(settings)).items():
        value = getattr(settings, name, None)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        right = type(value) in kinds or (float in kinds and type(value) is int)
        if all(kind in TYPE_NAMES for kind in kinds) and not right:
            found.append(f"{name}={value!r} is not {' or '.join(TYPE_NAMES[kind] for kind in kinds)}.")
    return found


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`Did you mean 'gtpo'?`, or '' if no known word is close. A higher `cutoff` only accepts closer words."""
    words, known = (word, word.lower()), list(known)
    near = [x for w in words for x in difflib.get_close_matches(w, known, cutoff=cutoff)]
    near.sort(key=lambda name: sorted(name) != sorted(word))  # swapped letters first
    return f"Did you mean {near[0]!r}?" if near else ""


def unknown(what: str, word: str, known: Iterable[str], also: str = "") -> Problem:
    """The problem of an unknown name; its remedy is the closest known name or a list of all, followed by `also`."""
    known = list(known)
    remedy = did_you_mean(word, known) or f"Choose one of: {', '.join(known)}."
    return Problem(what, remedy=f"{remedy} {also}".rstrip())


def quoted(path: Path | str) -> str:
    """A path as an argument of a command to paste into a shell."""
    return shlex.quote(str(path))


def unreadable(path: Path, error: BaseException) -> Problem:
    """The problem of a file that cannot be opened or is damaged; its remedy for a missing file is the nearest name."""
    nearby = [] if path.exists() else [file.name for file in path.parent.glob("*")]
    what = f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})."
    return Problem(what, remedy=did_you_mean(path.name, nearby))


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with an engine's own `names` of settings: dew's -> the engine's."""
    for name, own in names.items():
        text = re.sub(rf"\b{name}\b", own, text)
    return text


def user_line(error: BaseException) -> str:
    """` at rules.py, line 12`: the last line of the traceback that is in a user's file, or ''."""
    ours = (sys.prefix, sys.base_prefix, str(Path(__file__).parent), "<")
    found = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    lines = [f for f in found if "-packages" not in f.filename]  # site-packages, dist-packages
    return f" at {Path(lines[-1].filename).name}, line {lines[-1].lineno}" if lines else ""


def in_one_line(error: BaseException) -> str:
    """An error as stored in run.json: its type, the user's line and its first line; for dew's errors, what and why."""
    if isinstance(error, DewError):
        return error.problems[0].says
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}{user_line(error)}: {text}"


@contextmanager
def loading(what: str, name: str, errors: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Turn these errors of a loader into a ConfigError that names the model or data set. Hubs raise many kinds."""
    try:
        yield
    except errors as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        remedy = "Check the name or the path; without network access, download it first and give its folder."
        raise ConfigError(Problem(f"{what}: {name!r} cannot be loaded ({reason}).", remedy=remedy)) from None
