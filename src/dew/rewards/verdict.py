"""What a verifier says about an answer, and the shape that every verifier has."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dew.errors import RewardError

Status = Literal["correct", "wrong", "unparsable", "timeout"]
Completion = str | Sequence[Mapping[str, Any]]
"""An answer as a trainer hands it over: text, or the messages of one assistant turn."""


@dataclass(frozen=True)
class Verdict:
    """One answer, judged. Wrong, unreadable and too slow are three different findings."""

    status: Status
    extracted: str | None = None
    """The answer that was read out of the text; equal answers are equal strings. None if there was none."""

    @property
    def correct(self) -> bool:
        return self.status == "correct"

    @property
    def reward(self) -> float:
        """1 for a correct answer and 0 for every other."""
        return float(self.correct)


@dataclass(frozen=True)
class Verifier:
    """Judges answers against the gold columns of their rows.

    Calling it is the reward function that TRL expects: `verifier(completions, **columns) -> list[float]`.
    """

    name: str
    columns: tuple[str, ...]
    """The columns of a row that `check` reads, by name."""
    check: Callable[..., Verdict]
    """`check(text, **columns) -> Verdict` for one answer."""

    @property
    def __name__(self) -> str:  # what TRL calls the reward in its logs
        return self.name

    def verdicts(self, completions: Sequence[Completion], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """One verdict per answer; `rows[i]` is the problem that `completions[i]` answers."""
        if len(completions) != len(rows):
            raise RewardError(
                f"{self.name}: {len(completions)} answers for {len(rows)} rows. "
                "Give every answer its own row; repeat a row for each of its answers."
            )
        return [self._verdict(completion, row) for completion, row in zip(completions, rows, strict=True)]

    def _verdict(self, completion: Completion, row: Mapping[str, Any]) -> Verdict:
        cells = {c: self._cell(row, c) for c in self.columns}
        try:
            return self.check(text_of(completion), **cells)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            given = ", ".join(f"{name}={value!r:.60}" for name, value in cells.items())
            raise RewardError(
                f"{self.name}: no answer can be judged against {given} ({error}). This verifier reads "
                f"{', '.join(self.columns)}; docs/rewards.md says what they hold."
            ) from None

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> list[float]:
        for c in self.columns:
            self._cell(columns, c)
        rows = [
            dict(zip(self.columns, cells, strict=True))
            for cells in zip(*(columns[c] for c in self.columns), strict=True)
        ]
        return [verdict.reward for verdict in self.verdicts(completions, rows)]

    def _cell(self, row: Mapping[str, Any], column: str) -> Any:
        if column not in row:
            raise RewardError(
                f"{self.name}: the data has no column {column!r}; it has {', '.join(sorted(row))}. "
                f"This verifier reads {', '.join(self.columns)}: rename or add the column."
            )
        return row[column]


def text_of(completion: Completion) -> str:
    """The text of an answer; of several messages, the last one's."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""
