"""`dew preflight` and `dew doctor`."""

import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dew.cli.app import app
from dew.cli.console import err, out, print_json, show_checks, show_markdown
from dew.cli.flags import PASS_ON, Untrusted, load_run
from dew.preflight import Check, passed
from dew.preflight import preflight as check_run


@app.command(context_settings=PASS_ON)
def preflight(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A YAML file (any TRL GRPO config), or a recipe name.")],
    answers: Annotated[int, typer.Option(help="Answers to sample from the model; 0: none.", min=0)] = 128,
    untrusted: Untrusted = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a run before training.

    Checks settings, data, gold answers, rewards, a sample of the model's answers, memory and disk.
    Other flags are settings, as in `dew train`. Exit code 1 if a check fails.
    """
    run, typed = load_run(config, context.args)
    with redirect_stdout(sys.stderr):  # what libraries print is not part of the result
        if run.engine != "verl":
            from dew.engines.trl.launch import quiet

            quiet()
        say = partial(err.print, style="dim")
        checks = check_run(run, typed, answers=answers, untrusted=untrusted, say=say)
    _finish(checks, json, after=f" Next: {shlex.join(['dew', 'train', str(config), *context.args])}")


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check this machine and the installation. Covers package versions, GPU, memory and disk."""
    from dew.compare.verdicts import markdown_table
    from dew.preflight.machine import doctor as check_machine
    from dew.preflight.machine import versions

    checks, packages = check_machine(), versions()
    if not json:
        show_markdown(markdown_table(list(packages[0]), [[cell or "–" for cell in row.values()] for row in packages]))
        out.print()
    _finish(checks, json, versions=packages)


def _finish(checks: list[Check], as_json: bool, after: str = "", **more: Any) -> NoReturn:
    """Show the checks and, if none failed, the text `after`. Exit with code 1 if one failed."""
    if as_json:
        print_json({"ok": passed(checks), **more, "checks": [asdict(check) for check in checks]})
    else:
        show_checks(checks, after if passed(checks) else "")
    raise typer.Exit(0 if passed(checks) else 1)
