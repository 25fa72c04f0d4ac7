"""Read problems from JSON Lines, JSON and Parquet files (also one per split in a folder) and from the Hugging Face hub.

Unusable rows are skipped, counted and logged with their line number; they never stop a run.
"""

import codecs
import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unicodedata import normalize

from dew.errors import ConfigError, Problem, loading, unreadable
from dew.files import is_plain

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
NOT_TRAIN = re.compile(r"(?i)(?<![a-z])(test|validation|valid|val|dev|eval|dataset_info|dataset_dict)(?![a-z])")
MAX_SHOWN = 5
"""Maximum number of unusable rows listed in a message; the others are only counted."""
MAX_BYTES = 1 << 30
"""Maximum size of one row of JSON Lines, or of one JSON file, decompressed."""

MIN_LENGTH = 16
"""Texts with fewer letters and digits are too generic to count as the same problem: `1+1=?`."""

log = logging.getLogger("dew.tasks")
Row = dict[str, Any]
"""One problem: `prompt`, gold `answer`, other gold columns, and a worked `solution` if known."""
RawRows = Iterator[tuple[str, Any]]
"""(file and line, row), or an exception instead of the row if the line cannot be parsed."""
Read = Callable[[Row], Row]
"""Raw row -> row with the columns that dew uses. Raises an exception if the row is unusable."""


def read_rows(
    source: str | Path, read: Read, *, split: str = "train", config: str | None = None, column: str = "problem"
) -> list[Row]:
    """Return the usable rows of one split, in order, without duplicates of `column` ("problem" or "prompt")."""
    seen: dict[str, list[tuple[str, Row]]] = {}
    bad: list[str] = []
    for where, raw in raw_rows(source, split=split, config=config):
        try:
            row = _checked(raw, read, column)
            seen.setdefault(row_key(row, column), []).append((where, row))
        except Exception as error:
            bad.append(f"{where}: {error}")
    kept = []
    for same in seen.values():
        if len(answers := sorted({str(row.get("answer")) for _, row in same})) == 1:
            kept.append(same[0][1])
        else:
            bad += [f"{where}: conflicting answers to one problem, {' and '.join(answers)}" for where, _ in same]
    more = ["..."] if len(bad) > MAX_SHOWN else []
    skipped = "\n  ".join([f"{source}: {len(bad):,} unusable rows skipped:", *bad[:MAX_SHOWN], *more])
    if not kept:
        named = "task_settings {problem: ..., answer: ...} (dew eval: --settings) names the columns. "
        named += "Data without gold answers: task_settings {answer: ''}, with your own reward."
        what = f"No usable rows. {skipped}" if bad else f"{source}: no rows."
        raise ConfigError(Problem(what, remedy=named * any("no column" in why for why in bad)))
    if bad:
        log.warning("%s", skipped)
    return kept


def _checked(raw: Any, read: Read, column: str) -> Row:
    if isinstance(raw, Exception):
        raise raw
    if not isinstance(raw, dict):
        raise ValueError(f"a {type(raw).__name__}, not an object with columns")
    row = read(raw)
    if column == "problem":
        for name in {"problem", "answer"} & row.keys():
            parts = row[name] if isinstance(row[name], list) else [row[name]]
            row[name] = ", ".join(str(part) for part in parts if part is not None).strip()
    for name in (column, "answer"):
        if name in row and (row[name] in (None, []) or not str(row[name]).strip()):
            raise ValueError(f"no {name}")
    if not is_prompt(row[column]):
        raise ValueError(f"the {column} is neither text nor a list of chat messages")
    json.dumps(row[column], ensure_ascii=False).encode("utf-8")  # an error for half an emoji, which no tokenizer reads
    return row


def is_prompt(prompt: Any) -> bool:
    """Whether it is text or a list of chat messages."""
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt))


def row_key(row: Row, column: str) -> str:
    """Return a problem's text with white space normalized. Unlike `key`, it differs for `x + 1` and `x - 1`."""
    text = row[column]
    return " ".join((text if isinstance(text, str) else json.dumps(text)).split())


def key(problem: str) -> str:
    """Return a problem's letters and digits, in lower case."""
    return re.sub(r"[\W_]+", "", normalize("NFKC", problem).lower())


def without_overlap(train: Sequence[Row], *tests: Iterable[Row]) -> tuple[list[Row], int]:
    """Return the training rows that are not in any test set, and how many were removed.

    Two problems are the same if their letters and digits are the same: white space, punctuation, case, and LaTeX's
    backslashes and braces are ignored, numbers are not. This removes copies. It does not find paraphrased problems, so
    it does not prove the absence of contamination.
    """
    seen = {k for test in tests for row in test if len(k := key(_problem(row))) >= MIN_LENGTH}
    kept = [row for row in train if key(_problem(row)) not in seen]
    return kept, len(train) - len(kept)


def _problem(row: Row) -> str:
    """Return the problem without its template if there is one, else the prompt."""
    return str(last_message(row.get("problem", row.get("prompt", ""))))


# ── columns ─────────────────────────────────────────────────────────────────────────────────────────────────
def columns(
    problem: str = "problem", answer: str = "answer", keep: Iterable[str] = (), prompt: str | None = None
) -> Read:
    """Return a function that reads these columns. A name may have dots: `reward_model.ground_truth`.

    `keep` names other columns to keep. With `prompt`, that column is used as it is (text or chat messages), and all
    others are kept. With `answer=""`, there are no gold answers.
    """
    gold = {"answer": answer} if answer else {}

    def read(raw: Row) -> Row:
        if prompt:
            return {**raw, "prompt": _cell(raw, prompt), **{ours: _cell(raw, theirs) for ours, theirs in gold.items()}}
        named = {"problem": problem, **gold} | {name: name for name in keep}
        return {ours: last_message(_cell(raw, theirs)) for ours, theirs in named.items()}

    return read


def last_message(value: Any) -> Any:
    """Return the text of the last message of a chat, or any other value unchanged."""
    if isinstance(value, list) and value and isinstance(value[-1], dict) and "content" in value[-1]:
        return value[-1]["content"]
    return value


def _cell(raw: Row, name: str) -> Any:
    value: Any = raw
    for part in [name] if name in raw else name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"no column {name!r}; there are {', '.join(map(str, raw)) or 'none'}")
        value = value[part]
    return value


# ── files, folders, the hub ─────────────────────────────────────────────────────────────────────────────────
def raw_rows(source: str | Path, *, split: str, config: str | None = None) -> RawRows:
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _folder(path, split)
    elif path.name.endswith(SUFFIXES):
        yield from _file(path)
    elif str(source).count("/") == 1 and not str(source).startswith((".", "/", "~")) and not path.exists():
        yield from _hub(str(source), split, config)
    else:
        what = f"{source}: neither a folder, nor a file ({', '.join(SUFFIXES)}), nor a hub data set (owner/name)."
        raise ConfigError(what)


def first_columns(source: str, split: str = "train") -> set[str]:
    """Return the columns of the first row of a local file or folder."""
    path = Path(source).expanduser()
    try:
        if path.is_dir() and not split_files(path, split):
            split = "test"
        return set(next((row for _, row in raw_rows(path, split=split) if isinstance(row, dict)), {}))
    except (ConfigError, OSError):  # no such file, or damaged: reported when the rows are read
        return set()


def split_files(folder: Path, split: str) -> list[Path]:
    """Return the files of one split: `train.jsonl`, `data/train-00000-of-00002.parquet`.

    If all files have the same format and none is named like a test split (`mine_test.jsonl`), all are training files.
    """
    for place, suffix in product((folder, folder / "data"), SUFFIXES):
        if files := sorted([*place.glob(f"{split}{suffix}"), *place.glob(f"{split}-*{suffix}")]):
            return files
    kinds = [sorted([*folder.glob(f"*{suffix}"), *(folder / "data").glob(f"*{suffix}")]) for suffix in SUFFIXES]
    found = [files for files in kinds if files]
    if split != "train" or len(found) != 1 or any(NOT_TRAIN.search(file.name) for file in found[0]):
        return []
    return found[0]


def _folder(folder: Path, split: str) -> RawRows:
    if files := split_files(folder, split):
        for file in files:
            yield from _file(file)
        return
    found = sorted(file.name for file in folder.iterdir())
    what = f"{folder}: no {split} split; it has {', '.join(found[:10]) or 'no files'}."
    raise ConfigError(Problem(what, remedy=f"Expected {split}.jsonl, .jsonl.gz, .json or .parquet."))


def _file(path: Path) -> RawRows:
    if not is_plain(path):
        raise ConfigError(f"{path}: a pipe or a device, not a regular file.")
    parquet = path.name.endswith(".parquet")
    try:
        if parquet:
            from pyarrow.parquet import ParquetFile

            batches = ParquetFile(path).iter_batches()
            yield from _numbered(path.name, (raw for batch in batches for raw in batch.to_pylist()))
            return
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            yield from _lines(path, file) if ".jsonl" in path.name else _json(path, file)
    except ConfigError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(unreadable(path, error)) from None
    except (ValueError, RecursionError) as error:  # pyarrow.ArrowInvalid is a ValueError
        remedy = "" if parquet else f"If it has one object per line, name it {path.stem}.jsonl."
        kind = "a Parquet file" if parquet else "JSON"
        raise ConfigError(Problem(f"{path}: not {kind} ({error}).", remedy=remedy)) from None


def _lines(path: Path, file: Any) -> RawRows:
    for number, line in enumerate(iter(lambda: _limited(path, file.readline(MAX_BYTES + 1)), b""), start=1):
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if text.strip():
            try:
                yield f"{path.name}:{number}", json.loads(text)
            except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
                yield f"{path.name}:{number}", ValueError(f"not JSON ({error})")


def _json(path: Path, file: Any) -> RawRows:
    value = json.loads(_limited(path, file.read(MAX_BYTES + 1)))
    if not isinstance(value, list):
        raise ConfigError(f"{path}: a {type(value).__name__}, not a list of rows.")
    return _numbered(path.name, value)


def _limited(path: Path, content: bytes) -> bytes:
    if len(content) > MAX_BYTES:
        what = f"{path}: more than {MAX_BYTES:,} bytes of JSON at once, decompressed."
        raise ConfigError(Problem(what, remedy="Use JSON Lines, with one row per line."))
    return content


def _hub(name: str, split: str, config: str | None) -> RawRows:
    from datasets import load_dataset

    with loading(f"{split} split of the data set", name):
        data = load_dataset(name, config, split=split)
    yield from _numbered(name, data)


def _numbered(name: str, rows: Iterable[Any]) -> RawRows:
    return ((f"{name}[{number}]", raw) for number, raw in enumerate(rows))
