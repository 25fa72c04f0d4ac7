"""The report: metrics and token records of runs as one self-contained HTML page, and as JSON."""

import logging
from collections.abc import Sequence
from pathlib import Path

from dew.errors import ConfigError, Problem
from dew.files import stay_inside
from dew.report.arms import settings_of
from dew.report.content import content_of
from dew.report.readers import STUDY, read_comparison, read_records_file, read_run, read_study, run_folders
from dew.report.write import write_report
from dew.run.records import Json

__all__ = ["build", "build_from_records"]

log = logging.getLogger(__name__)


def build(folders: Sequence[Path], out: Path | None = None, *, tokenizer: str | None = None) -> Path:
    """Write report.html and report.json for the runs in `folders` and return the path of the page.

    Runs may come from dew, plain TRL or prime-rl (token ids; `tokenizer` turns them into text). A folder may also hold
    several runs, as those of `dew compare` and `dew demo` do. Default: in the given folder, else in the current one.
    """
    folders = [Path(folder) for folder in folders]
    content = read_content(folders, tokenizer=tokenizer)
    return _write(content, out, folders[0] if len(folders) == 1 else Path())


def build_from_records(file: Path, out: Path | None = None) -> Path:
    """The same for one file of token records (docs/records.md) from any trainer."""
    file = Path(file)
    return _write(content_of([read_records_file(file)]), out, file.parent)


def read_content(folders: Sequence[Path], *, tokenizer: str | None = None) -> Json:
    """What the page shows, as in report.json."""
    if not folders:
        raise ConfigError(Problem("No run given.", remedy="Give at least one run folder, such as runs/NAME."))
    if len(folders) == 1 and (folders[0] / STUDY).exists():
        stay_inside(folders[0])
        return content_of(*read_study(folders[0]))
    inner = [run for folder in folders for run in run_folders(folder)]
    runs = [read_run(folder, len(inner), tokenizer) for folder in inner]
    compared = read_comparison(folders[0]) if len(folders) == 1 and len(runs) > 1 else []
    if compared:
        baseline = compared[0]["baseline"]
        runs.sort(key=lambda run: settings_of(run)[0].get("algorithm") != baseline)
    return content_of(runs, differences=compared)


def _write(content: Json, out: Path | None, folder: Path) -> Path:
    for notice in (notice for run in content["runs"] for notice in run["notices"]):
        log.warning(notice)
    out = Path(out or folder)
    if out.is_dir():
        out = out / "report.html"
    return write_report(content, out if out.suffix == ".html" else out.with_name(f"{out.name}.html"))
