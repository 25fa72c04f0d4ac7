"""Find problems that occur in both training and test data, by comparing their letters and digits.

White space, punctuation, case and LaTeX's backslashes and braces are ignored; numbers are not. Paraphrased problems are
not found: this removes copies, it does not prove the absence of contamination.
"""

import re
from collections.abc import Iterable, Sequence
from unicodedata import normalize

from dew.tasks.base import Row, last_message

MIN_LENGTH = 16
"""Shorter texts (in letters and digits) are too generic to count as the same problem: `1+1=?`."""
_OTHER = re.compile(r"[\W_]+")


def key(problem: str) -> str:
    """A problem's letters and digits, in lower case."""
    return _OTHER.sub("", normalize("NFKC", problem).lower())


def identity(problem: str) -> str:
    """A problem up to white space. `x + 1` and `x - 1` have the same key, but different identities."""
    return " ".join(problem.split())


def overlap(train: Iterable[Row], test: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Pairs (training row, test row) with the same problem."""
    tests = {k: row for row in test if len(k := key(_problem(row))) >= MIN_LENGTH}
    return [(row, tests[k]) for row in train if (k := key(_problem(row))) in tests]


def without_overlap(train: Sequence[Row], *tests: Iterable[Row]) -> tuple[list[Row], int]:
    """(the training rows that occur in none of the test sets, how many were removed)."""
    seen = {k for test in tests for row in test if len(k := key(_problem(row))) >= MIN_LENGTH}
    kept = [row for row in train if key(_problem(row)) not in seen]
    return kept, len(train) - len(kept)


def _problem(row: Row) -> str:
    """The problem without its template, if the row has both."""
    return str(last_message(row.get("problem", row.get("prompt", ""))))
