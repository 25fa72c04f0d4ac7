"""`dew preflight`."""

import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from dew.cli.app import app
from dew.cli.console import err, out, print_json
from dew.cli.train import PASS_ON, Allow, recipe_path, with_own_flags
from dew.config import Run, read_run
from dew.preflight.check import Check


@app.command(context_settings=PASS_ON)
def preflight(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A YAML file: a recipe, or any GRPO file of TRL.")],
    answers: Annotated[int, typer.Option(help="How many answers to sample from the model; 0: none.", min=0)] = 128,
    allow: Allow = None,
    json: Annotated[bool, typer.Option("--json", help="The checks as JSON.")] = False,
) -> None:
    """Look at a run before it trains: settings, data, gold answers, rewards, a sample of answers, memory, disk.

    Further flags are settings, as in `dew train`. Exit code 1 when a check fails.
    """
    run, flags = with_own_flags(read_run(recipe_path(config)), context.args)
    from dew.cli.checks import show, summary
    from dew.preflight import passed

    with redirect_stdout(sys.stderr):  # what the libraries print is not part of the answer
        checks = _look(run, flags, answers, allow or ())
    good, engine = passed(checks), " --engine verl" if run.engine == "verl" else ""
    if json:
        print_json({"ok": good, "checks": [check.to_dict() for check in checks]})
    else:
        show(checks)
        out.print(f"\n{summary(checks)}." + (f" Next: dew train {config}{engine}" if good else ""), soft_wrap=True)
    raise typer.Exit(0 if good else 1)


def _look(run: Run, flags: list[str], answers: int, allowed: Collection[str]) -> list[Check]:
    if run.engine == "verl":
        from dew.preflight.verl import preflight_verl

        return preflight_verl(run, flags, allowed)
    from dew.engines.trl.launch import quiet

    quiet()
    from dew.preflight import preflight as look

    return look(run, flags, answers=answers, allowed=allowed, say=lambda text: err.print(text, style="dim"))
