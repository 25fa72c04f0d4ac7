"""`dew report`: runs as an HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from dew.cli.app import app
from dew.cli.console import out
from dew.errors import ConfigError, Problem


@app.command()
def report(
    folders: Annotated[list[Path] | None, typer.Argument(help="Run folders of dew, or of plain TRL.")] = None,
    records: Annotated[Path | None, typer.Option(help="A JSONL of token records instead (docs/records.md).")] = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="The HTML file to write.")] = None,
) -> None:
    """Write an HTML report on one or more runs. It shows curves and the credit of every recorded token."""
    from dew.report import build, build_from_records

    if not folders and records is None:
        usage = "`dew report runs/NAME`, or `dew report --records FILE.jsonl`."
        raise ConfigError(Problem("The run is missing.", remedy=usage))
    path = build(folders or [], output) if records is None else build_from_records(records, output)
    out.print(f"{path}\nOpen it in a browser. The same content as JSON is beside it.", soft_wrap=True)
