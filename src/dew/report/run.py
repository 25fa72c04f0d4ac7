"""One run as the report sees it, wherever it came from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dew.records import GroupRecord, Json, RecordError, read_records

PAGE_TOKENS = 300_000
"""Tokens of all runs in one page: some 6 MB of HTML. Beyond it, groups are sampled and the page says so."""
PAGE_FILES = 200


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


def read_sample(files: list[Path], tokens: int) -> tuple[list[GroupRecord], dict[str, Any], list[str]]:
    """Groups of evenly spread files within the budget, how much that is, and which files could not be read."""
    picked = [files[i] for i in evenly(len(files), PAGE_FILES)]
    groups: list[GroupRecord] = []
    seen, allowance, notices = 0, 0.0, []
    for path in picked:
        allowance += tokens / len(picked)
        try:
            read = read_records(path)
        except RecordError as error:
            notices.append(str(error))
            continue
        kept = thin(read, int(allowance))
        allowance -= sum(map(cost, kept))
        groups += kept
        seen += len(read)
    sample = {"groups": len(groups), "of": seen, "files": len(picked), "files_of": len(files)}
    return groups, sample, notices
