"""Checks as a table: a mark and a word for each, a sentence, a remedy."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dew.cli.console import out, printable
from dew.preflight.check import Check

MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "bold red"), "skipped": ("–", "dim")}


def show(checks: Sequence[Check]) -> None:
    grid = Table(show_edge=False, pad_edge=False, show_header=False, box=None, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checks:
        mark, style = MARKS[check.status]
        says = Text(printable(check.says))
        if check.remedy:
            says += Text(f"\n→ {printable(check.remedy)}", style="bold")
        grid.add_row(Text(f"{mark} {check.status}", style=style), check.name, says)
    out.print(grid)


def summary(checks: Sequence[Check]) -> str:
    counts = {status: sum(check.status == status for check in checks) for status in MARKS}
    return ", ".join(f"{n} {status}" for status, n in counts.items() if n)
