"""Alarms: rules over a run's metrics (docs/metrics.md), each with one condition, one message and one remedy.

A rule fires once when its condition starts, and can fire again after the condition has ended. Does not need torch.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

Series = list[float]
Crossed = tuple[float, float] | None
"""The value and the threshold that it crossed, or None if the condition does not hold."""

FIRST, RECENT = 20, 5
"""Entropy is compared with its mean over the first 20 steps; the mean of the last 5 is the current value."""
NEWEST = 50
"""Values kept in addition to the first ones: more than any rule needs."""


class History:
    """The first and the newest values of each metric, in step order, in bounded memory. Missing values leave no gap."""

    def __init__(self) -> None:
        self.values: dict[str, dict[int, float]] = {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a step. Values of the same step or later (parts of a step, a resumed run) are replaced."""
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            values = self.values.setdefault(name, {})
            while values and next(reversed(values)) >= step:
                values.popitem()
            values[step] = float(value)
            if len(values) > FIRST + NEWEST:
                del values[list(values)[FIRST]]

    def series(self, name: str) -> Series:
        return list(self.values.get(name, {}).values())

    def last(self, name: str, count: int = 1) -> Series:
        """The newest `count` values; empty if there are fewer."""
        series = self.series(name)
        return series[-count:] if len(series) >= count else []


@dataclass(frozen=True)
class Rule:
    name: str
    condition: Callable[[History], Crossed]
    message: str
    """A format string that may use {value} and {threshold}."""
    remedy: str


def _above(name: str, threshold: float, history: History) -> Crossed:
    last = history.last(name)
    return (last[0], threshold) if last and last[0] > threshold else None


def _stays_below(name: str, threshold: float, steps: int, history: History) -> Crossed:
    """Below the threshold for this many steps; with a threshold of 0, never above it."""
    last = history.last(name, steps)
    holds = bool(last) and (max(last) < threshold or (threshold == 0 and max(last) <= 0))
    return (max(last), threshold) if holds else None


def _entropy(sign: int, factor: float, history: History) -> Crossed:
    """Entropy above (sign 1) or below (sign -1) this multiple of its mean over the first steps."""
    series = history.series("entropy")
    if len(series) < FIRST + RECENT:
        return None
    now, threshold = sum(series[-RECENT:]) / RECENT, factor * sum(series[:FIRST]) / FIRST
    return (now, threshold) if sign * now > sign * threshold else None


def _one_token_takes_all(history: History) -> Crossed:
    """More than a fifth, and more than three times an equal share: each of four tokens has a quarter anyway."""
    share, tokens = history.last("credit/top1_share"), history.last("credit/tokens")
    threshold = max(0.2, 3 / tokens[0] if tokens and tokens[0] > 0 else 0.2)
    return (share[0], threshold) if share and share[0] > threshold else None


def _pass_falls(history: History) -> Crossed:
    """The pass@k with the largest k on an evaluation set, more than ten points below its first value."""
    found = [m for name in history.values if (m := re.fullmatch(r"(eval/(?:.+_)?pass@)(\d{1,6})", name))]
    largest = {m[1]: m[0] for m in sorted(found, key=lambda m: int(m[2])) if int(m[2]) > 1}
    all_series = [history.series(name) for name in largest.values()]
    return next(((x[-1], x[0]) for x in all_series if x[-1] < x[0] - 0.1), None)


def _sampler_mismatch(history: History) -> Crossed:
    """The KL divergence between sampler and trainer is large, or small but far above its first value, when both had the
    same weights. What is left with the same weights is rounding."""
    series, recent = history.series("sampler/kl"), history.last("sampler/kl", RECENT)
    if recent and median(recent) > (threshold := max(5 * series[0], 0.005)):
        return median(recent), threshold
    return _above("sampler/kl", 0.05, history)


def _clipped(history: History) -> Crossed:
    share = sum(history.last("clip/low") + history.last("clip/high"))
    return (share, 0.3) if share > 0.3 else None


def _never_clips(history: History) -> Crossed:
    """Nothing was clipped for 20 steps, although the policy moved. Bounds on single tokens clip much earlier."""
    clipped, kl = (history.last("clip/low", 20) + history.last("clip/high", 20)), history.last("kl/approx", 20)
    moved = sum(kl) / 20
    return (moved, 0.001) if len(clipped) == 40 and max(clipped) == 0 and moved > 0.001 else None


def _not_finite(history: History) -> Crossed:
    bad = [x for x in history.last("loss") + history.last("grad_norm") if not math.isfinite(x)]
    return (bad[0], 0.0) if bad else None


# fmt: off
RULES = (
    Rule("never_correct", partial(_stays_below, "accuracy", 0.0, 10),
         "No answer was correct for 10 steps: the outcome reward was never above the threshold.",
         "Check the reward on gold answers (`dew preflight`), set outcome_reward to the function that decides "
         "correctness, set threshold or pool='outcome' if the reward is graded, or start with easier problems."),
    Rule("no_signal", partial(_stays_below, "groups/mixed_share", 0.1, 10),
         "For 10 steps at most {value:.1%} of the groups had answers with different outcomes to learn from.",
         "Choose problems that the model solves sometimes, raise num_generations, or enable dynamic_sampling."),
    Rule("wrong_sign", partial(_above, "credit/flipped_share", 0.01),
         "{value:.1%} of the tokens have credit of the wrong sign: rewarded in a wrong answer or penalised in a "
         "correct one.",
         "Set pool='outcome', which cannot flip a sign. This happens in groups that are nearly all correct or wrong."),
    Rule("truncated", partial(_above, "length/truncated_share", 0.3),
         "{value:.0%} of the answers were truncated at the length limit.",
         "Raise max_completion_length, or set overlong='soft' so that the model learns to finish."),
    Rule("entropy_collapse", partial(_entropy, -1, 0.2),
         "The policy's entropy fell to {value:.3g} nats, below a fifth of its mean over the first 20 steps.",
         "Lower the learning rate, or raise clip_high so that unlikely tokens of correct answers can grow."),
    Rule("entropy_explosion", partial(_entropy, 1, 3.0),
         "The policy's entropy rose to {value:.3g} nats, above three times its mean over the first 20 steps.",
         "Lower the learning rate or alpha2, and read some answers: they are probably degenerating into noise."),
    Rule("one_token_takes_all", _one_token_takes_all,
         "A single token gets {value:.0%} of an answer's credit on average.",
         "Set entropy_clip to bound the entropy from below, e.g. (0.01, 5), or lower alpha2."),
    Rule("large_weight", partial(_above, "credit/max_weight", 20.0),
         "One token has {value:.0f} times the mean credit of its answer.",
         "Set entropy_clip to bound the entropy from below, e.g. (0.01, 5), or lower alpha2."),
    Rule("off_policy", partial(_above, "ratio/abs_log", 0.1),
         "The trained policy has moved away from the sampling policy: mean |log ratio| is {value:.3g}.",
         "Sample more often (lower num_iterations or steps_per_generation) or lower the learning rate."),
    Rule("sampler_mismatch", _sampler_mismatch,
         "The sampler's probabilities are not the policy's: their KL divergence is {value:.2g} nats per token.",
         "Give the sampler the same model, temperature and precision, and set top_p=1, top_k=0 and min_p=0. If the "
         "divergence grew from near 0, new weights (or the adapter) do not reach the sampler: restart its server, "
         "merge the adapter when syncing, or sample without vLLM to compare. If it samples some steps ahead on "
         "purpose, lower their number or the learning rate."),
    Rule("pass_falls", _pass_falls,
         "Held-out pass@k fell from {threshold:.2f} to {value:.2f}: the model is more certain of fewer ways to answer.",
         "Lower the learning rate, raise clip_high, or stop earlier; compare pass@1, which may still rise."),
    Rule("clipped", _clipped,
         "{value:.0%} of the tokens were clipped and got no gradient.",
         "Sample more often (lower num_iterations or steps_per_generation) or lower the learning rate."),
    Rule("never_clips", _never_clips,
         "Nothing was clipped for 20 steps, although the policy moves (KL {value:.4f} nats per token): the bounds "
         "do not limit the update.",
         "Lower clip_low and clip_high. The mean ratio of a whole answer (grpo_s) needs about 0.01 where a token's "
         "needs 0.2."),
    Rule("verifier_fails", partial(_above, "verifier/failed_share", 0.01),
         "The verifier timed out on {value:.1%} of the answers, which count as wrong.",
         "Raise its time limit, or look up the verdicts of these answers in the token records."),
    Rule("no_gradient", partial(_stays_below, "grad_norm", 0.0, 5),
         "The gradient was exactly 0 for 5 steps, so nothing is learned.",
         "Check groups/mixed_share and length/truncated_share: without mixed groups every advantage is 0."),
    Rule("not_finite", _not_finite,
         "The loss or the gradient is {value}: the weights are or will be corrupted.",
         "Resume from the last checkpoint with a lower learning rate; use bf16 instead of fp16."),
    Rule("skipped", partial(_above, "steps/skipped", 0.0),
         "The step was skipped: a reward, an advantage, a logit, an entropy or the gradient was infinite or NaN.",
         "Three in a row stop the run. Check the reward function, lower the learning rate, use bf16 instead of fp16."),
    Rule("batch_not_full", partial(_above, "groups/short", 0.0),
         "Dynamic sampling stopped at max_rounds, {value:.0f} of the groups missing; the step trained on the others.",
         "Raise max_rounds, or choose problems that the model solves sometimes."),
)
# fmt: on


class Alarms:
    def __init__(self) -> None:
        self._history = History()
        self._active: set[str] = set()

    def update(self, step: int, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The alarms that start with these metrics. A step may come in parts."""
        self._history.add(step, metrics)
        started = []
        for rule in RULES:
            crossed = rule.condition(self._history)
            if crossed is None:
                self._active.discard(rule.name)
            elif rule.name not in self._active:
                self._active.add(rule.name)
                value, threshold = crossed
                message = rule.message.format(value=value, threshold=threshold)
                alarm = {"step": step, "alarm": rule.name, "message": message, "remedy": rule.remedy}
                started.append({**alarm, "value": value, "threshold": threshold})
        return started

    def restore(self, steps: list[dict[str, Any]], until: int) -> None:
        """Process metrics that were already written, so that a resumed run does not repeat their alarms."""
        for metrics in steps:
            if metrics["step"] <= until:
                self.update(metrics["step"], metrics)
