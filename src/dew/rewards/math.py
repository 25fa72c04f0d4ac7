"""Is this answer to a mathematics problem correct?

    math_verdict("... so the area is $\\boxed{\\frac{\\pi}{2}}$.", "\\pi/2")      True
    math_verdicts(completions, golds)                                            a Verdict each
    math(completions, answer=golds)                                              rewards, as TRL asks for them

A plain number is compared exactly, here; words and choices too. The rest is read as LaTeX by math-verify in
processes of pool.py, under `timeout` seconds each. What does not end in time is `timeout`, not `wrong`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from typing import Any, cast

from dew.errors import ConfigError, RewardError
from dew.rewards.answers import LONGEST, Answer, after_thinking, find_answer, find_gold, too_much
from dew.rewards.plain import read_number, same_number, write_number
from dew.rewards.pool import Job, Reply, pool
from dew.rewards.text import chosen, gold_choice, words
from dew.rewards.verdict import Completion, Status, Verdict, Verifier, text_of

TIMEOUT = 5.0
"""Seconds for one verdict. An honest answer takes about a hundredth of one."""
Row = Mapping[str, Any]
PARTS = ("math-verify", "latex2sympy2_extended", "sympy", "antlr4-python3-runtime")


def math_verdict(completion: Completion | None, gold: str, *, timeout: float = TIMEOUT) -> bool:
    """True if the completion's answer is the gold answer. Decided within `timeout`, or False."""
    return math_verdicts([completion], [gold], timeout=timeout)[0].correct


def math_verdicts(
    completions: Sequence[Completion | None], golds: Sequence[Any], *, timeout: float = TIMEOUT
) -> list[Verdict]:
    """One verdict for each completion and the gold answer beside it; several are judged at a time."""
    if len(completions) != len(golds):
        raise RewardError(f"math: {len(completions)} answers for {len(golds)} gold answers. Give every answer its own.")
    if not timeout > 0:
        raise ConfigError(f"timeout={timeout}: seconds for one verdict, more than 0. {TIMEOUT} is the default.")
    verdicts: dict[int, Verdict] = {}
    jobs: dict[int, Job] = {}
    texts = ["" if gold is None else str(gold) for gold in golds]
    for i, (completion, gold) in enumerate(zip(completions, texts, strict=True)):
        decided = _at_once(text_of(completion or ""), gold)
        if isinstance(decided, Verdict):
            verdicts[i] = decided
        else:
            jobs[i] = {"answer": decided.text, "marked": decided.marked, "gold": gold}
    replies = pool().ask_all(list(jobs.values()), timeout) if jobs else []
    for (i, job), reply in zip(jobs.items(), replies, strict=True):
        verdicts[i] = _from_worker(job, reply)
    return [verdicts[i] for i in range(len(completions))]


def _at_once(completion: str, gold: str) -> Verdict | Answer:
    """The verdict, where no parser is needed for it; else the answer that is to be read."""
    answer, target = find_answer(completion), find_gold(gold)
    if target and (choice := gold_choice(target.text)):
        settled = chosen(answer.text if answer and answer.marked else after_thinking(completion)[-LONGEST:])
        if settled:
            return Verdict("correct" if settled == choice else "wrong", settled)
    if answer is None or target is None or len(answer.text) > LONGEST:
        return Verdict("unparsable", answer.text[:500] if answer else None)
    if answer.marked and target.marked:
        a, b = read_number(answer.text), read_number(target.text)
        if a and b:
            return Verdict("correct" if same_number(a, b) else "wrong", write_number(a[0]))
    if answer.marked and too_much(answer.text):  # not to be read, but it may be the gold answer word for word
        same = answer.text.split() == target.text.split()
        return Verdict("correct" if same else "unparsable", answer.text[:500])
    said = words(target.text)
    if said and said in (words(answer.text), words(after_thinking(completion)[-LONGEST:])):
        return Verdict("correct", said)
    return answer


def _from_worker(job: Job, reply: Reply | None) -> Verdict:
    as_text = job["answer"][:500] if job["marked"] else None
    if reply is None:
        return Verdict("timeout", as_text)
    status, extracted = reply
    return Verdict("unparsable" if status == "crashed" else cast(Status, status), extracted or as_text)


@dataclass(frozen=True)
class MathVerifier(Verifier):
    """The verifier for mathematics, and a reward function for TRL that counts what it has seen."""

    timeout: float = TIMEOUT
    _counts: Counter[str] = field(default_factory=Counter, repr=False, compare=False)
    _lock: Any = field(default_factory=Lock, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process (Ray, spawn) it is the same verifier, with counts of its own."""
        return MathVerifier, (self.name, self.columns, self.check, self.timeout)

    def verdicts(self, completions: Sequence[Completion], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        golds = [self._cell(row, "answer") for row in rows]
        verdicts = math_verdicts(completions, golds, timeout=self.timeout)
        with self._lock:
            self._counts.update(verdict.status for verdict in verdicts)
        return verdicts

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> list[float]:
        """TRL's convention. Where TRL hands over `log_metric`, the share of each status is logged with it."""
        golds = self._cell(columns, "answer")
        verdicts = self.verdicts(completions, [{"answer": gold} for gold in golds])
        if verdicts and (log := columns.get("log_metric")):
            for status, n in count(verdict.status for verdict in verdicts).items():
                log(f"verdict/{status}", n / len(verdicts))
        return [verdict.reward for verdict in verdicts]

    def take_counts(self) -> dict[str, int]:
        """How many answers were correct, wrong, unparsable and timed out since this was last asked."""
        with self._lock:
            counts = count(self._counts.elements())
            self._counts.clear()
        return counts


def count(statuses: Iterable[str]) -> dict[str, int]:
    """How many of each status, 0 included."""
    found = Counter(statuses)
    return {status: found[status] for status in ("correct", "wrong", "unparsable", "timeout")}


def check_golds(golds: Sequence[str], *, timeout: float = TIMEOUT) -> list[int]:
    """Which gold answers, written into a box, are not judged correct against themselves: no answer could be.

    A row of this list would teach nothing but noise; leave it out of training, and say so.
    """
    verdicts = math_verdicts([rf"\boxed{{{gold}}}" for gold in golds], golds, timeout=timeout)
    return [i for i, verdict in enumerate(verdicts) if not verdict.correct]


def usable_rows(rows: Sequence[Row], *, timeout: float = TIMEOUT) -> tuple[list[Row], list[Row]]:
    """(rows whose gold answer is judged correct against itself, the others)."""
    bad = set(check_golds([str(row["answer"]) for row in rows], timeout=timeout))
    return [row for i, row in enumerate(rows) if i not in bad], [rows[i] for i in sorted(bad)]


def versions() -> dict[str, str]:
    """The versions of everything that has a say in a verdict; they belong with a run's results."""
    found = {}
    for part in PARTS:
        try:
            found[part] = version(part)
        except PackageNotFoundError:
            found[part] = "not installed"
    return found


def _check(text: str, *, answer: str) -> Verdict:
    return math_verdicts([text], [answer])[0]


math = MathVerifier("math", ("answer",), _check)
