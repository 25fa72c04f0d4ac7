"""`dew demo`: train a baseline and an entropy-weighted rule on a CPU. `dew recipes`: list or copy recipes."""

import json
import os
import platform
import shutil
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from dew.cli.app import app
from dew.cli.compare import train_grid, without_per_run
from dew.cli.console import out, show_markdown
from dew.cli.flags import recipe_file, recipe_files
from dew.cli.runs import clock
from dew.errors import ConfigError, Problem, quoted
from dew.rewards.process import cores
from dew.run.config import read_run
from dew.run.folder import lock

if TYPE_CHECKING:
    from dew.compare import Result

RECIPE = "tiny/countdown6"
BASELINE, RULE = DEMO_RUNS = ("dapo", "dew")


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs and report.")] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps per run (default: the recipe's).")] = None,
) -> None:
    """Train DAPO and dew side by side on a CPU. Takes minutes, downloads nothing, and compares the results.

    Re-run the same command to resume, or to see the results again.
    """
    from dew.report import build

    began, run = time.monotonic(), read_run(recipe_file(RECIPE))
    steps = steps or int(run.settings["max_steps"])
    run = replace(run, settings={**run.settings, "max_steps": steps})
    _announce(steps, folder)
    with lock(folder):
        _heading("Training")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the runs
        algorithms, seeds = {name: name for name in DEMO_RUNS}, [run.settings["seed"]]
        results = train_grid(without_per_run(run, {}), folder, algorithms, seeds, parallel=2, every=max(steps // 6, 1))
        page = build([folder])
        _results(results, page)
    _heading(f"Done in {clock(time.monotonic() - began)} minutes")
    out.print(f"Report (open in a browser): {page.resolve()}")
    _heading("Next")
    for words, what in (
        (f"dew explain {quoted(str(results[-1].folder))}", "the credit of one group, token by token"),
        (f"dew compare {RECIPE} --algorithms {BASELINE},{RULE}", "five seeds of each, paired"),
        (f"dew recipes copy {RECIPE} my.yaml", "a config to edit, then: dew train my.yaml"),
    ):
        out.print(f"  {words}\n      {what}")


def _heading(text: str) -> None:
    out.print(Text(f"\n{text}", style="bold"))


def _announce(steps: int, folder: Path) -> None:
    _heading("What this does")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    out.print(
        "A bundled language model with 0.6 million parameters learns countdown: reach a target from six numbers. "
        "It trains twice, rewarded only for correct answers: with DAPO, which gives all tokens of an answer the same "
        "credit, and with dew, which gives more of a correct answer's credit to tokens where the policy was uncertain. "
        f"All else is the same: problems, number of answers, clipping, loss. {steps} steps each, side by side.\n\n"
        "On two idle cores this takes three to seven minutes. Nothing is downloaded. Ctrl-C stops it.\n\n"
        f"Python {platform.python_version()}, {packages}; {cores()} cores, one torch thread per run; output in {folder}"
    )


def _results(results: list["Result"], page: Path) -> None:
    from dew.compare import compare_runs
    from dew.compare.verdicts import summary

    _heading(f"{RULE} compared with {BASELINE}")
    text = summary(results, compare_runs(results, BASELINE))
    findings = [finding["text"] for finding in json.loads(page.with_suffix(".json").read_bytes())["findings"]]
    show_markdown(text)
    out.print("\n".join(["", *(finding for finding in findings if finding not in text)]))
    measured = json.loads(recipe_file(RECIPE).with_suffix(".json").read_text())  # by scripts/quickstart_evidence.py
    out.print("\n".join(["", *many_seeds(measured)]))


def many_seeds(measured: list[dict[str, Any]]) -> list[str]:
    from dew.compare import Result, compare_runs
    from dew.compare.verdicts import signed, title

    lines = []
    for one in measured:
        texts = []
        for d in compare_runs([Result(**run) for run in one["runs"]], BASELINE):
            texts.append(f"{signed(d)} in {title(d.score)} (ahead in {sum(x > 0 for x in d.by_pair)} of {d.pairs})")
        lines.append(f"{one['what']}, {RULE} − {BASELINE}: {', '.join(texts)}.")
    return lines


recipes = typer.Typer()
app.add_typer(recipes, name="recipes")


@recipes.callback(invoke_without_command=True)
def ls(context: typer.Context) -> None:
    """List or copy bundled recipes. Without a command, lists them."""
    if context.invoked_subcommand is None:
        for name, path in recipe_files().items():
            out.print(Text(name, style="bold"))
            out.print(Padding(path.read_text().splitlines()[0].removeprefix("# "), (0, 0, 0, 2), expand=False))


@recipes.command()
def copy(
    name: Annotated[str, typer.Argument(help="A recipe name, e.g. tiny/countdown.")],
    to: Annotated[Path, typer.Argument(help="File or folder.")] = Path("."),
) -> None:
    """Copy a recipe to edit."""
    source = recipe_file(name)
    target = to / source.name if to.is_dir() else to
    if target.exists():
        raise ConfigError(Problem(f"{target} already exists.", remedy="Choose another file name."))
    shutil.copyfile(source, target)
    out.print(f"{target}\nNext: dew train {quoted(target)} --dry-run")
