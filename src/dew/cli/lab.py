"""`dew lab`: does a credit rule help? Many small paired runs at once."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from dew.cli.app import app
from dew.cli.console import out, print_json
from dew.cli.flags import mapping
from dew.errors import ConfigError, Problem, unknown
from dew.files import write_atomically
from dew.run.records import finite


@app.command()
def lab(
    arms: Annotated[list[str] | None, typer.Argument(help="dapo, gtpo(alpha2=0.5), gtpo@3e-5, rules.py:Class.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="countdown-3, -4 (default), -6, -8, addition-8 or -14.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds per arm (default 8); 5 or more for a verdict.")
    ] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed; use other seeds to confirm a result.")] = 0,
    learning_rate: Annotated[list[float] | None, typer.Option(help="Learning rate of all arms (default 5e-5).")] = None,
    generations: Annotated[int | None, typer.Option(help="Generations per run (default 120).")] = None,
    settings: Annotated[str | None, typer.Option(help="Other settings, e.g. '{group_size: 8, width: 64}'.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "auto",
    output: Annotated[Path | None, typer.Option("--out", "-o", help="Folder (default runs/lab[-quick]).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds of a small task: minutes on a CPU.")] = False,
    no_controls: Annotated[bool, typer.Option("--no-controls", help="Leave out the arms with weighting off.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Compare credit rules over many small training runs, paired by seed.

    The first arm is the baseline. --task and --learning-rate may be repeated. Re-run the same command to resume;
    runs of further arms, tasks, rates and seeds are added to the same folder. `dew report` turns it into a page.
    """
    from dew.engines.lab import QUICK, QUICK_TASK, TinySettings, differences, markdown, study

    if not arms and not quick:
        raise ConfigError(Problem("No arms given.", remedy="Give the baseline first, e.g. dew lab dapo gtpo"))
    folder = output or Path("runs") / ("lab-quick" if quick else "lab")
    given = mapping(settings, example="{group_size: 8}")
    given |= {} if generations is None else {"generations": generations}
    known = [field.name for field in fields(TinySettings)]
    if wrong := [unknown(f"--settings: {name!r} is not known.", name, known) for name in given if name not in known]:
        raise ConfigError(wrong)
    try:
        found = study(
            arms or ["dapo", "gtpo"],
            output=folder,
            tasks=task or [QUICK_TASK if quick else "countdown-4"],
            seeds=seeds or (2 if quick else 8),
            first_seed=first_seed,
            learning_rates=learning_rate or [1e-4 if quick else 5e-5],
            settings=replace(QUICK if quick else TinySettings(), **given),
            controls=bool(arms) and not no_controls,
            device=device,
            say=(lambda _: None) if as_json else out.print,
            progress=(lambda *_: None) if as_json else _show_progress,
        )
    except KeyboardInterrupt:
        raise typer.Abort("Interrupted; finished stacks of runs are kept. Re-run the same command to resume.") from None
    text = markdown(found)
    write_atomically(folder / "summary.md", f"{text}\n".encode())
    if as_json:
        tasks = dict.fromkeys(result.task for result in found)
        print_json([finite(d.to_json()) for task in tasks for d in differences(found, task)])
    else:
        out.print(f"\n{text}\n\n{folder / 'summary.md'}\nA page with curves and tokens: dew report {folder}")


def _show_progress(share: float, line: str) -> None:
    """One line: on a terminal it is overwritten, elsewhere it is printed at every quarter."""
    if out.is_terminal:
        out.print(line.ljust(out.width - 1), end="\n" if share == 1 else "\r")
    elif (4 * share).is_integer():
        out.print(line)
