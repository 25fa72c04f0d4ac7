"""The report: a run's metrics and token records as one self-contained page, and the same as JSON."""

import logging
from collections.abc import Sequence
from pathlib import Path

from dew.errors import ConfigError
from dew.report.content import content_of
from dew.report.readers import read_records_file, read_run
from dew.report.run import PAGE_TOKENS, Run
from dew.report.write import write_report

__all__ = ["build", "build_from_records"]

log = logging.getLogger(__name__)


def build(folders: Sequence[Path], out: Path | None = None, *, tokenizer: str | None = None) -> Path:
    """Write report.html and report.json about the runs in `folders` and return the page's path.

    Folders may hold runs of dew, of plain TRL, or prime-rl's token exports (which need `tokenizer` for words).
    One run's report goes into its folder, that of several into the current folder, unless `out` says where.
    """
    folders = [Path(folder) for folder in folders]
    if not folders:
        raise ConfigError("no run given. Name at least one run's folder, such as runs/NAME.")
    runs = [read_run(folder, PAGE_TOKENS // len(folders), tokenizer) for folder in folders]
    return _write(runs, out, folders[0] if len(folders) == 1 else Path())


def build_from_records(file: Path, out: Path | None = None) -> Path:
    """The same for one file of token records (docs/records.md), of whatever trainer."""
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
