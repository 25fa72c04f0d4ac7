"""The command `dew`: the Typer app that all commands attach to, and how errors are shown."""

import logging
import os
import sys
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core

from dew import __version__
from dew.cli.console import LogToConsole, PlainRecord, err, show_error
from dew.errors import DewError, Problem, in_one_line

SECTIONS = {
    "Start": ("demo", "recipes"),
    "Train": ("train", "resume", "preflight", "export"),
    "Compare": ("eval", "compare", "lab"),
    "Inspect": ("report", "view", "explain"),
    "Help": ("doctor",),
}
"""Headings of the help text, and the commands under each."""


class Commands(typer.core.TyperGroup):
    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        for heading, names in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(80)) for name in names])


app = typer.Typer(name="dew", cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

COMMANDS = ("demo", "train", "preflight", "evaluate", "compare", "report")
EXTRAS = {
    **dict.fromkeys(("scipy", "jinja2", "ruamel", "ruamel.yaml", "psutil", "packaging"), "cli"),
    **dict.fromkeys(("trl", "transformers", "accelerate", "peft", "datasets", "pyarrow", "safetensors"), "trl"),
    **dict.fromkeys(("math_verify", "latex2sympy2_extended", "sympy"), "math"),
    "verl": "verl",
}
"""Package -> the extra that installs it."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dew {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Token-level credit for reinforcement learning of language models."""


INTERRUPTED = 130
"""typer's exit code after Ctrl-C."""


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 invalid command line, 130 interrupted."""
    logging.setLogRecordFactory(PlainRecord)
    if not logging.getLogger("dew").handlers:
        logging.getLogger("dew").addHandler(LogToConsole(logging.WARNING))
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # about calls of TRL and PEFT
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # a model's config may request compiled code from the hub
    try:
        for module in COMMANDS:
            import_module(f"dew.cli.{module}")
        code = app(sys.argv[1:] or ["--help"], prog_name="dew", standalone_mode=False)
        if code == INTERRUPTED:
            err.print("interrupted")
    except typer.Exit as stop:
        code = stop.exit_code
    except (typer.Abort, KeyboardInterrupt) as stop:
        err.print(str(stop) or "interrupted")
        code = 1
    except Exception as error:
        code = _explain(error)
    sys.exit(code or 0)


def _explain(error: Exception) -> int:
    if os.environ.get("DEW_TRACEBACK"):
        raise error
    if hasattr(error, "format_message"):  # click's: invalid command line
        command = getattr(getattr(error, "ctx", None), "command_path", "dew")
        show_error([Problem(error.format_message(), remedy=f"See `{command} --help`.")])
        return 2
    if isinstance(error, DewError):
        show_error(error.problems, error.source)
    elif isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:  # also importlib.metadata's
        show_error([Problem(f"{error.name} is not installed.", remedy=f"pip install 'dew-rl[{EXTRAS[error.name]}]'")])
    elif isinstance(error, OSError) and error.filename:
        show_error([Problem(f"{error.filename}: {error.strerror or error}.")])
    else:
        advice = "Set DEW_TRACEBACK=1 in the environment to see the traceback."
        show_error([Problem(in_one_line(error), remedy=advice)])
    return 1
