"""`dew report` and `dew view`: runs as an HTML page, in a file or refreshed in the browser while they train."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from dew.cli.app import app
from dew.cli.console import out
from dew.errors import ConfigError, Problem


@app.command()
def report(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or a folder of runs or of a study.")
    ] = None,
    records: Annotated[Path | None, typer.Option(help="A JSONL file of token records (docs/records.md).")] = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="The HTML file to write.")] = None,
) -> None:
    """Write an HTML report on one or more runs. It shows curves and the credit of every recorded token."""
    from dew.report import build, build_from_records

    if bool(folders) == bool(records):
        what = "Give run folders or --records, not both." if folders else "No run given."
        raise ConfigError(Problem(what, remedy="Write `dew report runs/NAME`, or `dew report --records FILE.jsonl`."))
    path = build(folders or [], output) if records is None else build_from_records(records, output)
    out.print(f"{path}\nOpen it in a browser. The same content as JSON is beside it.")


@app.command()
def view(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of several runs.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show the report in a browser, refreshed while runs train.

    The server listens on 127.0.0.1 only, under an address with a random token. Ctrl-C stops it.
    """
    from dew.report.serve import make_server

    server, address = make_server(folders, port)
    with server:
        out.print(f"{address}\nThe page updates as the runs train. Only this machine can open it. Ctrl-C stops it.")
        if browser:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("Stopped.")
