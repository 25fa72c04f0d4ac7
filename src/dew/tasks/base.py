"""The task interface: a source of problems, with a fixed split into training and held-out problems.

Two problems are the same if their letters and digits are: white space, punctuation, case and LaTeX's backslashes and
braces are ignored, numbers are not. Paraphrased problems are not found: `without_overlap` removes copies, it does not
prove the absence of contamination.
"""

import re
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Literal, Protocol
from unicodedata import normalize

from dew.errors import ConfigError

Row = dict[str, Any]
"""One problem: `prompt`, gold `answer`, further gold columns, a worked `solution` if known."""
Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 1 / 8
MIN_LENGTH = 16
"""Shorter texts (in letters and digits) are too generic to count as the same problem: `1+1=?`."""


class Task(Protocol):
    """Problems with gold answers. The verifier of the same name (`dew.rewards.verifier`) scores answers."""

    @property
    def name(self) -> str: ...

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """n distinct problems, determined by the arguments; fewer rows are a prefix of more."""
        ...


def last_message(value: Any) -> Any:
    """The text of the last message of a chat; any other value unchanged."""
    if isinstance(value, list) and value and isinstance(value[-1], dict) and "content" in value[-1]:
        return value[-1]["content"]
    return value


def split_of(key: Hashable) -> Split:
    """The split of a problem, by a hash of what identifies it: independent of any seed."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest) < HELD_OUT_SHARE * 2**64 else "train"


def check_split(split: Split) -> Split:
    if split not in ("train", "held_out"):
        raise ConfigError(f"split={split!r}: a task has the splits 'train' and 'held_out'.")
    return split


def key(problem: str) -> str:
    """A problem's letters and digits, in lower case."""
    return re.sub(r"[\W_]+", "", normalize("NFKC", problem).lower())


def without_overlap(train: Sequence[Row], *tests: Iterable[Row]) -> tuple[list[Row], int]:
    """(the training rows that occur in none of the test sets, how many were removed)."""
    seen = {k for test in tests for row in test if len(k := key(_problem(row))) >= MIN_LENGTH}
    kept = [row for row in train if key(_problem(row)) not in seen]
    return kept, len(train) - len(kept)


def _problem(row: Row) -> str:
    """The problem without its template, if the row has both."""
    return str(last_message(row.get("problem", row.get("prompt", ""))))
