"""What every command prints with: one console, one way to say that something went wrong, colours of credit.

Whatever is printed may hold text of a model or of a stranger's file. So square brackets are never markup here, and
of the text itself no control character reaches the terminal; rich's own colours and cursor moves do.
"""

import json
import logging
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text


class PlainConsole(Console):
    """A console on which text is text."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def shown(text: str) -> str:
    """Text as a terminal may see it, line by line: no control characters, no direction marks."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


out = PlainConsole()
err = PlainConsole(stderr=True)


class LogToConsole(logging.Handler):
    """Warnings of dew's own, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        err.print(self.format(record), soft_wrap=True)


BLUE, ORANGE = (40, 100, 220), (215, 95, 0)
"""Earns and pays: told apart by everybody, and never by colour alone."""

MAX_ERROR_LINES = 10


def show_error(message: str) -> None:
    """At most ten lines, the first of which names the matter."""
    lines = message.strip().splitlines() or ["something went wrong"]
    hidden = len(lines) - MAX_ERROR_LINES
    if hidden > 0:
        lines = [*lines[: MAX_ERROR_LINES - 1], f"... and {hidden + 1} more"]
    err.print(Text("error: ", style="bold red") + Text("\n".join(lines)), soft_wrap=True)


def print_json(value: Any) -> None:
    """For programs: JSON on standard output, nothing else."""
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")  # ASCII: no byte of it moves a terminal


def tinted(text: str, share: float, colour: tuple[int, int, int]) -> Text:
    """Text on a background between white (share 0) and the colour (share 1)."""
    depth = min(max(share, 0.0), 1.0)
    r, g, b = (round(255 - (255 - c) * depth) for c in colour)
    return Text(text, style=f"{'white' if depth > 0.6 else 'black'} on rgb({r},{g},{b})")


def credited(tokens: list[str], credit: list[float]) -> Text:
    """An answer with every token on the colour of its credit: blue earns, orange pays.

    The depth is stretched from the answer's least to its largest, or differences of a tenth would not be seen.
    """
    sizes = [abs(x) for x in credit]
    least, largest = min(sizes, default=0.0), max(sizes, default=0.0)
    spread = largest - least
    line = Text()
    for token, x, size in zip(tokens, credit, sizes, strict=True):
        depth = 0.2 + 0.8 * (size - least) / spread if spread > 0.01 * largest else 0.5 * bool(largest)
        line.append(tinted(printable(token), depth, BLUE if x >= 0 else ORANGE))
    return line


def hesitant(tokens: list[str], entropy: list[float]) -> Text:
    """An answer with every token on the colour of its entropy: the deeper, the more the policy hesitated."""
    largest = max(entropy, default=0.0) or 1.0
    line = Text()
    for token, H in zip(tokens, entropy, strict=True):
        line.append(tinted(printable(token), H / largest, ORANGE))
    return line


def printable(text: str) -> str:
    """Text of a model on one line: new lines are shown as such."""
    return shown(text.replace("\n", "⏎"))
