"""`Run`, what the report knows about a run, and the sampling of its token records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dew.errors import RecordError
from dew.records import GroupRecord, Json, read_records

PAGE_TOKENS = 300_000
"""Tokens of all runs in one page, about 6 MB of HTML. Beyond it groups are sampled, and the page says so."""
PAGE_FILES = 200
READ_BYTES = 48 << 20
"""Of compressed records: about half a minute of reading."""


@dataclass(frozen=True)
class Run:
    """What could be read of a run. Readers fill in what their format has, and the page shows that."""

    name: str
    kind: str
    """dew, trl or records."""
    facts: Json = field(default_factory=dict)
    """run.json, or the equivalent of another trainer."""
    config: str | None = None
    metrics: list[Json] = field(default_factory=list)
    alarms: list[Json] = field(default_factory=list)
    scores: list[Json] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)
    sample: dict[str, Any] = field(default_factory=dict)
    """How much of the recorded data is included."""
    notices: list[str] = field(default_factory=list)
    """One sentence for each thing that could not be read."""


def evenly(n: int, most: int) -> list[int]:
    """At most `most` of the indices 0..n−1, evenly spaced, including the first and the last."""
    if n <= most:
        return list(range(n))
    return [round(i * (n - 1) / (most - 1)) for i in range(most)] if most > 1 else [n - 1][:most]


def cost(group: GroupRecord) -> int:
    """Size of a group in the page, in tokens; four characters of text count as one."""
    return max(group.size, sum(len(token) for answer in group.answers for token in answer.tokens) // 4)


def thin(groups: list[GroupRecord], tokens: int) -> list[GroupRecord]:
    """Evenly spaced groups whose total cost is at most `tokens`; all of them if they fit."""
    most = len(groups)
    while most > 0:
        kept = [groups[i] for i in evenly(len(groups), most)]
        size = sum(map(cost, kept))
        if size <= tokens:
            return kept
        most = min(most - 1, int(most * tokens / size))
    cheapest = min(groups, key=cost, default=None)
    return [cheapest] if cheapest and cost(cheapest) <= tokens else []


def read_sample(
    files: Sequence[Path], tokens: int, read: Callable[[Path], list[GroupRecord]] = read_records
) -> tuple[list[GroupRecord], dict[str, Any], list[str]]:
    """Groups from evenly spaced files within the budget, how much that is, and what could not be read.

    Each file may use its share of the budget plus what previous files left over. If no group fits, the smallest one
    is included anyway.
    """
    mean = sum(map(_compressed_size, files)) / max(1, len(files))
    readable = max(2, int(READ_BYTES / max(1.0, mean)))
    picked = [files[i] for i in evenly(len(files), min(PAGE_FILES, readable))]
    groups: list[GroupRecord] = []
    smallest: GroupRecord | None = None
    seen, allowance, notices = 0, 0.0, []
    for path in picked:
        allowance += tokens / len(picked)
        try:
            found = read(path)
        except RecordError as error:
            if path.exists():  # else the running job has removed it
                notices.append(str(error))
            continue
        kept = thin(found, int(allowance))
        allowance -= sum(map(cost, kept))
        groups += kept
        smallest = min([*found, *([smallest] if smallest else [])], key=cost, default=None)
        seen += len(found)
    if smallest and not groups:
        groups = [smallest]
    sample = {"groups": len(groups), "of": seen, "files": len(picked), "files_of": len(files)}
    return groups, sample, notices


def _compressed_size(path: Path) -> float:
    """Bytes of a compressed file; a folder of plain files counts as an eighth. A running job may remove records."""
    try:
        return sum(p.stat().st_size for p in path.iterdir()) / 8 if path.is_dir() else path.stat().st_size
    except FileNotFoundError:
        return 0.0
