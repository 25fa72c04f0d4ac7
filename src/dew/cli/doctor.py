"""`dew doctor`."""

from typing import Annotated

import typer

from dew.cli.app import app
from dew.cli.console import out, print_json


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False) -> None:
    """Look at this machine and the installation: versions tested together, GPU, Triton, memory, disk."""
    from dew.cli.checks import show, summary
    from dew.preflight import doctor as look
    from dew.preflight import passed
    from dew.preflight.installation import LOCKS, lock_in_use, matrix

    checks = look()
    good = passed(checks)
    if json:
        findings = [check.to_dict() for check in checks]
        print_json({"ok": good, "lock": lock_in_use(), "versions": matrix(), "checks": findings})
        raise typer.Exit(0 if good else 1)
    from rich.table import Table

    show(checks)
    grid = Table(show_edge=False, pad_edge=False, title="Versions tested together", title_justify="left")
    for head in ("package", "installed", *(f"lock {name}" for name in LOCKS)):
        grid.add_column(head)
    for row in matrix():
        grid.add_row(*(cell or "–" for cell in row.values()))
    out.print()
    out.print(grid)
    out.print(f"\n{summary(checks)}.")
    raise typer.Exit(0 if good else 1)
