"""`dew preflight` and `dew doctor`."""

import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dew.cli.app import app
from dew.cli.console import err, out, print_json, show_checks
from dew.cli.flags import PASS_ON, Untrusted, load_run
from dew.preflight import passed


@app.command(context_settings=PASS_ON)
def preflight(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A YAML file (any TRL GRPO config), or a recipe name.")],
    answers: Annotated[int, typer.Option(help="Answers to sample from the model; 0: none.", min=0)] = 128,
    untrusted: Untrusted = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a run before training.

    Settings, data, gold answers, rewards, a sample of the model's answers, memory and disk.
    Further flags are settings, as in `dew train`. Exit code 1 if a check fails.
    """
    run, typed = load_run(config, context.args)
    with redirect_stdout(sys.stderr):  # what libraries print is not part of the result
        if run.engine == "verl":
            from dew.preflight.verl import preflight_verl

            checks = preflight_verl(run, typed, untrusted)
        else:
            from dew.engines.trl.launch import quiet
            from dew.preflight import preflight as check

            quiet()
            checks = check(run, typed, answers=answers, untrusted=untrusted, say=partial(err.print, style="dim"))
    if json:
        print_json({"ok": passed(checks), "checks": [asdict(check) for check in checks]})
    else:
        command = shlex.join(["dew", "train", str(config), *context.args])
        show_checks(checks, f" Next: {command}" if passed(checks) else "")
    raise typer.Exit(0 if passed(checks) else 1)


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check this machine and the installation. Versions tested together, GPU, Triton, memory, disk."""
    from rich.table import Table

    from dew.preflight import doctor as check
    from dew.preflight.machine import LOCKS, lock_in_use, matrix

    checks = check()
    if json:
        found = [asdict(check) for check in checks]
        print_json({"ok": passed(checks), "lock": lock_in_use(), "versions": matrix(), "checks": found})
    else:
        heads = ("package", "installed", *(f"lock {name}" for name in LOCKS))
        grid = Table(*heads, show_edge=False, pad_edge=False, title="Versions tested together\n", title_justify="left")
        for row in matrix():
            grid.add_row(*(cell or "–" for cell in row.values()))
        out.print(grid, "")
        show_checks(checks)
    raise typer.Exit(0 if passed(checks) else 1)
