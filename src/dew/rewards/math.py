"""The verifier for mathematics.

    math_verdict("... so the area is $\\boxed{\\frac{\\pi}{2}}$.", "\\pi/2")      True
    math_verdicts(completions, golds)                                            a Verdict each
    math(completions, answer=golds)                                              rewards, as TRL expects them

Plain numbers, words and choices are compared exactly in this process. Everything else is parsed as LaTeX by
math-verify in worker processes, with a limit of `timeout` seconds per answer. An answer that exceeds the limit has the
status `timeout`, not `wrong`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dew.errors import Problem, RewardError
from dew.rewards import normalize
from dew.rewards.extract import MAX_LENGTH, Answer, after_thinking, find_answer, find_gold, too_complex
from dew.rewards.process import Pool
from dew.rewards.verifiers import Completion, Verdict, Verifier, text_of

TIMEOUT = 5.0  # seconds per answer; a typical answer takes about 10 ms
Row = Mapping[str, Any]

workers = Pool("dew.rewards.latex:serve", remedy='Install math-verify: pip install "dew-rl[math]".')
"""The processes that run math-verify. `workers.start()` starts them before the first answer that needs them."""


def math_verdict(completion: Completion | None, gold: str, *, timeout: float = TIMEOUT) -> bool:
    """Whether the final answer equals the gold answer; False after `timeout` seconds."""
    return math_verdicts([completion], [gold], timeout=timeout)[0].correct


def math_verdicts(
    completions: Sequence[Completion | None], golds: Sequence[Any], *, timeout: float = TIMEOUT
) -> list[Verdict]:
    """Return one verdict per completion and gold answer. They are checked in parallel."""
    if len(completions) != len(golds):
        problem = f"math: {len(completions)} answers for {len(golds)} gold answers."
        raise RewardError(Problem(problem, remedy="Pass one gold answer per answer."))
    texts = list(map(_gold_text, golds))
    found = [verdict_or_answer(text_of(c or ""), gold) for c, gold in zip(completions, texts, strict=True)]
    open_ones = [(i, answer) for i, answer in enumerate(found) if isinstance(answer, Answer)]
    requests = [{"answer": answer.text, "marked": answer.marked, "gold": texts[i]} for i, answer in open_ones]
    for (i, answer), (status, extracted) in zip(open_ones, workers.ask_all(requests, timeout), strict=True):
        found[i] = Verdict(status, extracted or (answer.text[:500] if answer.marked else None))
    return [verdict for verdict in found if isinstance(verdict, Verdict)]


def _gold_text(gold: Any) -> str:
    """Return a gold answer as text: of a list, its elements; of None, nothing."""
    parts = gold if isinstance(gold, list | tuple) else [gold]
    return ", ".join(str(part) for part in parts if part is not None)


def verdict_or_answer(text: str, gold: str) -> Verdict | Answer:
    """Return the verdict if no parser is needed, else the extracted answer."""
    answer, target = find_answer(text), find_gold(gold)
    if target and (choice := normalize.gold_choice(target.text)):
        marked = answer is not None and answer.marked
        claim = answer.text if answer and marked else after_thinking(text)[-MAX_LENGTH:]
        chosen = normalize.final_choice(claim, marked=marked)
        if chosen or not marked:
            return Verdict("unparsable" if not chosen else "correct" if chosen == choice else "wrong", chosen)
    if answer is None or target is None or len(answer.text) > MAX_LENGTH:
        return Verdict("unparsable", answer.text[:500] if answer else None)
    if answer.marked and target.marked:
        b = normalize.read_number(target.text)
        a = normalize.read_number(answer.text) or (normalize.read_other_number(answer.text) if b else None)
        same = normalize.same_number(a, b) if a and b else normalize.same_base(answer.text, target.text)
        same = same if (times := normalize.same_time(answer.text, target.text)) is None else times
        if same is not None:
            return Verdict("correct" if same else "wrong", normalize.write_number(a[0]) if a else answer.text)
    if answer.marked and too_complex(answer.text):  # not parsed, but it may repeat the gold answer verbatim
        same = answer.text.split() == target.text.split()
        return Verdict("correct" if same else "unparsable", answer.text[:500])
    wanted, said = normalize.words(target.text), normalize.words(answer.text)
    if wanted and wanted in (said, normalize.words(after_thinking(text)[-MAX_LENGTH:])):
        return Verdict("correct", wanted)
    one_word = wanted and said and wanted.isalpha() and answer.marked
    return Verdict("wrong", said) if one_word else answer  # to the parser, letters are factors: seat equals east


@dataclass(frozen=True)
class MathVerifier(Verifier):
    """The verifier for mathematics, which checks a batch in parallel."""

    timeout: float = TIMEOUT

    def verdicts(self, completions: Sequence[Completion], rows: Sequence[Row]) -> list[Verdict]:
        return math_verdicts(completions, [self._cell(row, "answer") for row in rows], timeout=self.timeout)


def usable_rows(rows: Sequence[Row], *, timeout: float = TIMEOUT) -> tuple[list[Row], list[Row]]:
    """Return (usable rows, other rows). A row is usable if its boxed gold answer is verified as correct."""
    golds = [_gold_text(row["answer"]) for row in rows]
    verdicts = math_verdicts([rf"\boxed{{{gold}}}" for gold in golds], golds, timeout=timeout)
    checked = list(zip(rows, verdicts, strict=True))
    return [row for row, v in checked if v.correct], [row for row, v in checked if not v.correct]


def _check(text: str, *, answer: str) -> Verdict:
    return math_verdicts([text], [answer])[0]


math = MathVerifier("math", ("answer",), _check)  # a lambda could not be pickled
