"""`dew view`: the report of runs in the browser, refreshed while they train."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from dew.cli.app import app
from dew.cli.console import out


@app.command()
def view(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of several runs.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1 (default: any free one).")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show the report in a browser, refreshed while runs train.

    The server listens on 127.0.0.1 only, under an address with a random token. Ctrl-C stops it.
    """
    from dew.report.serve import make_server

    server, address = make_server(folders, port)
    with server:
        out.print(
            f"{address}\nThe page follows the runs. Only this machine can open it. Ctrl-C stops the server.",
            soft_wrap=True,
        )
        if browser:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("Stopped.")
