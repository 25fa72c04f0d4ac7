"""What a run's curves say that the run itself did not: the alarms that were not raised, and a reward that never rises.

A run of dew raises its alarms while it trains. A run of somebody else has none, so its curves are read afterwards
with the same rules.
"""

from collections.abc import Sequence

import numpy as np

from dew.alarms import Alarms
from dew.records import Json

FEWEST_STEPS = 20
MOST_STEPS = 2000
"""Steps that are read again: each costs the length of its past. Of a longer run, its beginning and its last ones."""


def remarks(metrics: Sequence[Json], alarms: Sequence[Json]) -> list[Json]:
    """The first time each rule speaks, without those that the run raised itself."""
    rules = Alarms()
    read = [*metrics[:FEWEST_STEPS], *metrics[FEWEST_STEPS:][-MOST_STEPS:]]
    spoken = [alarm for line in read for alarm in rules.update(line["step"], line)]
    flat = reward_flat(metrics)
    told = {str(alarm.get("alarm")) for alarm in alarms}
    first: dict[str, Json] = {}
    for remark in spoken + ([flat] if flat else []):
        if remark["alarm"] not in told:
            first.setdefault(remark["alarm"], remark)
    return list(first.values())


def reward_flat(metrics: Sequence[Json]) -> Json | None:
    """Speaks where the last fifth is not above the first by twice the standard error of their difference."""
    reward = np.array([m["reward"] for m in metrics if isinstance(m.get("reward"), int | float)], float)
    if len(reward) < FEWEST_STEPS:
        return None
    fifth = len(reward) // 5
    first, last = reward[:fifth], reward[-fifth:]
    error = np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / fifth)
    if last.mean() - first.mean() > max(2 * error, 1e-9):
        return None
    return {
        "alarm": "reward_flat",
        "message": f"The reward never rises: {first.mean():.3f} in the first fifth, {last.mean():.3f} in the last.",
        "remedy": "Read answers under Groups: is the reward what it should be, and are some answers right, some wrong?",
    }
