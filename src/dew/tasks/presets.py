"""The data sets of the field by name, and any other by path, as tasks.

    task("gsm8k")     task("dapo17k", template="qwen-boxed", without=["math500", "amc23"])
    task("problems.parquet", problem="question", answer="gold")

A named set is looked for at `path`, then under the folder DEW_DATA (`gsm8k/train.jsonl.gz`), then on the hub.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dew.errors import ConfigError
from dew.tasks.base import Row, Split, check_split, split_of
from dew.tasks.files import ENDINGS, Read, Table, cell, columns, log, read_table, split_files
from dew.tasks.overlap import identity, without_overlap
from dew.tasks.templates import render

# What the sets look like: a local copy (problem, answer) or the hub's own columns


def _first(raw: Row, *names: str) -> Any:
    """The first of these columns that is there."""
    for name in names:
        if raw.get(name) is not None:
            return cell(raw, name)
    raise ValueError(f"none of the columns {', '.join(names)}; there are {', '.join(raw) or 'none'}")


def _plain(raw: Row) -> Row:
    return {"problem": _first(raw, "problem", "question", "Problem"), "answer": _first(raw, "answer", "Answer")}


def _gsm8k(raw: Row) -> Row:
    """On the hub the answer is the worked solution, which ends in `#### 72`."""
    answer = str(_first(raw, "answer")).rpartition("####")[2]
    return {"problem": _first(raw, "problem", "question"), "answer": answer.strip().replace(",", "")}


def _math(raw: Row) -> Row:
    """On the hub there is only the worked solution, with the answer in its last box."""
    answer = raw.get("answer") or _last_box(str(_first(raw, "solution")))
    return {"problem": _first(raw, "problem"), "answer": answer}


def _dapo(raw: Row) -> Row:
    return {"problem": _first(raw, "problem", "prompt"), "answer": _first(raw, "answer", "solution")}


def _tinyzero(raw: Row) -> Row:
    numbers, target = [int(n) for n in _first(raw, "numbers", "nums")], _first(raw, "target", "answer")
    problem = raw.get("problem") or (
        f"Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic "
        "operations (+, -, *, /) and each number can only be used once."
    )
    return {"problem": problem, "answer": str(target), "numbers": numbers}


def _last_box(solution: str) -> str:
    start = max(solution.rfind(r"\boxed{"), solution.rfind(r"\fbox{"))
    if start < 0:
        raise ValueError("no box in the solution, so no answer")
    depth = 0
    for brace in re.compile(r"[{}]").finditer(solution, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return solution[solution.index("{", start) + 1 : brace.start()]
    raise ValueError("the solution's last box is never closed")


# Named sets


@dataclass(frozen=True)
class Preset:
    """Where a set lies, what its rows look like, and what it may be used for."""

    hub: str
    read: Read
    train: str | None = "train"
    """Its training split; None: the set is for evaluation only."""
    held_out: str | None = "test"
    """Its test split; None: an eighth of the training problems, chosen by a hash of the problem."""
    tested_on: str | None = None
    """Another set, whose problems are held out instead; they are left out of training."""
    hub_splits: tuple[str | None, str | None] | None = None
    """The hub's names of the two, where they differ."""
    config: str | None = None
    folder: str | None = None
    """The local folder, if it is not called like the set."""
    template: str = "chat"


_TEST_ONLY: dict[str, Any] = {"train": None}
PRESETS: dict[str, Preset] = {
    "gsm8k": Preset("openai/gsm8k", _gsm8k, config="main"),
    "math": Preset("DigitalLearningGmbH/MATH-lighteval", _math),
    "math500": Preset("HuggingFaceH4/MATH-500", _plain, **_TEST_ONLY),
    "aime24": Preset("HuggingFaceH4/aime_2024", _plain, hub_splits=(None, "train"), **_TEST_ONLY),
    "aime25": Preset("math-ai/aime25", _plain, **_TEST_ONLY),
    "amc23": Preset("math-ai/amc23", _plain, **_TEST_ONLY),
    "dapo17k": Preset("open-r1/DAPO-Math-17k-Processed", _dapo, tested_on="math500", config="all"),
    "countdown-tinyzero": Preset(
        "Jiayi-Pan/Countdown-Tasks-3to4", _tinyzero, hub_splits=("train", None), folder="countdown", template="r1"
    ),
}


class _Rows:
    """What the two kinds of data set share: split, overlap filter, shuffle, template."""

    name: str
    template: str | None
    without: Sequence[str]

    def table(self, split: Split) -> Table:
        """The rows of a split, before filter and template, with a count of those left out."""
        raise NotImplementedError

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """n problems, or all if there are fewer, in an order that depends on the seed and on nothing else."""
        rows = self.table(check_split(split)).rows
        if split == "train" and self.without:
            rows, dropped = without_overlap(rows, *(tests(name) for name in self.without))
            log.info("%s: %d problems of %s left out of training", self.name, dropped, ", ".join(self.without))
        rows = sorted(rows, key=lambda row: _place(row, seed))[: max(0, n)]
        return [{"prompt": render(self.template or "chat", row["problem"]), **row} for row in rows]


def _part(table: Table, split: Split) -> Table:
    """The seven eighths or the eighth of a table that has no test split."""
    rows = [row for row in table.rows if split_of(identity(row["problem"])) == split]
    return Table(table.name, rows, table.bad, table.repeated)


def _place(row: Row, seed: int) -> bytes:
    """Where a problem stands in the shuffle: a hash, so that a row more or less moves no other row."""
    return blake2b(f"{seed}:{identity(row['problem'])}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def tests(name: str) -> list[Row]:
    """The problems that a set keeps for testing; of a file, all of them (its columns `problem` and `answer`)."""
    if name in PRESETS:
        return NamedSet(name).table("held_out").rows
    return read_table(name, columns(), name=name).rows


@dataclass(frozen=True)
class NamedSet(_Rows):
    """One of the sets above."""

    name: str
    path: str | None = None
    """A folder or file of one's own, instead of DEW_DATA and the hub."""
    template: str | None = None
    """How problems are put to the model; None: the set's own template."""
    without: Sequence[str] = field(default=())
    """Sets or files whose test problems are left out of training."""
    held_out: str | None = None
    """Another set whose problems are held out; None: the set's own test problems."""

    def __post_init__(self) -> None:
        preset = PRESETS[self.name]
        tested_on = self.held_out or preset.tested_on
        object.__setattr__(self, "held_out", tested_on)
        object.__setattr__(self, "template", self.template or preset.template)
        object.__setattr__(self, "without", tuple(dict.fromkeys([*self.without, *([tested_on] if tested_on else [])])))
        render(self.template or "", "")

    def table(self, split: Split) -> Table:
        preset, place = PRESETS[self.name], self._place()
        if split == "train" and preset.train is None:
            raise ConfigError(f"{self.name} is for evaluation only: it has no training problems.")
        if split == "held_out" and self.held_out:
            return NamedSet(self.held_out).table("held_out")
        splits = preset.hub_splits if place == preset.hub else None
        train, test = splits or (preset.train, preset.held_out)
        if test or preset.tested_on:
            return self._read(place, (train if split == "train" else test) or "")
        return _part(self._read(place, train or ""), split)

    def _read(self, place: str | Path, split: str) -> Table:
        preset = PRESETS[self.name]
        return read_table(place, preset.read, split=split, config=preset.config, name=f"{self.name}/{split}")

    def _place(self) -> str | Path:
        preset = PRESETS[self.name]
        if self.path:
            return self.path
        root = os.environ.get("DEW_DATA")
        folder = Path(root).expanduser() / (preset.folder or self.name) if root else None
        known = {split for split in (preset.train, preset.held_out) if split}
        if folder and any(split_files(folder, split) for split in known):
            return folder
        return preset.hub


# Sets of one's own


@dataclass(frozen=True)
class OwnSet(_Rows):
    """A file, a folder or a hub data set, with its columns named."""

    path: str
    problem: str = "problem"
    """The column with the problem; a dot leads inside: `extra.question`."""
    answer: str = "answer"
    """The column with the gold answer."""
    keep: Sequence[str] = field(default=())
    """Further columns that rewards need."""
    train: str = "train"
    held_out: str | None = None
    """The test split of a folder or hub set; None: an eighth of the training problems."""
    config: str | None = None
    template: str | None = "chat"
    without: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "without", tuple(self.without))
        object.__setattr__(self, "keep", tuple(self.keep))
        render(self.template or "chat", "")

    @property
    def name(self) -> str:  # type: ignore[override]
        name = Path(self.path).name
        return next((name.removesuffix(end) for end in ENDINGS if name.endswith(end)), name)

    def table(self, split: Split) -> Table:
        read = columns(self.problem, self.answer, self.keep)
        wanted = self.held_out if split == "held_out" and self.held_out else self.train
        table = read_table(self.path, read, split=wanted, config=self.config, name=self.name)
        return table if self.held_out else _part(table, split)
