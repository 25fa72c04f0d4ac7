"""`dew recipes`: list and copy the bundled configs."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from dew.cli.app import app
from dew.cli.console import out
from dew.errors import ConfigError, Problem, did_you_mean

recipes = typer.Typer()
app.add_typer(recipes, name="recipes")


def names() -> dict[str, Path]:
    """Name -> file. Recipes are inside the package in a wheel, and at the root of a checkout."""
    packaged = Path(__file__).parents[1] / "recipes"
    folder = packaged if packaged.is_dir() else Path(__file__).parents[3] / "recipes"
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}


def get(name: str, kind: str = "recipe") -> Path:
    """The file of a recipe. `kind` is what the user may have meant, for the error."""
    known = names()
    if name not in known:
        advice = did_you_mean(name, known) or "`dew recipes` lists the recipes."
        raise ConfigError(Problem(f"There is no {kind} {name!r}.", remedy=advice))
    return known[name]


@recipes.callback(invoke_without_command=True)
def ls(context: typer.Context) -> None:
    """List or copy bundled recipes. Without a command, lists them."""
    if context.invoked_subcommand is None:
        for name, path in names().items():
            out.print(Text(name, style="bold"))
            out.print(Padding(path.read_text().splitlines()[0].removeprefix("# "), (0, 0, 0, 2), expand=False))


@recipes.command()
def copy(
    name: Annotated[str, typer.Argument(help="A recipe name, e.g. tiny/countdown.")],
    to: Annotated[Path, typer.Argument(help="File or folder.")] = Path("."),
) -> None:
    """Copy a recipe to edit."""
    source = get(name)
    target = to / source.name if to.is_dir() else to
    if target.exists():
        raise ConfigError(Problem(f"{target} already exists.", remedy="Choose another file name."))
    shutil.copyfile(source, target)
    out.print(f"{target}\nNext: dew train {target} --dry-run")
