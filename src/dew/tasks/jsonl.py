"""Problems from a JSONL file: one object a line, with a prompt and a gold answer."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from dew.errors import ConfigError
from dew.tasks.base import Row, Split, check_split, split_of


def read_jsonl(path: str | Path, *, prompt: str = "prompt", answer: str = "answer") -> list[Row]:
    """Every row of the file, in order. The named columns become `prompt` and `answer`; the rest is kept."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({reason}). Give the path of a JSONL file.") from None
    rows = [_row(line, f"{path}:{i}", prompt, answer) for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"{path}: no rows. Each line holds one problem: {{'prompt': ..., 'answer': ...}}.")
    return rows


def _row(line: str, where: str, prompt: str, answer: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        at = f"{error.msg}, character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ConfigError(f"{where}: not JSON ({at}). One JSON object per line, please.") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a {type(row).__name__}, not an object. Write {{'prompt': ..., 'answer': ...}}.")
    for column in (prompt, answer):
        if column not in row:
            raise ConfigError(f"{where}: no column {column!r}; there are {', '.join(row) or 'none'}. Name yours.")
    return {**row, "prompt": row[prompt], "answer": row[answer]}


@dataclass(frozen=True)
class Jsonl:
    """A file as a task. Its rows are split by a hash of the prompt."""

    path: str
    prompt: str = "prompt"
    answer: str = "answer"

    @property
    def name(self) -> str:
        return Path(self.path).stem

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        rows = [
            row
            for row in read_jsonl(self.path, prompt=self.prompt, answer=self.answer)
            if split_of(row["prompt"]) == check_split(split)
        ]
        if len(rows) < n:
            raise ConfigError(f"{self.path}: {len(rows)} {split} rows, {n} asked for. Ask for fewer.")
        Random(seed).shuffle(rows)
        return rows[:n]
