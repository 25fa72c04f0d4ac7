"""One run as the report sees it, wherever it came from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dew.errors import RecordError
from dew.records import GroupRecord, Json, read_records

PAGE_TOKENS = 300_000
"""Tokens of all runs in one page: some 6 MB of HTML. Beyond it, groups are sampled and the page says so."""
PAGE_FILES = 200
READ_BYTES = 48 << 20
"""Of packed records: some half a minute of reading."""


@dataclass(frozen=True)
class Run:
    """What could be read of a run. Readers fill what their format has; the page shows what is there."""

    name: str
    kind: str
    """dew, trl, prime-rl or records."""
    facts: Json = field(default_factory=dict)
    """run.json, or as much of it as a foreign run tells."""
    config: str | None = None
    metrics: list[Json] = field(default_factory=list)
    alarms: list[Json] = field(default_factory=list)
    scores: list[Json] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)
    sample: dict[str, Any] = field(default_factory=dict)
    """How much of what was recorded is here."""
    notices: list[str] = field(default_factory=list)
    """What could not be read, in one sentence each."""


def evenly(n: int, most: int) -> list[int]:
    """At most `most` of the indices 0..n−1, spread evenly, the first and the last among them."""
    if n <= most:
        return list(range(n))
    return [round(i * (n - 1) / (most - 1)) for i in range(most)] if most > 1 else [n - 1][:most]


def cost(group: GroupRecord) -> int:
    """What a group weighs in the page, in tokens: text of four characters counts as one."""
    return max(group.size, sum(len(token) for answer in group.answers for token in answer.tokens) // 4)


def thin(groups: list[GroupRecord], tokens: int) -> list[GroupRecord]:
    """Evenly spread groups that together cost at most `tokens`; all of them where they fit."""
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
    """Groups of evenly spread files within the budget, how much that is, and what could not be read.

    Every file may use its share of the budget and what those before it left over. Where no group fits, the smallest
    is taken nevertheless: one is worth a heavy page, none is not.
    """
    picked = [files[i] for i in evenly(len(files), _most_files(files))]
    groups: list[GroupRecord] = []
    smallest: GroupRecord | None = None
    seen, allowance, notices = 0, 0.0, []
    for path in picked:
        allowance += tokens / len(picked)
        try:
            found = read(path)
        except RecordError as error:
            if path.exists():  # else the run at work has removed it
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


def _most_files(files: Sequence[Path]) -> int:
    """As many as make a good sample and can be read in about half a minute."""
    mean = sum(map(_packed_size, files)) / max(1, len(files))
    return min(PAGE_FILES, max(2, int(READ_BYTES / max(1.0, mean))))


def _packed_size(path: Path) -> float:
    """Bytes of a packed file; a folder of plain ones would pack to an eighth. A run at work may remove records."""
    try:
        return sum(p.stat().st_size for p in path.iterdir()) / 8 if path.is_dir() else path.stat().st_size
    except FileNotFoundError:
        return 0.0
