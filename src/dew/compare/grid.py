"""A grid of paired runs in one folder: which runs are left to train, the results of finished runs, and the differences
between arms.

    STUDY/grid.json             the settings that all runs share, and the arms, the baseline first
    STUDY/[TASK/]ARM-seed0/     a run folder for each cell

To train a grid, call `open_grid`, train the cells that it returns, in processes or in stacks, and write `Cell.facts()`
to the run.json of each.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dew.compare.scores import Scores, compare_scores
from dew.compare.statistics import Difference, corrected, paired
from dew.errors import ConfigError, DewError, Problem, RecordError
from dew.files import is_plain, read_whole, write_atomically
from dew.run.folder import RunFolder, algorithm_of

GRID = "grid.json"
REPLACED = ".replaced"
"""The folder to which runs of a rule whose code has changed are moved."""
MAX_FILE = 1 << 24
OTHER_FOLDER = "Choose another folder with --out."
AREA = "area"
MAX_ANSWERS = 64 << 20


@dataclass(frozen=True)
class Cell:
    arm: str
    seed: int
    task: str = ""
    learning_rate: float | None = None
    source: str = ""
    """Digest of the code of a user's rule."""
    control: str | None = None
    """The same arm without token weights, to compare with."""
    placebo: str | None = None
    """The same arm with the weights of each answer permuted."""

    @property
    def home(self) -> Path:
        """The run folder, relative to the grid's folder."""
        rate = "" if self.learning_rate is None else f"-lr{self.learning_rate:g}"
        task = re.sub(r"^\.|/", "_", self.task)  # a path of a data file must not lead out of the grid's folder
        return Path(task) / f"{_file_name(self.arm)}{rate}-seed{self.seed}"

    def facts(self) -> dict[str, Any]:
        given = {"data" if name == "task" else name: value for name, value in asdict(self).items()}
        return {name: value for name, value in given.items() if value not in (None, "")}


def _file_name(arm: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", arm).strip("_")


def open_grid(
    folder: Path, cells: Sequence[Cell], settings: Mapping[str, Any], *,
    finished: Callable[[RunFolder], bool] = RunFolder.finished, say: Callable[[str], None] = print,
) -> list[Cell]:  # fmt: skip
    """Create or extend a grid; return the cells that are not finished, in order. The first cell's arm is the baseline,
    unless the grid already has a baseline that is not among the cells.

    Raises if the folder has runs with other `settings`, which all runs must share, or holds something else. Runs of a
    rule whose code has changed are moved to a folder that the message names.
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
    """Move away runs of rules whose code has changed, and of their placebos: neither lost nor mixed with new ones."""
    changed = {old[arm] for arm in new if old.get(arm) and old[arm] != new[arm]}
    for arm in (arm for arm, source in old.items() if source in changed):
        name = re.compile(rf"{re.escape(_file_name(arm))}(-lr[\d.e+-]+)?-seed\d+")
        found = [path for pattern in ("[!.]*", "[!.]*/*") for path in folder.glob(pattern) if path.is_dir()]
        homes = [path for path in found if name.fullmatch(path.name)]
        aside = folder / REPLACED / old[arm]
        for home in homes:
            target = aside / home.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            home.rename(target)
        if homes:
            say(f"The code of {arm} has changed: its earlier runs ({len(homes)}) are now in {aside}.")


# ── results ─────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Result:
    arm: str
    seed: int
    scores: Mapping[str, float]
    """area (mean training accuracy), and the scores after training in the run's scores.json: pass@1, ..."""
    task: str = ""
    learning_rate: float | None = None
    control: str | None = None
    placebo: str | None = None
    """Other arms to compare with, as in `Cell`."""
    groups: int = 0
    """Groups sampled, including dropped ones: dynamic sampling needs more groups for the same number of steps."""
    folder: Path | None = None

    def to_json(self) -> dict[str, Any]:
        names = ("arm", "seed", "task", "learning_rate", "groups")
        return {name: getattr(self, name) for name in names} | {"scores": dict(self.scores)}


def read_result(folder: Path | str, **known: Any) -> Result:
    """Read the result of the run in this folder. `known` overrides facts of its run.json: arm, seed, task, ..."""
    run, folder = RunFolder(folder), Path(folder)
    facts, metrics = run.run(), run.metrics()
    arm = facts.get("arm") or algorithm_of(facts)[0]
    about: dict[str, Any] = {"arm": str(arm or ""), "task": str(facts.get("data") or "")}
    about |= {key: facts.get(key) for key in ("learning_rate", "control", "placebo")}
    about |= {"seed": facts.get("seed", 0), **known}
    rate = about["learning_rate"]
    if type(about["seed"]) is not int or not (rate is None or (type(rate) is float and 0 <= rate < math.inf)):
        what = f"{folder / 'run.json'}: seed {about['seed']!r:.40} or learning_rate {rate!r:.40} is not a number."
        raise RecordError(Problem(what, remedy="Copy it again, or delete the run."))
    scores = {}
    if accuracy := [m["accuracy"] for m in metrics if isinstance(m.get("accuracy"), int | float)]:
        scores[AREA] = fmean(accuracy)
    for entry in (entry for entry in run.scores() if entry.get("when") == "after"):
        found = entry.get("scores")
        for name, score in found.items() if isinstance(found, dict) else ():
            value = score.get("value") if isinstance(score, dict) else None
            if isinstance(value, int | float) and math.isfinite(value):
                scores[name] = value
    if AREA not in scores:
        raise ConfigError(f"{folder}: the metrics contain no accuracy, so there is nothing to compare.")
    sampled = [m.get("groups/sampled") for m in metrics]
    groups = sum(int(n) for n in sampled if isinstance(n, int | float) and abs(n) < 1e18)
    return Result(**about, scores=scores, groups=groups, folder=run.path)


def runs_inside(study: Path) -> list[Path]:
    """The run folders in a study's folder, up to two levels down; hidden folders are skipped."""
    return sorted(path.parent for pattern in ("[!.]*/run.json", "[!.]*/*/run.json") for path in study.glob(pattern))


def read_answers(folder: Path | None, when: str = "after") -> Scores | None:
    """The evaluated answers of a run; None if there is no such file, or if it is damaged or too large."""
    path = None if folder is None else folder / f"answers-{when}.json"
    if path is None or not path.exists() or not is_plain(path) or path.stat().st_size > MAX_ANSWERS:
        return None
    try:
        return Scores.read(path)
    except DewError:
        return None


def by_problem(scores: Scores | None, than: Scores | None, score: str, **names: str) -> Difference | None:
    """The difference in a score, `scores` minus `than`, paired by problem; None if they cannot be compared."""
    if scores is None or than is None:
        return None
    try:
        return compare_scores(scores, than, **names).get(score)
    except DewError:
        return None


def main_scores(scores: Iterable[str]) -> list[str]:
    """The scores that comparisons show: training accuracy (area, final), pass@1 and the largest pass@k."""
    scores = list(scores)
    passes = sorted((s for s in scores if s.startswith("pass@")), key=lambda s: int(s.removeprefix("pass@")))
    return list(dict.fromkeys([*(s for s in (AREA, "final") if s in scores), *passes[:1], *passes[-1:]]))


def compare_arms(results: Sequence[Result], arm: str, baseline: str, score: str) -> Difference:
    """An arm minus the baseline on one task, paired by seed; by problem if they share one seed and kept the answers."""
    names = {"arm": arm, "baseline": baseline, "task": results[0].task}
    both = [{r.seed: r for r in results if r.arm == name and score in r.scores} for name in (arm, baseline)]
    seeds = both[0].keys() & both[1].keys()
    if len(seeds) == 1:
        one, other = (read_answers(runs[seed].folder) for runs in both for seed in seeds)
        if found := by_problem(one, other, score, **names):
            return found
    a, b = ({seed: r.scores[score] for seed, r in sorted(runs.items())} for runs in both)
    if difference := paired(a, b, score=score, unit="seeds", **names):
        return difference
    raise ConfigError(f"{arm} and {baseline} have no seed in common for {score}.")


def compare_runs(results: Sequence[Result], baseline: str) -> list[Difference]:
    """Every arm minus the baseline, in the main scores that all runs have, with Holm's correction over the arms."""
    shared = [score for score in results[0].scores if all(score in r.scores for r in results)]
    others = [arm for arm in dict.fromkeys(r.arm for r in results) if arm != baseline]
    return corrected(compare_arms(results, arm, baseline, score) for arm in others for score in main_scores(shared))
