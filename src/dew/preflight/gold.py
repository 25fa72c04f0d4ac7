"""Does the reward that decides accept the gold answers? A row whose gold it refuses can teach only noise."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dew.engines.recording import gold_of
from dew.preflight.check import Check, failed, ok, warning
from dew.preflight.data import Data
from dew.preflight.probe import Row, demonstration, score, writings
from dew.rewards import Verifier

TOLERATED = 0.01
"""Up to this share of bad golds is a warning; more is a failure."""
SHOWN = 3

Finding = str
BEST_FIRST = ("correct", "raised", "wrong", "timeout", "unparsable", "none")
"""What the writings of a gold came to, the one that counts most first; none: the row has no gold."""


@dataclass(frozen=True)
class Golds:
    findings: list[Finding]
    """One per row: the best that any writing of its gold came to."""
    texts: list[str]
    """One per row: the writing that was accepted, or the first."""
    contradicted: list[int]
    """Rows whose worked solution is wrong by their own gold answer."""
    errors: list[str] = field(default_factory=list)
    """What was raised."""


def judge(outcome: Any, data: Data, threshold: float) -> Golds:
    """Try the writings of each gold in turn, the demonstration first, until one is accepted."""
    tries = [writings(row) for row in data.rows]
    golds = Golds(["none"] * len(tries), [t[0] if t else "" for t in tries], [])
    for turn in range(max(map(len, tries), default=0)):
        rows = [i for i, t in enumerate(tries) if golds.findings[i] != "correct" and turn < len(t)]
        texts = [tries[i][turn] for i in rows]
        found = _ask(outcome, texts, [data.rows[i] for i in rows], data, threshold, golds.errors) if rows else []
        for i, text, finding in zip(rows, texts, found, strict=True):
            golds.findings[i] = min(golds.findings[i], finding, key=BEST_FIRST.index)
            if finding == "correct":
                golds.texts[i] = text
            if finding == "wrong" and text == demonstration(data.rows[i]):
                golds.contradicted.append(i)
    return golds


def _ask(
    outcome: Any, texts: list[str], rows: Sequence[Row], data: Data, threshold: float, errors: list[str]
) -> list[Finding]:
    try:
        if isinstance(outcome, Verifier):
            return [verdict.status for verdict in outcome.verdicts(texts, rows)]
        values = score(outcome, texts, rows, data)
    except Exception as error:  # some row that it cannot bear: halve until it is found
        if len(texts) == 1:
            errors.append(f"{type(error).__name__}: {error}")
            return ["raised"]
        half = len(texts) // 2
        first = _ask(outcome, texts[:half], rows[:half], data, threshold, errors)
        return first + _ask(outcome, texts[half:], rows[half:], data, threshold, errors)
    return ["unparsable" if v is None else "correct" if v > threshold else "wrong" for v in values]


def check(golds: Golds, data: Data, name: str, reward: Any) -> Check:
    counts = Counter(golds.findings)
    n, good = len(data.rows), counts["correct"]
    bad = [i for i, finding in enumerate(golds.findings) if finding not in ("correct", "none")]
    facts = {"rows": n, **counts, "not_accepted": bad[:100], "contradicted": golds.contradicted[:100]}
    if counts["none"] == n:
        remedy = "Nothing to do if the reward needs none; else name the column answer, gold or solution."
        return warning("gold", "The rows have no gold answer that could be tried.", remedy, **facts)
    if bad:
        return _not_accepted(golds, counts, bad, data, name, reward, facts)
    if golds.contradicted:
        says = f"{len(golds.contradicted)} of {n} worked solutions are wrong by their own gold answer"
        remedy = "See which of the two is right; training reads the gold answer."
        return warning("gold", f"{says}, e.g. {_examples(golds.contradicted, data)}.", remedy, **facts)
    return ok("gold", f"{name} accepts all {good} gold answers.", **facts)


def _not_accepted(
    golds: Golds, counts: Counter[str], bad: list[int], data: Data, name: str, reward: Any, facts: dict[str, Any]
) -> Check:
    n = len(data.rows)
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in BEST_FIRST[1:-1] if counts[kind])
    says = f"{name} does not accept {len(bad)} of {n} gold answers ({kinds}), e.g. {_examples(bad, data)}."
    if counts["raised"]:
        remedy = f"Correct those rows or leave them out: training would stop there ({golds.errors[0]:.120})."
        return failed("gold", says, remedy, **facts)
    if not counts["correct"] and not _can_write(reward, data):
        remedy = "Call it on an answer that must be right: here no usual way of writing the gold earned anything."
        return warning("gold", says, remedy, **facts)
    remedy = "Correct those rows or leave them out: no answer to them can earn anything."
    return (warning if len(bad) <= TOLERATED * n else failed)("gold", says, remedy, **facts)


def _can_write(reward: Any, data: Data) -> bool:
    """Whether a correct answer is known for certain: a demonstration, or a verifier that reads the gold alone."""
    alone = isinstance(reward, Verifier) and reward.columns == ("answer",)
    return alone or any(demonstration(row) for row in data.rows)


def _examples(rows: list[int], data: Data) -> str:
    return "; ".join(f"row {i}: {gold_of(data.rows[i])!r:.40}" for i in rows[:SHOWN])
