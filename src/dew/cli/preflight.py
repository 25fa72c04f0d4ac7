"""`dew preflight` and `dew doctor`."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from dew.cli.app import app
from dew.cli.console import err, out, print_json, show_checks, summary
from dew.cli.flags import PASS_ON, Typed, Untrusted, load_run
from dew.config import Run
from dew.preflight import Check, passed


@app.command(context_settings=PASS_ON)
def preflight(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A YAML file (any TRL GRPO config), or a recipe name.")],
    answers: Annotated[int, typer.Option(help="Answers to sample from the model (default 128); 0: none.", min=0)] = 128,
    untrusted: Untrusted = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a run before training.

    Settings, data, gold answers, rewards, a sample of the model's answers, memory and disk.
    Further flags are settings, as in `dew train`. Exit code 1 if a check fails.
    """
    run, typed = load_run(config, context.args)
    with redirect_stdout(sys.stderr):  # what libraries print is not part of the result
        checks = _check(run, typed, answers, untrusted)
    ok = passed(checks)
    if json:
        print_json({"ok": ok, "checks": [check.to_dict() for check in checks]})
    else:
        show_checks(checks)
        engine = " --engine verl" if run.engine == "verl" else ""
        out.print(f"\n{summary(checks)}." + (f" Next: dew train {config}{engine}" if ok else ""), soft_wrap=True)
    raise typer.Exit(0 if ok else 1)


def _check(run: Run, typed: Typed, answers: int, untrusted: bool) -> list[Check]:
    if run.engine == "verl":
        from dew.preflight.verl import preflight_verl

        return preflight_verl(run, typed, untrusted)
    from dew.engines.trl.launch import quiet

    quiet()
    from dew.preflight import preflight as check

    return check(run, typed, answers=answers, untrusted=untrusted, say=lambda text: err.print(text, style="dim"))


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check this machine and the installation. Versions tested together, GPU, Triton, memory, disk."""
    from rich.table import Table

    from dew.preflight import doctor as check
    from dew.preflight.machine import LOCKS, lock_in_use, matrix

    checks = check()
    ok = passed(checks)
    if json:
        found = [check.to_dict() for check in checks]
        print_json({"ok": ok, "lock": lock_in_use(), "versions": matrix(), "checks": found})
        raise typer.Exit(0 if ok else 1)
    show_checks(checks)
    grid = Table(show_edge=False, pad_edge=False, title="\nVersions tested together", title_justify="left")
    for head in ("package", "installed", *(f"lock {name}" for name in LOCKS)):
        grid.add_column(head)
    for row in matrix():
        grid.add_row(*(cell or "–" for cell in row.values()))
    out.print(grid)
    out.print(f"\n{summary(checks)}.")
    raise typer.Exit(0 if ok else 1)
