"""`dew lab`: does a credit rule help? Many small paired runs at once."""

from dataclasses import asdict, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dew.cli.app import app
from dew.cli.console import out, print_json
from dew.cli.runs import clock
from dew.errors import ConfigError, Problem
from dew.files import write_atomically
from dew.run.folder import lock

if TYPE_CHECKING:
    from dew.engines.lab import Progress, Study


@app.command()
def lab(
    context: typer.Context,
    arms: Annotated[list[str] | None, typer.Argument(help="dapo, gtpo(alpha2=0.5), gtpo@3e-5, rules.py:Class.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="countdown-3, -4 (default), -6, -8, addition-8 or -14.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds per arm (default 8); 5 or more for a verdict.")
    ] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed; use other seeds to confirm a result.")] = 0,
    learning_rate: Annotated[list[float] | None, typer.Option(help="Learning rate of all arms (default 5e-5).")] = None,
    group_size: Annotated[int | None, typer.Option(help="Answers per problem (default 16).")] = None,
    prompts: Annotated[int | None, typer.Option(help="Problems per generation (default 32).")] = None,
    optimizer_steps: Annotated[int | None, typer.Option(help="Optimizer steps per generation (default 4).")] = None,
    generations: Annotated[int | None, typer.Option(help="Generations per run (default 120).")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the policy (default 128).")] = None,
    depth: Annotated[int | None, typer.Option(help="Layers of the policy (default 3).")] = None,
    eval_problems: Annotated[int | None, typer.Option(help="Held-out problems (default 256).")] = None,
    eval_k: Annotated[int | None, typer.Option(help="Answers per held-out problem (default 16).")] = None,
    evaluations: Annotated[int | None, typer.Option(help="Evaluations during a run (default 3).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "auto",
    cuda_graphs: Annotated[bool, typer.Option("--cuda-graphs", help="Fewer kernel launches, more memory.")] = False,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="Folder (default runs/lab[-quick]).")] = None,
    warm_starts: Annotated[Path | None, typer.Option(help="Folder of warm starts (default: the user's cache).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds of a small task: minutes on a CPU.")] = False,
    no_controls: Annotated[bool, typer.Option("--no-controls", help="Leave out the arms with weighting off.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Compare credit rules over many small training runs, paired by seed.

    The first arm is the baseline. --task and --learning-rate may be repeated. Re-run the same command to resume;
    runs of further arms, tasks, rates and seeds are added to the same folder. `dew report` turns it into a page.
    """
    from dew.engines.lab import study

    if not arms and not quick:
        raise ConfigError(Problem("No arms given.", remedy="Give the baseline first, e.g. dew lab dapo gtpo"))
    folder = output or Path("runs") / ("lab-quick" if quick else "lab")
    try:
        with lock(folder):
            found = study(
                arms or ["dapo", "gtpo"], output=folder, first_seed=first_seed, device=device, cuda_graphs=cuda_graphs,
                warm_starts=warm_starts, controls=bool(arms) and not no_controls, **_size(context.params, quick),
                say=(lambda _: None) if as_json else out.print,
                progress=(lambda _: None) if as_json else _show_progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise typer.Abort("Interrupted; finished stacks of runs are kept. Re-run the same command to resume.") from None
    _report(found, folder, as_json)


def _size(typed: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Tasks, seeds, learning rates and settings: as typed, else the defaults, which are small with --quick."""
    from dew.engines.lab import QUICK, QUICK_TASK, Settings

    task, seeds, rate, settings = (QUICK_TASK, 2, 1e-4, QUICK) if quick else ("countdown-4", 8, 5e-5, Settings())
    given = {f.name: value for f in fields(Settings) if (value := typed[f.name]) is not None}
    size = {"tasks": typed["task"] or [task], "seeds": typed["seeds"] or seeds}
    return size | {"learning_rates": typed["learning_rate"] or [rate], "settings": replace(settings, **given)}


def _report(found: "Study", folder: Path, as_json: bool) -> None:
    from dew.engines.lab import differences, markdown

    text = markdown(found)
    write_atomically(folder / "summary.md", f"{text}\n".encode())
    if as_json:
        every = [asdict(d) | {"verdict": d.verdict} for name in found.tasks for d in differences(found, name)]
        print_json([{k: None if v in (-inf, inf) else v for k, v in values.items()} for values in every])
        return
    out.print(f"\n{text}\n\n{folder / 'study.json'}\n{folder / 'summary.md'}")


def _show_progress(now: "Progress") -> None:
    """One line: on a terminal it is overwritten, elsewhere it is printed at every quarter."""
    line = f"{now.task}: {now.finished} of {now.total} runs finished; {now.runs} at generation {now.generation} of "
    line += f"{now.generations}, accuracy {now.accuracy:.3f}, about {clock(now.seconds_left)} left"
    quarter, before = (n * 4 // now.generations for n in (now.generation, now.generation - 5))
    ended = now.generation == now.generations
    if out.is_terminal:
        out.print(line.ljust(out.width - 1), end="\n" if ended else "\r")
    elif ended or quarter > before:
        out.print(line)
