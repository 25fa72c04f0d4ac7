"""Texts of which it is known what they are worth, and rewards called on them as the trainer calls them."""

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from dew.engines.trl.recording import gold_of
from dew.engines.trl.rewards import checked
from dew.preflight.data import Data
from dew.rewards.verifiers import text_of

Row = dict[str, Any]


def demonstration(row: Row) -> str | None:
    """A worked answer, where the row has one beside its gold answer."""
    gold = gold_of(row)
    worked = [text_of(row[key]) for key in ("solution", "completion") if isinstance(row.get(key), str | list)]
    return next((text for text in worked if text and text != gold), None)


def writings(row: Row) -> list[str]:
    """Ways to write a correct answer: a demonstration where there is one, the gold by itself, the gold dressed up.

    Nobody knows which dress a user's own reward asks for, so the usual ones are tried.
    """
    worked, gold = demonstration(row), gold_of(row)
    if gold is None:
        return [worked] if worked else []
    dressed = [
        gold,
        f"\\boxed{{{gold}}}",
        f"{gold}+0={gold}",
        f"<answer>{gold}</answer>",
        f"<think>{worked or gold}</think>\\boxed{{{gold}}}",
        f"<think>\n{worked or gold}\n</think>\n<answer>\n{gold}\n</answer>",
        f"#### {gold}",
    ]
    return [worked, *dressed] if worked else dressed


def score(reward: Any, texts: Sequence[str], rows: Sequence[Row], data: Data) -> list[float | None]:
    """One value per text; `rows[i]` is the problem that `texts[i]` answers."""
    columns = {key: [row.get(key) for row in rows] for key in data.rows[0] if key not in ("prompt", "completion")}
    completions = [[{"role": "assistant", "content": t}] if data.conversational else t for t in texts]
    values = checked(reward)(
        prompts=[row["prompt"] for row in rows],
        completions=completions,
        completion_ids=[[] for _ in texts],
        **columns,
    )
    return asyncio.run(values) if inspect.iscoroutine(values) else values
