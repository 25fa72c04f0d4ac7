"""Does the reward that decides accept the gold answers? Every row whose gold it cannot accept teaches only noise."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dew.engines.trl.recording import gold_of
from dew.errors import DewError
from dew.preflight.check import Check, failed, ok, warning
from dew.preflight.data import Data
from dew.preflight.probe import Row, score, writings
from dew.rewards import Verifier

TOLERATED = 0.01
"""Up to this share of bad golds is a warning; more is a failure."""
SHOWN = 3

Finding = str
"""correct, wrong, unparsable, timeout, raised, or none where there is no gold."""
WORST_LAST = ("correct", "wrong", "timeout", "unparsable", "raised", "none")


@dataclass(frozen=True)
class Golds:
    findings: list[Finding]
    """One per row: the best that any writing of its gold came to."""
    texts: list[str]
    """One per row: the writing that was accepted, or the first."""


def judge(outcome: Any, data: Data, threshold: float) -> Golds:
    """Try the writings of each gold in turn, until one is accepted."""
    tries = [writings(row) for row in data.rows]
    findings: list[Finding] = ["none"] * len(data.rows)
    texts = [t[0] if t else "" for t in tries]
    for turn in range(max(map(len, tries), default=0)):
        open_rows = [i for i, t in enumerate(tries) if findings[i] != "correct" and turn < len(t)]
        if not open_rows:
            break
        found = _findings(
            outcome, [tries[i][turn] for i in open_rows], [data.rows[i] for i in open_rows], data, threshold
        )
        for i, finding in zip(open_rows, found, strict=True):
            findings[i] = min(findings[i], finding, key=WORST_LAST.index)
            if finding == "correct":
                texts[i] = tries[i][turn]
    return Golds(findings, texts)


def _findings(outcome: Any, texts: list[str], rows: Sequence[Row], data: Data, threshold: float) -> list[Finding]:
    try:
        if isinstance(outcome, Verifier):
            return [verdict.status for verdict in outcome.verdicts(texts, rows)]
        values = score(outcome, texts, rows, data)
    except Exception as error:  # one row that it cannot bear: find out which
        if isinstance(error, DewError) and len(texts) == 1 and not isinstance(error.__cause__, Exception):
            raise
        if len(texts) == 1:
            return ["raised"]
        half = len(texts) // 2
        return _findings(outcome, texts[:half], rows[:half], data, threshold) + _findings(
            outcome, texts[half:], rows[half:], data, threshold
        )
    return ["unparsable" if v is None else "correct" if v > threshold else "wrong" for v in values]


def check(golds: Golds, data: Data, name: str, *, ours: bool) -> Check:
    """`ours`: the reward is a verifier of dew's, which accepts one of the writings if it accepts the gold at all."""
    counts = Counter(golds.findings)
    n, good = len(data.rows), counts["correct"]
    bad = [i for i, finding in enumerate(golds.findings) if finding not in ("correct", "none")]
    facts = {"rows": n, **counts, "rows_not_accepted": bad[:100]}
    if counts["none"] == n:
        remedy = "Nothing to do if the reward needs none; else name the column answer, gold or solution."
        return warning("gold", "The rows have no gold answer that could be tried.", remedy, **facts)
    if not bad:
        return ok("gold", f"{name} accepts all {good} gold answers.", **facts)
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in WORST_LAST[1:] if counts[kind])
    examples = "; ".join(f"row {i}: {gold_of(data.rows[i])!r:.40}" for i in bad[:SHOWN])
    says = f"{name} does not accept {len(bad)} of {n} gold answers ({kinds}), e.g. {examples}."
    if not good and not ours and counts["raised"] == 0:
        remedy = "Call it on an answer that must be right: here no usual way of writing the gold earned anything."
        return warning("gold", says, remedy, **facts)
    remedy = "Correct those rows or leave them out: no answer to them can earn anything."
    return (warning if len(bad) <= TOLERATED * n else failed)("gold", says, remedy, **facts)
