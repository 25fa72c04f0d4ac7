"""The report: metrics and token records of runs as one self-contained HTML page, and as JSON."""

import logging
from collections.abc import Sequence
from pathlib import Path

from dew.compare.grid import read_grid
from dew.errors import ConfigError, Problem
from dew.report.content import content_of
from dew.report.readers import Run, read_records_file, read_runs, run_folders
from dew.report.write import write_report
from dew.run.records import Json

__all__ = ["build", "build_from_records"]

log = logging.getLogger(__name__)


def build(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write report.html and report.json for the runs in `folders` and return the path of the page.

    Runs may come from dew or plain TRL. A folder may also hold several runs, as those of `dew compare`, `dew lab` and
    `dew demo` do. Default: in the given folder, else in the current one.
    """
    folders = [Path(folder) for folder in folders]
    return _write(read_content(folders), out, folders[0] if len(folders) == 1 else Path())


def build_from_records(file: Path, out: Path | None = None) -> Path:
    """The same for one file of token records (docs/records.md) from any trainer."""
    file = Path(file)
    return _write(content_of([read_records_file(file)]), out, file.parent)


def read_content(folders: Sequence[Path]) -> Json:
    """What the page shows, as in report.json."""
    if not folders:
        raise ConfigError(Problem("No run given.", remedy="Give at least one run folder, such as runs/NAME."))
    runs = read_runs([run for folder in folders for run in run_folders(folder)])
    arms = [arm for folder in folders for arm in read_grid(folder).get("arms", [])]
    tasks = list(dict.fromkeys(str(run.facts.get("data")) for run in runs))

    def place(run: Run) -> tuple[int, int]:  # the baseline first
        arm = run.facts.get("arm")
        return tasks.index(str(run.facts.get("data"))), arms.index(arm) if arm in arms else len(arms)

    return content_of(sorted(runs, key=place) if arms else runs)


def _write(content: Json, out: Path | None, folder: Path) -> Path:
    for notice in (notice for run in content["runs"] for notice in run["notices"]):
        log.warning(notice)
    out = Path(out or folder)
    if out.is_dir():
        out = out / "report.html"
    return write_report(content, out if out.suffix == ".html" else out.with_name(f"{out.name}.html"))
