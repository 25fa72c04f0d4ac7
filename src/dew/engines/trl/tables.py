"""TRL's table of completions (console, parquet, trackers), brought to show what was trained on."""

from collections import deque
from typing import Any

Row = dict[tuple[str, ...], Any]


def last_rows(logs: dict[str, Any], count: int) -> list[Row]:
    """The newest `count` rows of TRL's logs, by column; empty where the logs are too short to hold them."""
    rows: list[Row] = [{} for _ in range(count)]
    for name, column in _columns(logs).items():
        values = list(column)[-count:]
        for row, value in zip(rows[count - len(values) :], values, strict=True):
            row[name] = value
    return rows


def replace_last(logs: dict[str, Any], count: int, rows: list[Row], advantages: list[float]) -> None:
    """Put these rows, with their advantages, in the place of the newest `count`."""
    for name, column in _columns(logs).items():
        for _ in range(min(count, len(column))):
            column.pop()
        shown = advantages if name == ("advantages",) else [row.get(name) for row in rows]
        column.extend(shown)


def _columns(logs: dict[str, Any]) -> dict[tuple[str, ...], deque[Any]]:
    """Every column except images, which not every row has."""
    flat: dict[tuple[str, ...], deque[Any]] = {(key,): logs[key] for key in ("prompt", "completion", "advantages")}
    for part in ("rewards", "extra"):
        flat.update({(part, name): column for name, column in logs[part].items()})
    return flat
