"""The command `dew`: what all commands hang on, and what becomes of errors."""

import logging
import os
import sys
from importlib import import_module

import typer

from dew.cli.console import LogToConsole, err, show_error
from dew.errors import DewError

app = typer.Typer(
    name="dew",
    help="Token-level credit for reinforcement learning of language models.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

COMMANDS = ("demo", "train", "preflight", "evaluate", "compare", "report", "explain", "doctor", "recipes", "export")
"""The modules in the order of the help text; each adds its own."""


def main() -> None:
    """Exit codes: 0 done, 1 it cannot be done, 2 the command was not understood."""
    if not logging.getLogger("dew").handlers:
        logging.getLogger("dew").addHandler(LogToConsole(logging.WARNING))
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # compiled code that a model's configuration may name
    for module in COMMANDS:
        import_module(f"dew.cli.{module}")
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.Exit as stop:
        code = stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        err.print("interrupted")
        code = 1
    except Exception as error:
        code = _explain(error)
    sys.exit(code or 0)


def _explain(error: Exception) -> int:
    """One clear message. What is nobody's mistake but ours can be asked for in full."""
    if os.environ.get("DEW_TRACEBACK"):
        raise error
    if hasattr(error, "format_message"):  # click's: the command line was not understood
        show_error(f"{error.format_message()}\nSee: dew --help")
        return 2
    if isinstance(error, DewError):
        show_error(str(error))
    elif isinstance(error, OSError):
        show_error(f"{error.filename or 'a file'}: {error.strerror or error}.")
    else:
        text = str(error).strip().split("\n", maxsplit=1)[0]
        show_error(f"{type(error).__name__}: {text}\nDEW_TRACEBACK=1 in the environment shows where.")
    return 1
