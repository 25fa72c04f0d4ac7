"""The report: metrics and token records of runs as one self-contained HTML page, and as JSON."""

import logging
from collections.abc import Sequence
from pathlib import Path

from dew.errors import ConfigError, Problem
from dew.report.content import content_of
from dew.report.readers import PAGE_TOKENS, Run, read_records_file, read_run
from dew.report.write import write_report

__all__ = ["build", "build_from_records"]

log = logging.getLogger(__name__)


def build(folders: Sequence[Path], out: Path | None = None, *, tokenizer: str | None = None) -> Path:
    """Write report.html and report.json for the runs in `folders` and return the path of the page.

    Runs may come from dew, plain TRL or prime-rl (token ids; `tokenizer` turns them into text). Default: in the folder
    of a single run, else in the current folder.
    """
    folders = [Path(folder) for folder in folders]
    if not folders:
        raise ConfigError(Problem("No run given.", remedy="Give at least one run folder, such as runs/NAME."))
    runs = [read_run(folder, PAGE_TOKENS // len(folders), tokenizer) for folder in folders]
    return _write(runs, out, folders[0] if len(folders) == 1 else Path())


def build_from_records(file: Path, out: Path | None = None) -> Path:
    """The same for one file of token records (docs/records.md) from any trainer."""
    file = Path(file)
    return _write([read_records_file(file, PAGE_TOKENS)], out, file.parent)


def _write(runs: list[Run], out: Path | None, folder: Path) -> Path:
    for notice in (notice for run in runs for notice in run.notices):
        log.warning(notice)
    if out is None:
        out = folder / "report.html"
    elif out.is_dir():
        out = out / "report.html"
    return write_report(content_of(runs), Path(out).with_suffix(".html"))
