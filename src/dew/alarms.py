"""Alarms: rules over a run's metrics, each one condition, one sentence and one remedy.

    alarms = Alarms()
    for step, metrics in ...:                       # names as in docs/metrics.md
        for alarm in alarms.update(step, metrics):  # {"step", "alarm", "message", "remedy", "value", "threshold"}
            ...

A rule speaks when its condition begins and is silent until the condition has gone and come back. Needs no torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Series = list[float]
Verdict = tuple[float, float] | None
"""The value and the threshold that it crossed, or None while all is well."""


@dataclass(frozen=True)
class Rule:
    """One condition, one sentence, one remedy."""

    name: str
    check: Callable[["History"], Verdict]
    message: str
    """May quote {value} and {threshold}."""
    remedy: str


FIRST, RECENT = 20, 5
"""Entropy is compared with its mean over the first 20 steps; the mean of the last 5 stands for now."""
NEWEST = 50
"""Values that are remembered besides the first ones: more than any rule looks back."""


class History:
    """The first and the newest values of each metric, in the order of steps: a long run takes no more memory.

    A metric that a step has not leaves no gap.
    """

    def __init__(self) -> None:
        self._steps: dict[str, list[int]] = {}
        self._values: dict[str, Series] = {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Steps come in order; what is told again, by a part of a step or by a resumed run, takes the old's place."""
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            steps, values = self._steps.setdefault(name, []), self._values.setdefault(name, [])
            while steps and steps[-1] >= step:
                steps.pop()
                values.pop()
            steps.append(step)
            values.append(float(value))
            if len(steps) > FIRST + 2 * NEWEST:
                del steps[FIRST:-NEWEST], values[FIRST:-NEWEST]

    def series(self, name: str) -> Series:
        return self._values.get(name, [])

    def last(self, name: str, count: int) -> Series:
        """The newest `count` values, or none while there are fewer."""
        series = self.series(name)
        return series[-count:] if len(series) >= count else []


def _always_below(name: str, threshold: float, steps: int) -> Callable[[History], Verdict]:
    def check(history: History) -> Verdict:
        last = history.last(name, steps)
        return (max(last), threshold) if last and max(last) < threshold else None

    return check


def _never_above(name: str, threshold: float, steps: int) -> Callable[[History], Verdict]:
    def check(history: History) -> Verdict:
        last = history.last(name, steps)
        return (max(last), threshold) if last and max(last) <= threshold else None

    return check


def _mean_above(name: str, threshold: float, steps: int = 1) -> Callable[[History], Verdict]:
    def check(history: History) -> Verdict:
        last = history.last(name, steps)
        mean = sum(last) / len(last) if last else 0.0
        return (mean, threshold) if mean > threshold else None

    return check


def _entropy(factor: float, below: bool) -> Callable[[History], Verdict]:
    def check(history: History) -> Verdict:
        series = history.series("entropy")
        if len(series) < FIRST + RECENT:
            return None
        threshold = factor * sum(series[:FIRST]) / FIRST
        now = sum(series[-RECENT:]) / RECENT
        return (now, threshold) if (now < threshold if below else now > threshold) else None

    return check


def _one_token_takes_all(history: History) -> Verdict:
    """More than a fifth, and more than three times an equal share: of four tokens each has a quarter anyway."""
    share, tokens = history.last("credit/top1_share", 1), history.last("credit/tokens", 1)
    if not share:
        return None
    threshold = max(0.2, 3 / tokens[0] if tokens and tokens[0] > 0 else 0.2)
    return (share[0], threshold) if share[0] > threshold else None


def _clipped(history: History) -> Verdict:
    low, high = history.last("clip/low", 1), history.last("clip/high", 1)
    share = (low[0] if low else 0.0) + (high[0] if high else 0.0)
    return (share, 0.3) if share > 0.3 else None


def _not_finite(history: History) -> Verdict:
    last = history.last("loss", 1) + history.last("grad_norm", 1)
    bad = [value for value in last if not math.isfinite(value)]
    return (bad[0], 0.0) if bad else None


def _batch_not_full(history: History) -> Verdict:
    short = history.last("groups/short", 1)
    return (short[0], 0.0) if short and short[0] > 0 else None


RULES = (
    Rule(
        "never_correct",
        _never_above("accuracy", 0.0, 10),
        "No answer was correct for 10 steps: there is nothing to learn from.",
        "Check the reward on a gold answer (`dew check`), set outcome_reward to the function that judges "
        "correctness, or begin with easier problems.",
    ),
    Rule(
        "no_signal",
        _always_below("groups/mixed_share", 0.1, 10),
        "For 10 steps at most {value:.1%} of the groups had a correct and a wrong answer; the others train nothing.",
        "Choose problems that the model solves sometimes, raise num_generations, or turn dynamic_sampling on.",
    ),
    Rule(
        "truncated",
        _mean_above("length/truncated_share", 0.3),
        "{value:.0%} of the answers were cut off at the length limit.",
        "Raise max_completion_length, or set overlong='soft' so that the model learns to finish.",
    ),
    Rule(
        "entropy_collapse",
        _entropy(0.2, below=True),
        "The policy's entropy fell to {value:.3g} nats, below a fifth of its mean over the first 20 steps.",
        "Lower the learning rate, or raise clip_high so that unlikely tokens of correct answers may grow.",
    ),
    Rule(
        "entropy_explosion",
        _entropy(3.0, below=False),
        "The policy's entropy rose to {value:.3g} nats, above three times its mean over the first 20 steps.",
        "Lower the learning rate or alpha2, and look at the answers: they are probably turning into noise.",
    ),
    Rule(
        "one_token_takes_all",
        _one_token_takes_all,
        "A single token holds {value:.0%} of an answer's credit on average.",
        "Set entropy_clip to bound the entropy from below, e.g. (0.01, 5), or lower alpha2.",
    ),
    Rule(
        "off_policy",
        _mean_above("ratio/abs_log", 0.1),
        "The trained policy has left the one that sampled: mean |log ratio| is {value:.3g}.",
        "Sample more often (lower num_iterations or steps_per_generation) or lower the learning rate.",
    ),
    Rule(
        "clipped",
        _clipped,
        "{value:.0%} of the tokens were clipped and train nothing.",
        "Sample more often (lower num_iterations or steps_per_generation) or lower the learning rate.",
    ),
    Rule(
        "verifier_fails",
        _mean_above("verifier/failed_share", 0.01),
        "The verifier timed out or failed on {value:.1%} of the answers, which count as wrong.",
        "Give it more time, or look at those answers in the token records: their verdict says why.",
    ),
    Rule(
        "no_gradient",
        _never_above("grad_norm", 0.0, 5),
        "The gradient was exactly 0 for 5 steps: nothing is being learnt.",
        "Look at groups/mixed_share and length/truncated_share: without mixed groups every advantage is 0.",
    ),
    Rule(
        "not_finite",
        _not_finite,
        "The loss or the gradient is {value}: the model's weights are lost or about to be.",
        "Go back to the last checkpoint and lower the learning rate; train in bf16 rather than fp16.",
    ),
    Rule(
        "skipped",
        _mean_above("steps/skipped", 0.0),
        "The step was skipped: a reward, a logit, an entropy or the gradient was an infinity or NaN.",
        "Three in a row stop the run and say where. Look at the reward function, lower the learning rate, train in "
        "bf16 rather than fp16.",
    ),
    Rule(
        "batch_not_full",
        _batch_not_full,
        "Dynamic sampling reached max_rounds with {value:.0f} groups missing; the step trained on the others.",
        "Raise max_rounds, or choose problems that the model solves sometimes.",
    ),
)


class Alarms:
    """Reads metrics step by step and says which rules begin to hold."""

    def __init__(self, rules: tuple[Rule, ...] = RULES) -> None:
        self.rules = rules
        self._history = History()
        self._ringing: set[str] = set()

    def update(self, step: int, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The alarms that begin with these metrics. A step may come in parts."""
        self._history.add(step, metrics)
        begun = []
        for rule in self.rules:
            verdict = rule.check(self._history)
            if verdict is None:
                self._ringing.discard(rule.name)
            elif rule.name not in self._ringing:
                self._ringing.add(rule.name)
                begun.append(_alarm(rule, step, *verdict))
        return begun

    def restore(self, steps: list[dict[str, Any]], until: int) -> None:
        """Take in what a run has already written, without ringing: a resumed run keeps its memory."""
        for metrics in steps:
            if metrics["step"] <= until:
                self.update(metrics["step"], metrics)


def _alarm(rule: Rule, step: int, value: float, threshold: float) -> dict[str, Any]:
    return {
        "step": step,
        "alarm": rule.name,
        "message": rule.message.format(value=value, threshold=threshold),
        "remedy": rule.remedy,
        "value": value,
        "threshold": threshold,
    }
