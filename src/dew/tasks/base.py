"""What a task is: a source of rows, split once and for all into training and held-out problems."""

from collections.abc import Callable, Hashable
from hashlib import blake2b
from random import Random
from typing import Any, Literal, Protocol

from dew.errors import ConfigError

Row = dict[str, Any]
"""One problem: `prompt`, gold `answer` (both text), more gold columns, a worked `solution` if known."""
Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 1 / 8
PATIENCE = 20_000
"""Draws in a row without a new problem, after which there are taken to be no more."""


class Task(Protocol):
    """Problems with gold answers. The verifier of the same name (`dew.rewards.verifier`) judges answers."""

    @property
    def name(self) -> str: ...

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """n different problems: the same for the same arguments, and the first n of those for a larger n."""
        ...


def split_of(key: Hashable) -> Split:
    """Where a problem belongs, by a hash of what makes it this problem: no seed can move it across."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest) < HELD_OUT_SHARE * 2**64 else "train"


def check_split(split: Split) -> Split:
    if split not in ("train", "held_out"):
        raise ConfigError(f"split={split!r}: a task has the splits 'train' and 'held_out'.")
    return split


def distinct(
    draw: Callable[[Random], tuple[Hashable, Row] | None], n: int, *, split: Split, rng: Random, name: str
) -> list[Row]:
    """Call `draw` until it has given n different problems. It returns (identity, row), or None for a miss."""
    check_split(split)
    rows: dict[Hashable, Row] = {}
    in_vain = 0
    while len(rows) < n and in_vain < PATIENCE:
        before = len(rows)
        if (drawn := draw(rng)) is not None:
            rows.setdefault(*drawn)
        in_vain = in_vain + 1 if len(rows) == before else 0
    if len(rows) < n:
        raise ConfigError(
            f"{name}: only {len(rows)} of {n} different {split} problems exist or could be found at this "
            "difficulty. Ask for fewer, or raise its settings."
        )
    return list(rows.values())


def demonstrations(task: Task, n: int, *, seed: int = 0) -> list[Row]:
    """Training problems with their worked solutions as {prompt, completion}, for supervised training."""
    return [{"prompt": row["prompt"], "completion": row["solution"]} for row in task.rows(n, seed=seed)]
