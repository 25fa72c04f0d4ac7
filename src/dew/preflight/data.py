"""The training data: rows, and the columns that rewards read."""

from dataclasses import dataclass
from itertools import islice
from typing import Any

from dew.engines.trl.launch import Parsed, data_of, rewards_of
from dew.engines.trl.rewards import missing_columns, reward_name
from dew.preflight.check import Check, failed, ok, warning
from dew.rewards import Verifier

STREAMED_ROWS = 1000
"""Of a streamed data set, so many rows are looked at."""


@dataclass(frozen=True)
class Data:
    rows: list[dict[str, Any]]
    rewards: list[Any]
    names: list[str]
    """Of the rewards, as TRL calls them."""
    streamed: bool = False

    @property
    def conversational(self) -> bool:
        """Prompts are lists of messages, and so are answers."""
        return bool(self.rows) and isinstance(self.rows[0].get("prompt"), list)


def read(parsed: Parsed) -> tuple[Data, list[Check]]:
    """The data and the rewards, and whether they fit each other."""
    train, _ = data_of(parsed)
    rewards = rewards_of(parsed)
    streamed = not hasattr(train, "__len__")
    data = Data(
        rows=[dict(row) for row in (islice(train, STREAMED_ROWS) if streamed else train)],
        rewards=rewards,
        names=[reward.split("/")[-1] if isinstance(reward, str) else reward_name(reward) for reward in rewards],
        streamed=streamed,
    )
    return data, [check_columns(data, train)]


def check_columns(data: Data, train: Any) -> Check:
    if not data.rows:
        return failed("columns", "The training data have no rows.", "Name a split that has some.")
    columns = list(data.rows[0])
    problems = missing_columns(train, data.rewards)
    problems += [
        f"verifier {reward.name!r} reads the column {wanted!r}, and the data set has {', '.join(columns)}."
        for reward in data.rewards
        if isinstance(reward, Verifier)
        for wanted in reward.columns
        if wanted not in columns
    ]
    facts = {"rows": len(data.rows), "columns": columns}
    if problems:
        remedy = "Rename the column, or map it: task_settings {prompt: ..., answer: ...} for a JSONL file."
        return failed("columns", " ".join(problems), remedy, **facts)
    empty = sum(not row["prompt"] for row in data.rows)
    if empty:
        return warning("columns", f"{empty} of {len(data.rows)} prompts are empty.", "Leave those rows out.", **facts)
    first = f"the first {len(data.rows)} rows" if data.streamed else f"{len(data.rows)} rows"
    return ok("columns", f"{first} with {', '.join(columns)}.", **facts)
