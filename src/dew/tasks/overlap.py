"""Problems that are in the training and in the test data: found by their text, letters and digits alone.

White space, punctuation, case and LaTeX's backslashes and braces do not make another problem. Numbers do.
A problem retold in other words is not found: this removes copies, it does not prove that there is no leak.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from unicodedata import normalize

from dew.tasks.base import Row

SHORTEST = 16
"""Letters and digits below which a text says too little to be called the same problem: `1+1=?`."""


def key(problem: str) -> str:
    """A problem's letters and digits, in lower case: what two copies of it have in common."""
    return _OTHER.sub("", normalize("NFKC", problem).lower())


def identity(problem: str) -> str:
    """A problem up to white space: what makes it this problem. `x + 1` and `x - 1` have one key, not one identity."""
    return " ".join(problem.split())


_OTHER = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class Overlap:
    """Pairs (training row, test row) with the same problem."""

    pairs: list[tuple[Row, Row]]

    def __len__(self) -> int:
        return len({key(_problem(test)) for _, test in self.pairs})

    def __str__(self) -> str:
        rows = f"{len(self.pairs)} training rows have the problem of {len(self)} test rows"
        return "\n".join([rows, *(f"  {_problem(train)[:90]}" for train, _ in self.pairs[:5])])


def overlap(train: Iterable[Row], test: Iterable[Row]) -> Overlap:
    """Which training rows have a problem of the test rows. `len` counts the test problems."""
    tests = {k: row for row in test if len(k := key(_problem(row))) >= SHORTEST}
    return Overlap([(row, tests[k]) for row in train if (k := key(_problem(row))) in tests])


def without_overlap(train: Sequence[Row], *tests: Iterable[Row]) -> tuple[list[Row], int]:
    """(the training rows that are in none of the test sets, how many were left out)."""
    seen = {k for test in tests for row in test if len(k := key(_problem(row))) >= SHORTEST}
    kept = [row for row in train if key(_problem(row)) not in seen]
    return kept, len(train) - len(kept)


def _problem(row: Row) -> str:
    """The problem without its template, where both are there."""
    text = row.get("problem", row.get("prompt", ""))
    return text if isinstance(text, str) else str(text[-1].get("content", "")) if text else ""
