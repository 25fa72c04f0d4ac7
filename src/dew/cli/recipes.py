"""`dew recipes`: ls, show, copy."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from dew.cli.app import app
from dew.cli.console import out
from dew.config import nearest
from dew.errors import ConfigError

recipes = typer.Typer()
app.add_typer(recipes, name="recipes")

HERE = Path(__file__).parents[1] / "recipes"
"""Where the wheel puts them; in a checkout they stand at its root."""


def folder() -> Path:
    return HERE if HERE.is_dir() else Path(__file__).parents[3] / "recipes"


def names() -> dict[str, Path]:
    return {str(path.relative_to(folder()).with_suffix("")): path for path in sorted(folder().rglob("*.yaml"))}


def find(name: str) -> Path | None:
    return names().get(name)


def _get(name: str) -> Path:
    path = find(name)
    if path is None:
        raise ConfigError(f"No recipe is called {name!r}.{nearest(name, names())}")
    return path


@recipes.callback(invoke_without_command=True)
def plain(context: typer.Context) -> None:
    """Runs that are known: list them, read one, copy one."""
    if context.invoked_subcommand is None:
        ls()


@recipes.command("ls")
def ls() -> None:
    """All recipes, each with its first line."""
    for name, path in names().items():
        out.print(f"{name:32} {path.read_text().splitlines()[0].removeprefix('# ')}", soft_wrap=True)


@recipes.command()
def show(name: str) -> None:
    """Print one."""
    out.print(_get(name).read_text().rstrip(), soft_wrap=True)


@recipes.command()
def copy(name: str, to: Annotated[Path, typer.Argument(help="File or folder.")] = Path(".")) -> None:
    """Copy one, to change it."""
    source = _get(name)
    target = to / source.name if to.is_dir() else to
    if target.exists():
        raise ConfigError(f"{target} is there already. Name another file.")
    shutil.copyfile(source, target)
    out.print(f"{target}\nNext: dew train {target} --dry-run")
