"""What a whole run's curves say when nobody raised an alarm: four sentences, each with what to do.

Alarms belong to the run and are shown as it raised them. These judge the finished curves, so that a TRL run or
one with alarms turned off is read with the same eyes.
"""

from collections.abc import Callable, Sequence

import numpy as np

from dew.records import Json

Rule = Callable[[Json], Json | None]
FEWEST_STEPS = 20


def curve(metrics: Sequence[Json], name: str) -> np.ndarray:
    """The finite values of one metric, in order of step."""
    values = [m[name] for m in metrics if isinstance(m.get(name), int | float)]
    return np.asarray(values, float)


def remarks(metrics: Sequence[Json], alarms: Sequence[Json]) -> list[Json]:
    """Remarks on a run's curves, without those that the run raised itself."""
    raised = " ".join(str(alarm.get("alarm")) for alarm in alarms)
    rules = (reward_flat, entropy_collapse, no_signal, truncated)
    found = [rule(metrics) for rule in rules]
    return [r for r in found if r is not None and r["alarm"] not in raised]


def reward_flat(metrics: Sequence[Json]) -> Json | None:
    """The last fifth is not above the first by more than twice the standard error of their difference."""
    reward = curve(metrics, "reward")
    if len(reward) < FEWEST_STEPS:
        return None
    fifth = len(reward) // 5
    first, last = reward[:fifth], reward[-fifth:]
    error = np.sqrt(first.var(ddof=1) / fifth + last.var(ddof=1) / fifth)
    if last.mean() - first.mean() > max(2 * error, 1e-9):
        return None
    return {
        "alarm": "reward_flat",
        "message": f"The reward never rises: {first.mean():.3f} in the first fifth, {last.mean():.3f} in the last.",
        "remedy": "Look at answers in Groups: is the reward what it should be, are there right answers to learn from?",
    }


def entropy_collapse(metrics: Sequence[Json]) -> Json | None:
    entropy = curve(metrics, "entropy")
    if len(entropy) < FEWEST_STEPS:
        return None
    first, last = entropy[:FEWEST_STEPS].mean(), entropy[-10:].mean()
    if last >= 0.2 * first:
        return None
    return {
        "alarm": "entropy_collapse",
        "message": f"Entropy fell to {last / first:.0%} of its start ({first:.3f} to {last:.3f}): answers grow alike.",
        "remedy": "Lower the learning rate, raise clip_high, or use GTPO, which credits unsure tokens.",
    }


def no_signal(metrics: Sequence[Json]) -> Json | None:
    mixed = curve(metrics, "groups/mixed_share")
    if len(mixed) < 10 or np.median(mixed) >= 0.5:
        return None
    return {
        "alarm": "no_signal",
        "message": f"Few groups carry signal: {np.median(mixed):.0%} have right and wrong answers in the median step.",
        "remedy": "Use problems nearer to what the model can do, larger groups, or dynamic sampling.",
    }


def truncated(metrics: Sequence[Json]) -> Json | None:
    share = curve(metrics, "length/truncated_share")
    if len(share) < 10 or share[-10:].mean() <= 0.3:
        return None
    return {
        "alarm": "truncated",
        "message": f"{share[-10:].mean():.0%} of the last answers were cut off: their reward says nothing about them.",
        "remedy": "Raise the length limit, or punish overlong answers softly.",
    }
