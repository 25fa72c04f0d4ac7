"""The console that every command prints to: errors, tables of checks, JSON, and tokens coloured by credit.

Anything printed may contain text from a model or from someone else's file. So square brackets are never markup, and
control characters in the text never reach the terminal.
"""

import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from dew.errors import Problem
from dew.preflight import Check
from dew.run.folder import is_main_process


class PlainConsole(Console):
    """Prints text without markup. On a terminal, lines are wrapped between words only, so that paths can be copied."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        if all(isinstance(x, str | Text) for x in objects):
            if self.is_terminal and not settings.get("soft_wrap"):
                objects = tuple(_wrapped(Text(x) if isinstance(x, str) else x, self.width) for x in objects)
            settings["soft_wrap"] = True
        super().print(*objects, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def _wrapped(text: Text, width: int) -> Text:
    lines = list[Text]()
    for line in text.split("\n", allow_blank=True):
        starts = [0]
        for word in re.finditer(r"\S+", line.plain):
            if word.end() - starts[-1] > width and word.start() > starts[-1]:
                starts.append(word.start())
        for part in line.divide(starts[1:]):
            part.rstrip()  # a space after the last column would wrap into an empty line
            lines.append(part)
    return Text("\n").join(lines)


def shown(text: str) -> str:
    """Make text safe for a terminal by replacing control characters and direction marks."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


def printable(text: str) -> str:
    """Make text safe for a terminal, on one line."""
    return shown(text.replace("\n", "⏎"))


out = PlainConsole(quiet=not is_main_process)
err = PlainConsole(stderr=True)


class PlainRecord(logging.LogRecord):
    """A log record of any library, without control characters other than colours."""

    def getMessage(self) -> str:
        parts = re.split(r"(\x1b\[[\d;]*m)", super().getMessage())
        return "".join(part if i % 2 else shown(part) for i, part in enumerate(parts))


class LogToConsole(logging.Handler):
    """Prints dew's warnings to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_main_process and record.name != "dew.alarms":  # the live view shows those
            err.print(self.format(record))


MAX_ERROR_LINES = 20


def show_error(problems: Sequence[Problem], source: str | None = None) -> None:
    """Print each problem, with its remedy on a separate line after an arrow, as in the table of checks."""
    lines, indent = ([Text(f"{source}:")], "  ") if source else ([], "")
    who = "" if is_main_process else f"process {os.environ['RANK']}: "
    for problem in problems:
        lines += [Text(indent + line) for line in problem.says.splitlines()]
        lines += [Text(f"{indent}→ {problem.remedy}", style="bold")] if problem.remedy else []
    if len(lines) > MAX_ERROR_LINES:
        lines = [*lines[: MAX_ERROR_LINES - 1], Text(f"... and {len(lines) - MAX_ERROR_LINES + 1} more lines")]
    err.print(Text(f"{who}error: ", style="bold red") + Text("\n").join(lines))


MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "bold red"), "skipped": ("–", "dim")}


def show_checks(checks: Sequence[Check], after: str = "") -> None:
    """Print checks as a table (mark, status, name, finding, and remedy after an arrow), then their counts."""
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
    """Print JSON to stdout, for programs. It is ASCII, so that it contains no control characters."""
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


def show_markdown(text: str) -> None:
    """Print Markdown as dew writes it: paragraphs, headings, and tables, which are transposed by row if too wide."""
    lines = text.strip().splitlines()
    for is_table, block in groupby(lines, key=lambda line: line.startswith("|")):
        if not is_table:
            for line in block:
                out.print(Text(line.removeprefix("## "), style="bold" if line.startswith("## ") else ""))
            continue
        head, _, *rows = ([Text(x.strip("*"), "bold" * ("**" in x)) for x in row[2:-2].split(" | ")] for row in block)
        table = _table(head, rows)
        if out.measure(table, options=out.options.update(max_width=10_000)).maximum > out.width:
            for row in rows:
                out.print(row[0])
                out.print(_block(head[1:], row[1:]))
        else:
            out.print(table)


def _table(head: Sequence[Text], rows: Iterable[Sequence[Text]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for k, name in enumerate(head):
        table.add_column(name, overflow="fold", justify="right" if k and len(head) > 3 else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _block(names: Sequence[Text], values: Sequence[Text]) -> Table:
    """A row of a table that is too wide: a line for each of its columns."""
    grid = Table.grid(padding=(0, 2))
    for name, value in zip(names, values, strict=True):
        if value:
            grid.add_row("", name, value)
    return grid


BLUES, ORANGES = ("#d7d7ff", "#afd7ff", "#87afff", "#5f87ff"), ("#ffd7af", "#ffaf5f", "#ff8700", "#d75f00")
"""Positive and negative credit, from the 256 terminal colours. They are colour-blind safe, and black text is readable
on all of them."""


def by_credit(tokens: Iterable[tuple[str, float, bool]], scale: float) -> Text:
    """Colour (token, credit, marked) by credit relative to `scale`: blue positive, orange negative. Underline marked
    tokens."""
    line = Text()
    for token, x, marked in tokens:
        style = "underline " if marked else ""
        depth = min(1.0, abs(x) / scale) if scale else 0.0
        if depth > 0.02:
            style += f"#000000 on {(BLUES if x > 0 else ORANGES)[math.ceil(4 * depth) - 1]}"
        line.append(printable(token), style=style.strip())
    return line
