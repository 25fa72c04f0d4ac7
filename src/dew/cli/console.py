"""The console that every command prints to: errors, tables of checks, JSON, and tokens coloured by credit.

Anything printed may contain text of a model or of somebody else's file. So square brackets are never markup, and no
control character of the text reaches the terminal, only rich's own colours and cursor moves.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from dew.errors import Problem
from dew.preflight import Check
from dew.run.folder import is_main_process


class PlainConsole(Console):
    """Prints text as text, in whole lines: paths and commands can be copied."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        super().print(*objects, **{"soft_wrap": all(isinstance(x, str) for x in objects), **settings})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def shown(text: str) -> str:
    """Text that is safe for a terminal: no control characters, no direction marks."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


def printable(text: str) -> str:
    """The same on one line."""
    return shown(text.replace("\n", "⏎"))


out = PlainConsole(quiet=not is_main_process)
err = PlainConsole(stderr=True)


class PlainRecord(logging.LogRecord):
    """A log message of any library: text and colours, no other control characters."""

    def getMessage(self) -> str:
        parts = re.split(r"(\x1b\[[\d;]*m)", super().getMessage())
        return "".join(part if i % 2 else shown(part) for i, part in enumerate(parts))


class LogToConsole(logging.Handler):
    """dew's own warnings, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_main_process and record.name != "dew.alarms":  # the live view shows those
            err.print(self.format(record))


MAX_ERROR_LINES = 20


def show_error(problems: Sequence[Problem], source: str | None = None) -> None:
    """Each problem, and its remedy on a line of its own after an arrow, as in the table of checks."""
    lines, indent = ([Text(f"{source}:")], "  ") if source else ([], "")
    who = "" if is_main_process else f"process {os.environ['RANK']}: "
    for problem in problems:
        what = f"{problem.what} {problem.why}".strip()
        lines += [Text(indent + line) for line in what.splitlines()]
        lines += [Text(f"{indent}→ {problem.remedy}", style="bold")] if problem.remedy else []
    if len(lines) > MAX_ERROR_LINES:
        lines = [*lines[: MAX_ERROR_LINES - 1], Text(f"... and {len(lines) - MAX_ERROR_LINES + 1} more lines")]
    err.print(Text(f"{who}error: ", style="bold red") + Text("\n").join(lines), soft_wrap=True)


MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "bold red"), "skipped": ("–", "dim")}


def show_checks(checks: Sequence[Check], after: str = "") -> None:
    """Checks as a table: a mark, the status, the finding, and the remedy after an arrow; then their counts."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for no_wrap in (True, True, False):
        grid.add_column(no_wrap=no_wrap, overflow="fold")
    for check in checks:
        mark, style = MARKS[check.status]
        remedy = Text(f"\n→ {printable(check.remedy)}" if check.remedy else "", style="bold")
        grid.add_row(Text(f"{mark} {check.status}", style=style), check.name, Text(printable(check.says)) + remedy)
    out.print(grid)
    counts = {status: sum(check.status == status for check in checks) for status in MARKS}
    counted = [f"{n} {status}{'s' * (status == 'warning' and n > 1)}" for status, n in counts.items() if n]
    out.print(f"\n{', '.join(counted)}.{after}")


def print_json(value: Any) -> None:
    """JSON on standard output, for programs; ASCII, so that it cannot move a terminal's cursor."""
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


BLUE, ORANGE = (80, 140, 255), (235, 130, 30)
"""Positive and negative credit: colour-blind readers can distinguish them, and black text is readable on both."""


def by_credit(tokens: Sequence[str], credit: Sequence[float], scale: float, marked: Sequence[bool] = ()) -> Text:
    """Tokens coloured by credit: blue positive, orange negative, in proportion to `scale`; underlined if `marked`."""
    line = Text()
    for i, (token, x) in enumerate(zip(tokens, credit, strict=True)):
        style = "underline " if marked and marked[i] else ""
        depth = min(1.0, abs(x) / scale) if scale else 0.0
        if depth > 0.02:
            rgb = [round(255 - (255 - c) * depth) for c in (BLUE if x > 0 else ORANGE)]
            style += f"#000000 on rgb({rgb[0]},{rgb[1]},{rgb[2]})"
        line.append(printable(token), style=style.strip())
    return line
