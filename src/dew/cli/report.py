"""`dew report`."""

from pathlib import Path
from typing import Annotated

import typer

from dew.cli.app import app
from dew.cli.console import out
from dew.errors import ConfigError


@app.command()
def report(
    folders: Annotated[list[Path] | None, typer.Argument(help="Folders of runs: dew's, or plain TRL's.")] = None,
    records: Annotated[Path | None, typer.Option(help="A JSONL of token records instead (docs/records.md).")] = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="Where the page goes.")] = None,
) -> None:
    """Turn runs into one page that shows who got which credit."""
    from dew.report import build, build_from_records

    if records is not None:
        path = build_from_records(records, output)
    elif folders:
        path = build(folders, output)
    else:
        raise ConfigError("report: which run? `dew report runs/NAME`, or `dew report --records FILE.jsonl`.")
    out.print(f"{path}\nOpen it in a browser; the same as JSON stands beside it.")
