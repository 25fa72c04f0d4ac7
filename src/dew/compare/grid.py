"""A grid of paired runs in one folder: which are finished, and which are to be trained.

    STUDY/grid.json             what all runs share, and the arms, the baseline first
    STUDY/[TASK/]ARM-seed0/     a run folder for each cell

Whoever trains the runs, in processes or in stacks, calls `open_grid`, trains what it returns, and writes the facts of
the cell to its run.json.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dew.errors import ConfigError, Problem, RecordError
from dew.files import read_whole, write_atomically
from dew.run.folder import RunFolder

GRID = "grid.json"
REPLACED = ".replaced"
"""The folder for runs of a rule whose code has changed."""
MAX_FILE = 1 << 24
OTHER_FOLDER = "Choose another folder with --out."


@dataclass(frozen=True)
class Cell:
    arm: str
    seed: int
    task: str = ""
    learning_rate: float | None = None
    source: str = ""
    """Digest of the code of a user's rule."""
    control: str | None = None
    """The arm without weights on tokens that this one is compared with."""
    placebo: str | None = None
    """The arm with the weights of each answer permuted."""

    @property
    def home(self) -> Path:
        """Its folder within that of the grid."""
        rate = "" if self.learning_rate is None else f"-lr{self.learning_rate:g}"
        return Path(self.task) / f"{_file_name(self.arm)}{rate}-seed{self.seed}"

    def facts(self) -> dict[str, Any]:
        given = {"data" if name == "task" else name: value for name, value in asdict(self).items()}
        return {name: value for name, value in given.items() if value not in (None, "")}


def _file_name(arm: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", arm).strip("_")


def open_grid(
    folder: Path, cells: Sequence[Cell], settings: Mapping[str, Any], *,
    finished: Callable[[RunFolder], bool] = RunFolder.finished, say: Callable[[str], None] = print,
) -> list[Cell]:  # fmt: skip
    """The cells that are not finished, in order. The first cell's arm is the baseline, unless the cells are added to
    those of a baseline that is not among them.

    `settings` are what all runs share: a folder whose runs have others is refused, as is one that holds something
    else. Runs of a rule whose code has changed are set aside, into a folder that the message names.
    """
    if len({cell.home for cell in cells}) < len(set(cells)):
        what = "Two arms would be written to the same folder."
        raise ConfigError(Problem(what, remedy="Give each arm once, and each class a name of its own."))
    old = read_grid(folder)
    settings = json.loads(json.dumps(settings, default=str))
    if not old and folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir()):
        raise ConfigError(Problem(f"{folder} is not empty and holds no comparison.", remedy=OTHER_FOLDER))
    was = old.get("settings", {})
    changed = [name for name in {**was, **settings} if was.get(name) != settings.get(name)]
    if old and changed and any(folder.rglob("run.json")):
        differ = ", ".join(f"{name} {was.get(name)} and {settings.get(name)}" for name in sorted(changed))
        raise ConfigError(Problem(f"{folder} holds runs with other settings ({differ}).", remedy=OTHER_FOLDER))
    sources = {cell.arm: cell.source for cell in cells}
    _set_aside(folder, old.get("sources", {}), sources, say)
    arms = old.get("arms", [])
    arms = [*arms, *sources] if arms and arms[0] not in sources else [*sources, *arms]  # the baseline first
    every = {**old.get("sources", {}), **sources}
    content = {"settings": settings, "arms": list(dict.fromkeys(arms)), "sources": every}
    write_atomically(folder / GRID, json.dumps(content, indent=1).encode())
    return [cell for cell in cells if not finished(RunFolder(folder / cell.home))]


def read_grid(folder: Path) -> dict[str, Any]:
    """grid.json: settings, arms (the baseline first) and sources; empty if there is none."""
    path = folder / GRID
    if not path.exists():
        return {}
    try:
        found = json.loads(read_whole(path, MAX_FILE))
        return {"settings": dict(found["settings"]), "arms": list(found["arms"]), "sources": dict(found["sources"])}
    except (ValueError, TypeError, LookupError, RecursionError):
        raise RecordError(Problem(f"{path}: not the JSON that dew writes.", remedy="Copy it again.")) from None


def _set_aside(folder: Path, old: Mapping[str, str], new: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Move runs of rules whose code has changed: they are neither lost nor mixed with new ones."""
    for arm in (arm for arm in new if old.get(arm, new[arm]) != new[arm]):
        name = re.compile(rf"{re.escape(_file_name(arm))}(-lr[\d.e+-]+)?-seed\d+")
        found = [path for pattern in ("[!.]*", "[!.]*/*") for path in folder.glob(pattern) if path.is_dir()]
        homes = [path for path in found if name.fullmatch(path.name)]
        aside = folder / REPLACED / old[arm]
        for home in homes:
            target = aside / home.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            home.rename(target)
        if homes:
            say(f"The code of {arm} has changed: its runs ({len(homes)}) are now in {aside}, and are trained again.")
