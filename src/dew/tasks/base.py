"""The task interface: a source of problems, split once and for all into training and held-out problems."""

from collections.abc import Callable, Hashable
from hashlib import blake2b
from random import Random
from typing import Any, Literal, Protocol

from dew.errors import ConfigError, Problem

Row = dict[str, Any]
"""One problem: `prompt`, gold `answer`, further gold columns, a worked `solution` if known."""
Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 1 / 8
MAX_MISSES = 20_000
"""Stop generating after this many draws in a row without a new problem."""


class Task(Protocol):
    """Problems with gold answers. The verifier of the same name (`dew.rewards.verifier`) scores answers."""

    @property
    def name(self) -> str: ...

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """n distinct problems, determined by the arguments; fewer rows are a prefix of more."""
        ...


def split_of(key: Hashable) -> Split:
    """The split of a problem, by a hash of what identifies it: independent of any seed."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest) < HELD_OUT_SHARE * 2**64 else "train"


def check_split(split: Split) -> Split:
    if split not in ("train", "held_out"):
        raise ConfigError(f"split={split!r}: a task has the splits 'train' and 'held_out'.")
    return split


def distinct(
    draw: Callable[[Random], tuple[Hashable, Row] | None], n: int, *, split: Split, rng: Random, name: str
) -> list[Row]:
    """Call `draw` until it has returned n distinct problems. It returns (identity, row), or None for a miss."""
    check_split(split)
    rows: dict[Hashable, Row] = {}
    misses = 0
    while len(rows) < n and misses < MAX_MISSES:
        before = len(rows)
        if (drawn := draw(rng)) is not None:
            rows.setdefault(*drawn)
        misses = misses + 1 if len(rows) == before else 0
    if len(rows) < n:
        raise ConfigError(
            Problem(
                f"{name}: only {len(rows)} of {n} distinct {split} problems exist or were found with these settings.",
                remedy="Ask for fewer, or make the problems harder.",
            )
        )
    return list(rows.values())


def demonstrations(task: Task, n: int, *, seed: int = 0) -> list[Row]:
    """Training problems with their worked solutions as {prompt, completion}, for supervised fine-tuning."""
    return [{"prompt": row["prompt"], "completion": row["solution"]} for row in task.rows(n, seed=seed)]
