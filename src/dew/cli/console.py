"""The console that every command prints to: errors, tables of checks, JSON, and tokens coloured by credit.

Anything printed may contain text of a model or of somebody else's file. So square brackets are never markup, and no
control character in the text reaches the terminal; rich's own colours and cursor moves do.
"""

import json
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from dew.errors import Problem

if TYPE_CHECKING:
    from dew.preflight import Check


class PlainConsole(Console):
    """A console that prints text as text."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def shown(text: str) -> str:
    """Text that is safe for a terminal: no control characters, no direction marks."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


def printable(text: str) -> str:
    """The same on one line."""
    return shown(text.replace("\n", "⏎"))


out = PlainConsole()
err = PlainConsole(stderr=True)


class LogToConsole(logging.Handler):
    """dew's own warnings, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        err.print(self.format(record), soft_wrap=True)


MAX_ERROR_LINES = 20


def show_error(problems: Sequence[Problem], source: str | None = None) -> None:
    """Each problem, and its remedy on a line of its own after an arrow, as in the table of checks."""
    lines, indent = ([Text(f"{source}:")], "  ") if source else ([], "")
    for problem in problems:
        what = f"{problem.what} {problem.why}".strip()
        lines += [Text(indent + line) for line in what.splitlines()]
        lines += [Text(f"{indent}→ {problem.remedy}", style="bold")] if problem.remedy else []
    if len(lines) > MAX_ERROR_LINES:
        lines = [*lines[: MAX_ERROR_LINES - 1], Text(f"... and {len(lines) - MAX_ERROR_LINES + 1} more lines")]
    err.print(Text("error: ", style="bold red") + Text("\n").join(lines), soft_wrap=True)


MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "bold red"), "skipped": ("–", "dim")}


def show_checks(checks: Sequence["Check"], after: str = "") -> None:
    """Checks as a table: a mark, the status, the finding, and the remedy after an arrow; then their counts."""
    grid = Table(show_edge=False, pad_edge=False, show_header=False, box=None, padding=(0, 2, 0, 0))
    for no_wrap in (True, True, False):
        grid.add_column(no_wrap=no_wrap, overflow="fold")
    for check in checks:
        mark, style = MARKS[check.status]
        remedy = Text(f"\n→ {printable(check.remedy)}" if check.remedy else "", style="bold")
        grid.add_row(Text(f"{mark} {check.status}", style=style), check.name, Text(printable(check.says)) + remedy)
    out.print(grid)
    counts = {status: sum(check.status == status for check in checks) for status in MARKS}
    out.print(f"\n{', '.join(f'{n} {status}' for status, n in counts.items() if n)}.{after}", soft_wrap=True)


def print_json(value: Any) -> None:
    """JSON on standard output, for programs; ASCII, so that it cannot move a terminal's cursor."""
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


def signed(interval: Any) -> str:
    return f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


BLUE, ORANGE = (40, 100, 220), (215, 95, 0)
"""Positive and negative credit, also told apart by colour-blind readers."""


def tinted(text: str, share: float, colour: tuple[int, int, int]) -> Text:
    """Text on a background between white (share 0) and the colour (share 1)."""
    depth = min(max(share, 0.0), 1.0)
    r, g, b = (round(255 - (255 - c) * depth) for c in colour)
    return Text(text, style=f"{'white' if depth > 0.6 else 'black'} on rgb({r},{g},{b})")


def by_credit(tokens: Sequence[str], credit: Sequence[float]) -> Text:
    """Tokens coloured by credit: blue positive, orange negative, scaled from the least to the largest of the answer."""
    sizes = [abs(x) for x in credit]
    least, largest = min(sizes, default=0.0), max(sizes, default=0.0)
    spread = largest - least
    line = Text()
    for token, x, size in zip(tokens, credit, sizes, strict=True):
        depth = 0.2 + 0.8 * (size - least) / spread if spread > 0.01 * largest else 0.5 * bool(largest)
        line.append(tinted(printable(token), depth, BLUE if x >= 0 else ORANGE))
    return line


def by_entropy(tokens: Sequence[str], entropy: Sequence[float]) -> Text:
    """Tokens coloured by entropy: the deeper, the higher."""
    largest = max(entropy, default=0.0) or 1.0
    return Text.assemble(*(tinted(printable(t), H / largest, ORANGE) for t, H in zip(tokens, entropy, strict=True)))
