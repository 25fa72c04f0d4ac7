"""`Verdict` (the result of checking one answer), `Verifier` (a reward function with verdicts), and format rewards."""

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

from dew.errors import ConfigError, Problem, RewardError, unknown
from dew.rewards.extract import after_thinking, last_boxed
from dew.rewards.worker import answer_requests, encode

Status = Literal["correct", "wrong", "unparsable", "timeout"]
Completion = str | Sequence[Mapping[str, Any]]
"""An answer as TRL passes it: text, or the messages of one assistant turn."""

VERIFIERS = {
    "countdown": "dew.rewards.games:countdown",
    "sums": "dew.rewards.games:sums",
    "equation": "dew.rewards.games:equation",
    "countdown-tinyzero": "dew.rewards.games:equation",
    **dict.fromkeys(("math", "gsm8k", "math500", "aime24", "aime25", "amc23", "dapo17k"), "dew.rewards.math:math"),
}
"""Name -> module:attribute, imported on first use. A built-in task and its verifier have the same name."""
FORMATS = {name: f"dew.rewards.verifiers:{name}" for name in ("think_format", "think_answer_format", "boxed_format")}


def has_verifier(name: str | None) -> bool:
    """Whether there is a verifier (or a task with a verifier) of this name."""
    return name is not None and (name in VERIFIERS or name.startswith("reasoning_gym:"))


def verifier(name: str) -> "Verifier":
    if name not in VERIFIERS and has_verifier(name):
        return resolve_name("dew.rewards.games:gym_verifier")(name)
    return _find("verifier", name, VERIFIERS, "Your own function goes into reward_funcs.")


def reward(name: str, of_engine: Mapping[str, str] | None = None) -> Callable[..., list[float]]:
    """Return the reward function of this name: a verifier, a format reward, or one of the engine's own."""
    known = {**(of_engine or {}), **VERIFIERS, **FORMATS}
    return _find("reward", name, known, "Or name your own: module:function, file.py:function.")


def serve(channel: socket.socket, name: str) -> None:
    """Entry point of a separate process: reply to lists of texts and rows with their rewards."""
    judge = verifier(name)
    channel.sendall(encode({}))
    answer_requests(channel, lambda x: [verdict.reward for verdict in judge.verdicts(x["texts"], x["rows"])])


def _find(kind: str, name: str, known: Mapping[str, str], also: str = "") -> Any:
    if name not in known:
        raise ConfigError(unknown(f"No {kind} is called {name!r}.", name, known, also))
    return resolve_name(known[name])


@dataclass(frozen=True)
class Verdict:
    """The result for one answer. `unparsable` and `timeout` are distinguished from `wrong`."""

    status: Status
    extracted: str | None = None
    """The answer found in the text, or None. Equal answers are equal strings."""
    value: float | None = None
    """Value of a reward function or a graded scorer; None: the reward is 1 if correct, else 0."""

    @property
    def correct(self) -> bool:
        return self.status == "correct"

    @property
    def reward(self) -> float:
        """`value` if there is one, else 1 for a correct answer and 0 otherwise."""
        return float(self.correct) if self.value is None else self.value


@dataclass(frozen=True)
class Verifier:
    """Checks answers against the gold columns of their rows.

    It can be called as a reward function of TRL: `verifier(completions, **columns) -> list[float]`.
    """

    name: str
    columns: tuple[str, ...]
    """The columns of a row that `check` needs."""
    check: Callable[..., Verdict]
    """`check(text, **columns) -> Verdict` for one answer."""

    @property
    def __name__(self) -> str:  # the name under which TRL logs the reward
        return self.name

    def verdicts(self, completions: Sequence[Completion], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """Return one verdict per completion; `rows[i]` is the problem that `completions[i]` answers."""
        if len(completions) != len(rows):
            problem = f"{self.name}: {len(completions)} answers for {len(rows)} rows."
            raise RewardError(Problem(problem, remedy="Pass one row per answer; repeat a row for each of its answers."))
        return [self._verdict(completion, row) for completion, row in zip(completions, rows, strict=True)]

    def _verdict(self, completion: Completion, row: Mapping[str, Any]) -> Verdict:
        cells = {c: self._cell(row, c) for c in self.columns}
        try:
            return self.check(text_of(completion), **cells)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            given = ", ".join(f"{name}={value!r:.60}" for name, value in cells.items())
            problem = f"{self.name}: cannot check an answer against {given} ({error})."
            raise RewardError(Problem(problem, remedy="docs/rewards.md describes these columns.")) from None

    def _cell(self, row: Mapping[str, Any], column: str) -> Any:
        if column not in row:
            problem = f"{self.name}: the data has no column {column!r}; it has {', '.join(sorted(row))}."
            remedy = f"This verifier reads {', '.join(self.columns)}: rename or add the column."
            raise RewardError(Problem(problem, remedy=remedy))
        return row[column]

    def __call__(
        self, completions: Sequence[Completion], log_extra: Any = None, log_metric: Any = None, **columns: Any
    ) -> list[float]:
        """Return the rewards, with TRL's signature, and log verdicts (`log_extra`) and their shares (`log_metric`)."""
        gold = [self._cell(columns, c) for c in self.columns]
        rows = [dict(zip(self.columns, cells, strict=True)) for cells in zip(*gold, strict=True)]
        verdicts = self.verdicts(completions, rows if gold else [{} for _ in completions])
        statuses = [verdict.status for verdict in verdicts]
        if log_extra:
            log_extra(f"{self.name}/verdict", statuses)
            log_extra(f"{self.name}/extracted", [verdict.extracted for verdict in verdicts])
        if log_metric and statuses:
            log_metric("verifier/failed_share", statuses.count("timeout") / len(statuses))
            log_metric("verifier/unparsable_share", statuses.count("unparsable") / len(statuses))
        return [verdict.reward for verdict in verdicts]


def text_of(completion: Completion) -> str:
    """Return the text of an answer, or of its last message."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


# ── format rewards, in addition to correctness ──────────────────────────────────────────────────────────────
def think_format(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 for `<think>...</think>` at the start, exactly once, followed by text."""
    return [float(_thinks_first(text_of(c))) for c in completions]


def think_answer_format(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 for `<think>...</think><answer>...</answer>` and nothing else, as in DeepSeek-R1."""
    return [float(_thinks_first(text_of(c)) and _one_answer(text_of(c))) for c in completions]


def boxed_format(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 if the last box after the thinking is closed and not empty."""
    return [float(bool(last_boxed(after_thinking(text_of(c))))) for c in completions]


def _thinks_first(text: str) -> bool:
    text = text.strip()
    once = text.count("<think>") == text.count("</think>") == 1
    return once and text.startswith("<think>") and bool(after_thinking(text).strip())


def _one_answer(text: str) -> bool:
    rest = after_thinking(text).strip()
    once = rest.count("<answer>") == rest.count("</answer>") == 1
    return once and bool(re.fullmatch(r"<answer>.*\S.*</answer>", rest, re.DOTALL))
