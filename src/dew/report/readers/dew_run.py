"""dew's own run folder (docs/records.md)."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dew.errors import RecordError
from dew.records import Json, RunFolder, SchemaError
from dew.report.run import Run, read_sample

MOST_CONFIG = 200_000
"""Characters of config.yaml in the page."""
T = TypeVar("T")


def is_dew_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("run.json", "metrics.jsonl", "records"))


def read_dew_run(folder: Path, tokens: int) -> Run:
    """What can be read of it, now: the run may be at work, and a file that is damaged is told and left out."""
    run = RunFolder(folder)
    notices: list[str] = []

    def part(read: Callable[[], T], empty: T) -> T:
        try:
            return read()
        except SchemaError:
            raise
        except RecordError as error:
            notices.append(str(error))
            return empty

    facts: Json = part(run.run, {})
    groups, sample, unread = read_sample(run.record_files(), tokens)
    config = folder / "config.yaml"
    return Run(
        name=str(facts.get("name") or folder.resolve().name),
        kind="dew",
        facts=facts,
        config=config.read_text(errors="replace")[:MOST_CONFIG] if config.is_file() else None,
        metrics=part(run.metrics, []),
        alarms=part(run.alarms, []),
        scores=part(run.scores, []),
        groups=groups,
        sample=sample,
        notices=[*notices, *unread],
    )
