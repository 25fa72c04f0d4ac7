"""dew's own run folder (docs/records.md)."""

from pathlib import Path

from dew.records import RunFolder
from dew.report.run import Run, read_sample

MOST_CONFIG = 200_000
"""Characters of config.yaml in the page."""


def is_dew_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("run.json", "metrics.jsonl", "records"))


def read_dew_run(folder: Path, tokens: int) -> Run:
    run = RunFolder(folder)
    facts = run.run()
    groups, sample, notices = read_sample(run.record_files(), tokens)
    config = folder / "config.yaml"
    return Run(
        name=str(facts.get("name") or folder.resolve().name),
        kind="dew",
        facts=facts,
        config=config.read_text(errors="replace")[:MOST_CONFIG] if config.is_file() else None,
        metrics=run.metrics(),
        alarms=run.alarms(),
        scores=run.scores(),
        groups=groups,
        sample=sample,
        notices=notices,
    )
