"""Rows from files and data sets: JSON Lines, JSON, Parquet (each also in a folder, by split), the Hugging Face hub.

A row that cannot be used is left out, counted and shown; it ends nothing, and it never goes unsaid.
"""

import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from dew.errors import ConfigError
from dew.files import is_plain
from dew.tasks.base import Row
from dew.tasks.overlap import identity

SHOWN = 5
"""Bad rows that are shown one by one; the rest is a number."""
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")

LONGEST_LINE = 1 << 26
"""Bytes of one row of JSON Lines, unpacked."""
LARGEST_JSON = 1 << 30
"""Bytes of a JSON file, unpacked: it is held in memory as a whole."""

log = logging.getLogger("dew.tasks")


@dataclass(frozen=True)
class Bad:
    """A row that was left out."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True)
class Table:
    """The rows of one split, and what became of the others."""

    name: str
    rows: list[Row]
    bad: list[Bad] = field(default_factory=list)
    repeated: int = 0
    """Rows whose problem had come before, with the same answer."""

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.rows):,} problems"]
        if self.repeated:
            lines[0] += f", {self.repeated:,} repeated ones left out"
        if self.bad:
            lines[0] += f", {len(self.bad):,} rows that cannot be used left out:"
            lines += [f"  {bad}" for bad in self.bad[:SHOWN]]
            lines += [f"  and {len(self.bad) - SHOWN:,} more"] if len(self.bad) > SHOWN else []
        return "\n".join(lines)


Unreadable = Exception
"""What a `Read` raises for a row that it cannot use; its text says why."""
Read = Callable[[Row], Row]
"""A raw row -> `problem`, `answer` and whatever else is kept."""


def read_table(
    source: str | Path, read: Read, *, split: str = "train", config: str | None = None, name: str = ""
) -> Table:
    """Every usable row of one split, in order: each problem once, with `problem` and `answer` as text."""
    seen: dict[str, list[tuple[str, Row]]] = {}
    bad: list[Bad] = []
    for where, raw in raw_rows(source, split=split, config=config):
        try:
            row = _checked(raw, read)
            seen.setdefault(identity(row["problem"]), []).append((where, row))
        except Unreadable as error:
            bad.append(Bad(where, str(error)))
    kept, repeated = [], 0
    for same in seen.values():
        answers = sorted({row["answer"] for _, row in same})
        if len(answers) == 1:
            kept.append(same[0][1])
            repeated += len(same) - 1
        else:
            bad += [Bad(where, f"one problem with the answers {' and '.join(answers)}") for where, _ in same]
    table = Table(name or str(source), kept, bad, repeated)
    if not kept:
        raise ConfigError(f"No usable rows. {table}")
    if bad:
        log.warning("%s", table)
    return table


def _checked(raw: Any, read: Read) -> Row:
    if isinstance(raw, Exception):
        raise raw
    if not isinstance(raw, dict):
        raise ValueError(f"a {type(raw).__name__}, not an object with columns")
    row = read(raw)
    for column in ("problem", "answer"):
        row[column] = "" if row.get(column) is None else str(row[column]).strip()
        if not row[column]:
            raise ValueError(f"no {column}")
    return row


# Columns


def columns(problem: str = "problem", answer: str = "answer", keep: Iterable[str] = ()) -> Read:
    """Read the named columns; a dot leads inside a column: `reward_model.ground_truth`. `keep` names more to keep."""

    def read(raw: Row) -> Row:
        named = {"problem": cell(raw, problem), "answer": cell(raw, answer)}
        return {**named, **{name: cell(raw, name) for name in keep}}

    return read


def cell(raw: Row, name: str) -> Any:
    """The content of a column. Of chat messages, the last one's text; a list of one is that one."""
    value: Any = raw
    for part in [name] if name in raw else name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"no column {name!r}; there are {', '.join(map(str, raw)) or 'none'}")
        value = value[part]
    if isinstance(value, list) and value and isinstance(value[-1], dict) and "content" in value[-1]:
        return value[-1]["content"]
    return value


# Places


def raw_rows(source: str | Path, *, split: str, config: str | None = None) -> Iterator[tuple[str, Any]]:
    """(where, raw row) of a file, or of one split of a folder or hub set. In place of a bad line stands the error."""
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _folder(path, split)
    elif path.name.endswith(ENDINGS):
        yield from _file(path)
    elif str(source).count("/") == 1 and not str(source).startswith((".", "/", "~")):
        yield from _hub(str(source), split, config)
    else:
        raise ConfigError(
            f"{source}: neither a folder, nor a file ({', '.join(ENDINGS)}), nor a hub data set (owner/name)."
        )


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of one split: `train.jsonl`, `train-00000-of-00002.parquet`, also under `data/`."""
    for place in (folder, folder / "data"):
        for ending in ENDINGS:
            if found := sorted(chain(place.glob(f"{split}{ending}"), place.glob(f"{split}-*{ending}"))):
                return found
    return []


def _folder(folder: Path, split: str) -> Iterator[tuple[str, Any]]:
    if files := split_files(folder, split):
        for file in files:
            yield from _file(file)
    elif (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists():
        yield from _saved(folder, split)
    else:
        there = sorted(file.name for file in folder.iterdir())[:10]
        raise ConfigError(
            f"{folder}: no {split} split. Expected {split}.jsonl, {split}.jsonl.gz, {split}.json or {split}.parquet; "
            f"there are {', '.join(there) or 'no files'}."
        )


def _file(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        if path.name.endswith(".parquet"):
            yield from _parquet(path)
            return
        if not is_plain(path):
            raise ConfigError(f"{path}: not a file but a pipe or a device, whose reading might never end.")
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            yield from _lines(path, file) if ".jsonl" in path.name else _whole(path, file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read ({reason}).") from None


def _lines(path: Path, file: Any) -> Iterator[tuple[str, Any]]:
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE:
            raise ConfigError(f"{path}:{number}: a line of more than {LONGEST_LINE:,} bytes. One problem per line.")
        if not line.strip():
            continue
        try:
            yield f"{path.name}:{number}", json.loads(line)
        except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
            yield f"{path.name}:{number}", ValueError(f"not JSON ({error})")


def _whole(path: Path, file: Any) -> Iterator[tuple[str, Any]]:
    try:
        whole = file.read(LARGEST_JSON + 1)
        if len(whole) > LARGEST_JSON:
            raise ConfigError(
                f"{path}: more than {LARGEST_JSON:,} bytes of JSON, unpacked. Write one row a line instead."
            )
        content = json.loads(whole)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not JSON ({error}). With one object a line, name it {path.stem}.jsonl.") from None
    if isinstance(content, dict):
        content = next((value for value in content.values() if isinstance(value, list)), [])
    if not isinstance(content, list):
        raise ConfigError(f"{path}: a {type(content).__name__}, not a list of rows.")
    for number, raw in enumerate(content):
        yield f"{path.name}[{number}]", raw


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path}: not a Parquet file ({error}).") from None
    number = 0
    for batch in table.iter_batches():
        for raw in batch.to_pylist():
            yield f"{path.name}[{number}]", raw
            number += 1


def _saved(folder: Path, split: str) -> Iterator[tuple[str, Any]]:
    """A folder written by `save_to_disk`."""
    from datasets import DatasetDict, load_from_disk

    data = load_from_disk(str(folder))
    if isinstance(data, DatasetDict):
        if split not in data:
            raise ConfigError(f"{folder}: no {split} split; there are {', '.join(data)}.")
        data = data[split]
    for number, raw in enumerate(data):
        yield f"{folder.name}[{number}]", raw


def _hub(name: str, split: str, config: str | None) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    try:
        data = load_dataset(name, config, split=split)
    except Exception as error:  # the hub's many kinds of "not there"
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(
            f"{name}: the {split} split cannot be loaded from the Hugging Face hub ({reason}). "
            "Without the hub, give a local copy: a folder or file as the path, or all of them under DEW_DATA."
        ) from None
    for number, raw in enumerate(data):
        yield f"{name}[{number}]", raw
