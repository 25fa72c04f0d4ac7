"""Every reward on texts of known worth: correct answers, nothing at all, and what the model wrote."""

from statistics import fmean
from typing import Any

from dew.preflight.answers import Answers
from dew.preflight.check import Check, failed, ok, skipped, warning
from dew.preflight.data import Data
from dew.preflight.gold import Golds
from dew.preflight.probe import score, writings

PROBED = 32
"""Rows whose gold and empty answers every reward is asked about."""

Values = list[float | None]


def check(
    index: int, outcome: int, data: Data, golds: Golds | None, answers: Answers | None, threshold: float
) -> list[Check]:
    """One reward function."""
    name, reward = f"reward {data.names[index]}", data.rewards[index]
    if not callable(reward) or isinstance(reward, str):
        return [skipped(name, "A reward model is not probed.")]
    rows = data.rows[:PROBED]
    empty = score(reward, [""] * len(rows), rows, data)
    on_gold = _on_gold(reward, data, golds if index == outcome else None)
    on_answers = [row[index] for row in answers.parts] if answers else []
    facts = {"gold": _mean(on_gold), "empty": _mean(empty), "answers": _mean(on_answers) if answers else None}
    says = f"On correct answers {_shown(on_gold)}, on empty ones {_shown(empty)}"
    says += f", on the model's {_shown(on_answers)}." if answers else "."
    if index == outcome:
        return [_outcome(name, says, empty, threshold, facts)]
    return [_other(name, says, _distinct([*on_gold, *empty]), _distinct(on_answers), bool(answers), facts)]


def _on_gold(reward: Any, data: Data, golds: Golds | None) -> Values:
    """On the writing that was accepted, or, for rewards of form, on the writing that earns most."""
    rows = data.rows[:PROBED]
    if golds is not None:
        return score(reward, golds.texts[:PROBED], rows, data)
    tries = [(text, row) for row in rows for text in writings(row)]
    if not tries:
        return []
    values = iter(score(reward, [text for text, _ in tries], [row for _, row in tries], data))
    return [_most([next(values) for _ in writings(row)]) for row in rows if writings(row)]


def _outcome(name: str, says: str, empty: Values, threshold: float, facts: dict[str, Any]) -> Check:
    if any(value is not None and value > threshold for value in empty):
        remedy = "Let it return 0 where there is no answer: else saying nothing is the best policy."
        return failed(name, f"{says} An empty answer counts as correct.", remedy, **facts)
    return ok(name, says, **facts)


def _other(
    name: str, says: str, probes: set[float], answers: set[float], sampled: bool, facts: dict[str, Any]
) -> Check:
    seen = probes | answers
    always = next(iter(seen)) if len(seen) == 1 else None
    if not seen:
        return warning(name, f"{says} It never gave a number.", "Leave it out, or see why it returns None.", **facts)
    if always is not None:
        remedy = "Compare what it asks for with what the prompt asks the model to write, or leave it out."
        return (failed if sampled else warning)(name, f"{says} It is always {always:g}.", remedy, **facts)
    if sampled and len(answers) == 1:
        value = next(iter(answers))
        remedy = "Show the format in the prompt, or leave this reward out: it tells no answer from another."
        return warning(name, f"{says} It is {value:g} for every answer of the model's.", remedy, **facts)
    return ok(name, says, **facts)


def _distinct(values: Values) -> set[float]:
    return {round(value, 6) for value in values if value is not None}


def _most(values: Values) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Values) -> float | None:
    given = [value for value in values if value is not None]
    return fmean(given) if given else None


def _shown(values: Values) -> str:
    mean = _mean(values)
    return "nothing" if mean is None else f"{mean:.2f}"
