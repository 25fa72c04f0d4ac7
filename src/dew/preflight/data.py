"""The training data: its columns, and whether the outcome reward accepts the gold answers."""

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from dew.engines.recorder import gold_of
from dew.engines.trl.launch import Parsed, data_of, rewards_of
from dew.engines.trl.rewards import checked, missing_columns
from dew.preflight import Check, failed, graded, ok, warning
from dew.rewards import Verifier
from dew.rewards.calls import reward_name
from dew.rewards.verifiers import text_of
from dew.tasks import Row

STREAMED_ROWS = 1000
"""Rows to read from a streamed data set."""
TOLERATED = 0.01
"""Share of gold answers that may be rejected before the check fails; fewer are a warning."""
BEST_FIRST = ("correct", "raised", "wrong", "timeout", "unparsable", "none")
"""Results of a gold answer. Of several formats the first in this list counts; none: the row has no gold answer."""


@dataclass(frozen=True)
class Data:
    rows: list[Row]
    rewards: list[Any]

    @property
    def names(self) -> list[str]:
        """Names of the rewards, as TRL calls them."""
        return [reward_name(reward) for reward in self.rewards]


def read_data(parsed: Parsed) -> Data:
    train, _ = data_of(parsed)
    if not hasattr(train, "__len__") or len(train):
        parsed.args.batches.check_rows(train)
    return Data(rows_of(train), rewards_of(parsed))


def rows_of(train: Any) -> list[Row]:
    """All rows, or the first ones of a streamed data set."""
    return [dict(row) for row in islice(train, None if hasattr(train, "__len__") else STREAMED_ROWS)]


def check_columns(data: Data) -> Check:
    """Whether the data has the columns that the trainer and the rewards read."""
    if not data.rows:
        return failed("columns", "The training data has no rows.", "Choose a split that has rows.")
    columns = list(data.rows[0])
    facts = {"rows": len(data.rows), "columns": columns}
    if missing := missing_columns(columns, data.rewards):
        remedy = "For a JSONL file, task_settings {prompt: ..., answer: ...} names the columns."
        return failed("columns", " ".join(missing), remedy, **facts)
    if empty := sum(not row["prompt"] for row in data.rows):
        return warning("columns", f"{empty} of {len(data.rows)} prompts are empty.", "Remove those rows.", **facts)
    return ok("columns", f"{len(data.rows)} rows with {', '.join(columns)}.", **facts)


def demonstration(row: Row) -> str | None:
    """A worked solution, if the row has one besides its gold answer."""
    gold = gold_of(row)
    worked = [text_of(row[key]) for key in ("solution", "completion") if isinstance(row.get(key), str | list)]
    return next((text for text in worked if text and text != gold), None)


def correct_answers(row: Row) -> list[str]:
    """Its demonstration, then its gold answer in the formats that rewards usually expect."""
    worked, gold = demonstration(row), gold_of(row)
    answers = [worked] if worked else []
    if gold is not None:
        answers += [gold, f"\\boxed{{{gold}}}", f"{gold}+0={gold}", f"<answer>{gold}</answer>", f"#### {gold}"]
        answers.append(f"<think>{worked or gold}</think>\\boxed{{{gold}}}")
        answers.append(f"<think>\n{worked or gold}\n</think>\n<answer>\n{gold}\n</answer>")
    return answers


def score(reward: Any, texts: Sequence[str], rows: Sequence[Row], data: Data) -> np.ndarray:
    """One reward per text, called as the trainer calls it; `rows[i]` is the problem that `texts[i]` answers.

    NaN where the reward returned None.
    """
    columns = {key: [row.get(key) for row in rows] for key in data.rows[0] if key not in ("prompt", "completion")}
    chat = isinstance(data.rows[0]["prompt"], list)
    completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    given = {"prompts": [row["prompt"] for row in rows], "completion_ids": [[] for _ in texts], **columns}
    values = checked(reward)(completions=completions, **given)
    return np.array(asyncio.run(values) if inspect.iscoroutine(values) else values, dtype=float)


def check_golds(data: Data, outcome: int, threshold: float) -> Check:
    """Whether the outcome reward accepts the gold answer of every row, in any of the usual formats."""
    reward, name = data.rewards[outcome], data.names[outcome]
    results, errors = _try_golds(reward, data, threshold)
    counts, n = Counter(results), len(data.rows)
    rejected = [i for i, result in enumerate(results) if result not in ("correct", "none")]
    facts = {"rows": n, **counts, "not_accepted": rejected[:100]}
    if counts["none"] == n:
        remedy = "If the reward needs one, name its column answer, gold or solution."
        return warning("gold", "The rows have no gold answer.", remedy, **facts)
    if rejected:
        kinds = ", ".join(f"{counts[kind]} {kind}" for kind in BEST_FIRST[1:-1] if counts[kind])
        examples = "; ".join(f"row {i}: {gold_of(data.rows[i])!r:.40}" for i in rejected[:3])
        says = f"{name} rejects {len(rejected)} of {n} gold answers ({kinds}), e.g. {examples}."
        if counts["raised"]:
            remedy = f"Correct or remove those rows: training would stop there ({errors[0]:.120})."
            return failed("gold", says, remedy, **facts)
        gold_only = isinstance(reward, Verifier) and reward.columns == ("answer",)
        if not counts["correct"] and not gold_only and not any(map(demonstration, data.rows)):
            remedy = "Call the reward on an answer that you know is correct: it accepts none of the usual formats."
            return warning("gold", says, remedy, **facts)
        remedy = "Correct or remove those rows: no answer to them can be rewarded."
        return graded("gold", says, remedy, warn=True, fail=len(rejected) > TOLERATED * n, **facts)
    return ok("gold", f"{name} accepts all {counts['correct']} gold answers.", **facts)


def _try_golds(reward: Any, data: Data, threshold: float) -> tuple[list[str], list[str]]:
    """(result of each row, exceptions of the reward).

    The correct answers to a row are tried in turn, the demonstration first, until one is accepted.
    """
    tries = [correct_answers(row) for row in data.rows]
    results = ["none"] * len(tries)
    errors: list[str] = []
    for turn in range(max(map(len, tries))):
        left = [i for i, texts in enumerate(tries) if results[i] != "correct" and turn < len(texts)]
        if not left:
            break
        texts, rows = [tries[i][turn] for i in left], [data.rows[i] for i in left]
        for i, result in zip(left, _results(reward, texts, rows, data, threshold, errors), strict=True):
            results[i] = min(results[i], result, key=BEST_FIRST.index)
    return results, errors


def _results(
    reward: Any, texts: list[str], rows: Sequence[Row], data: Data, threshold: float, errors: list[str]
) -> list[str]:
    try:
        if isinstance(reward, Verifier):
            return [verdict.status for verdict in reward.verdicts(texts, rows)]
        values = score(reward, texts, rows, data)
    except Exception as error:  # caused by one of the rows: bisect
        if len(texts) == 1:
            errors.append(f"{type(error).__name__}: {error}")
            return ["raised"]
        half = len(texts) // 2
        first = _results(reward, texts[:half], rows[:half], data, threshold, errors)
        return first + _results(reward, texts[half:], rows[half:], data, threshold, errors)
    return ["unparsable" if math.isnan(v) else "correct" if v > threshold else "wrong" for v in values]
