"""Alarms: rules over a run's metrics (docs/metrics.md), each with one condition, one message and one remedy.

A rule fires once per run; after that, only the number of steps at which its condition holds is counted. No torch here.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

Series = list[float]


class Crossed(NamedTuple):
    """Returned if a condition holds: the value, the threshold that it crossed, and since which step."""

    value: float
    threshold: float
    since: int = 0


FIRST, RECENT = 20, 5
"""The mean entropy of the last 5 steps is compared with that of the first 20."""
MOST = 0.5
"""Share of answers without a reward above which that is the problem."""
NEWEST = 50
"""Number of values kept in addition to the first ones, more than any rule needs."""


class History:
    """The first and the newest values of each metric, in step order, in bounded memory. Missing values leave no gap."""

    def __init__(self) -> None:
        self.values: dict[str, dict[int, float]] = {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a step. Values of this and later steps, e.g. from before a resume, are replaced."""
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
        """Return the newest `count` values, or an empty list if there are fewer."""
        series = self.series(name)
        return series[-count:] if len(series) >= count else []


Advice = str | tuple[str, Callable[[Any], Mapping[str, Any]]] | Callable[[Any], str]
"""A sentence; or one with {} for the algorithm with these settings, omitted if it lacks them or already has them; or a
function that returns one for the algorithm."""


@dataclass(frozen=True)
class Rule:
    name: str
    condition: Callable[[History], Crossed | None]
    message: str
    """A format string that may use {value}, {threshold}, {since} and {steps} (the number of steps since then)."""
    remedy: Sequence[Advice]


def _above(name: str, threshold: float, history: History) -> Crossed | None:
    last = history.last(name)
    return Crossed(last[0], threshold) if last and last[0] > threshold else None


def _stays_below(name: str, threshold: float, count: int, history: History) -> Crossed | None:
    """The newest `count` values are all below the threshold; if it is 0, none is above it."""
    last = history.last(name, count)
    holds = bool(last) and (max(last) < threshold or (threshold == 0 and max(last) <= 0))
    return Crossed(max(last), threshold, list(history.values[name])[-count]) if holds else None


_empty = partial(_stays_below, "length/mean", 1.5, 1)
"""An empty answer has one token, which ends it."""


def _reward_falls(history: History) -> Crossed | None:
    """The mean of the newest n values is below half of the first value, or of the best earlier mean over n values, by
    more than five standard errors. The variance of a value is half the mean squared difference between successive
    values, without the largest difference, which may be the fall; of few values, that leaves too little. Nor may the
    fall be within two standard errors of rare successes, of which each adds the smallest difference seen."""
    x, steps = history.series("reward"), list(history.values.get("reward", ()))
    changes = sorted(abs(a - b) for a, b in pairwise(x))[:-1]
    if len(x) < 4 or (len(x) <= 2 * RECENT and not any(changes)):
        return None
    n = 3 if len(x) < 4 * RECENT else 2 * RECENT
    now, noise = fmean(x[-n:]), math.sqrt(fmean(d * d for d in changes) / 2) * (1 + 2 / len(changes))
    means = [(fmean(x[i - n : i]), n, steps[i - 1]) for i in range(n, len(x) - n + 1)]
    best, count, step = max([(x[0], 1, steps[0]), *means])
    rare = math.sqrt((best - min(x)) * min(filter(None, changes), default=0))
    fall = max(abs(best) / 2, max(5 * noise, 2 * rare) * math.sqrt(1 / count + 1 / n))
    return Crossed(now, best, step) if best - now > fall else None


def _entropy(sign: int, factor: float, history: History) -> Crossed | None:
    """Entropy above (sign 1) or below (sign -1) this multiple of its mean over the first steps."""
    series = history.series("entropy")
    if len(series) < FIRST + RECENT:
        return None
    now, threshold = sum(series[-RECENT:]) / RECENT, factor * sum(series[:FIRST]) / FIRST
    return Crossed(now, threshold) if sign * now > sign * threshold else None


def _one_token_takes_all(history: History) -> Crossed | None:
    """One token has more than 1/5 of the credit and more than three equal shares (each of 4 tokens has 1/4 anyway)."""
    share, tokens = history.last("credit/top1_share"), history.last("credit/tokens")
    threshold = max(0.2, 3 / tokens[0] if tokens and tokens[0] > 0 else 0.2)
    return Crossed(share[0], threshold) if share and share[0] > threshold else None


def _pass_falls(history: History) -> Crossed | None:
    """On an evaluation set, the pass@k with the largest k is more than ten points below its first value."""
    found = [m for name in history.values if (m := re.fullmatch(r"(eval/(?:.+_)?pass@)(\d{1,6})", name))]
    largest = {m[1]: m[0] for m in sorted(found, key=lambda m: int(m[2])) if int(m[2]) > 1}
    falls = (Crossed(x[-1], x[0]) for x in map(history.series, largest.values()) if x[-1] < x[0] - 0.1)
    return next(falls, None)


def _sampler_mismatch(history: History) -> Crossed | None:
    """The KL divergence between sampler and trainer is large, or far above its first value, which is only rounding
    because both had the same weights."""
    series, recent = history.series("sampler/kl"), history.last("sampler/kl", RECENT)
    if recent and median(recent) > (threshold := max(5 * series[0], 0.005)):
        return Crossed(median(recent), threshold)
    return _above("sampler/kl", 0.05, history)


def _clipped(history: History) -> Crossed | None:
    share = sum(history.last("clip/low") + history.last("clip/high"))
    return Crossed(share, 0.3) if share > 0.3 else None


def _never_clips(history: History) -> Crossed | None:
    """Nothing was clipped for 20 steps, although the policy moved. Bounds on token ratios clip much earlier."""
    clipped, kl = (history.last("clip/low", 20) + history.last("clip/high", 20)), history.last("kl/approx", 20)
    moved = sum(kl) / 20
    holds = len(clipped) == 40 and max(clipped) == 0 and moved > 0.001
    return Crossed(moved, 0.001, list(history.values["clip/low"])[-20]) if holds else None


def _unexplained(condition: Callable[[History], Crossed | None], history: History) -> Crossed | None:
    """The condition, unless another alarm explains it: the reward fell, most answers have no reward or are empty, or
    nearly all are truncated."""
    useless = _above("unscored_share", MOST, history) or _above("length/truncated_share", 0.9, history)
    return None if useless or _empty(history) or _reward_falls(history) else condition(history)


def _not_finite(history: History) -> Crossed | None:
    bad = [x for x in history.last("loss") + history.last("grad_norm") if not math.isfinite(x)]
    return Crossed(bad[0], 0.0) if bad else None


def _skipped(history: History) -> Crossed | None:
    """A step was skipped, and not because of its rewards or its credit."""
    return None if _above("steps/credit_not_finite", 0.0, history) else _above("steps/skipped", 0.0, history)


BOUND_WEIGHTS: Sequence[Advice] = (
    ("Bound the entropy from below: `algorithm: {}`.", lambda _: {"entropy_clip": (0.01, 5.0)}),
    ("Weight it less: `algorithm: {}`.", lambda rule: {"alpha2": rule.alpha2 / 2}),
)


def _check_threshold(algorithm: Any) -> str:
    if not getattr(algorithm, "uses_threshold", False):
        return ""
    what = f"Outcomes only count as different if the threshold ({algorithm.threshold:g}) is between them"
    return f"{what}: check that it separates correct from wrong answers."


LEARN_LESS = "Sample more often (lower num_iterations or steps_per_generation) or lower learning_rate."

# fmt: off
RULES = (
    Rule("unscored", partial(_above, "unscored_share", MOST),
         "{value:.0%} of the answers had no reward (None, NaN or infinity), so nothing is learned from them.",
         ("Return a number from the reward function, and None only for answers that it cannot score.",
          lambda rule: "" if getattr(rule, "engine_loss", False) else
          "With several functions, set outcome_reward to one that scores every answer.")),
    Rule("never_correct", partial(_unexplained, partial(_stays_below, "accuracy", 0.0, 10)),
         "No answer was correct for {steps} steps: the outcome reward was never above the threshold.",
         ("Check the reward on gold answers (`dew preflight`), set outcome_reward to the function that decides "
          "correctness, or start with easier problems.",
          ("If the reward is graded, write `algorithm: {}`.", lambda _: {"pool": "outcome"}),
          ("If the reward is graded, write `algorithm: {}`.", lambda _: {"dynamic_sampling": False}))),
    Rule("no_signal", partial(_unexplained, partial(_stays_below, "groups/mixed_share", 0.1, 10)),
         "For {steps} steps at most {value:.0%} of the groups had answers with different outcomes to learn from.",
         ("Choose problems that the model solves sometimes, or raise num_generations.", _check_threshold,
          ("To replace such groups, write `algorithm: {}`.",
           lambda rule: {"dynamic_sampling": True} if rule.uses_threshold else {}))),
    Rule("wrong_sign", partial(_above, "credit/flipped_share", 0.01),
         "{value:.1%} of the tokens have credit of the wrong sign: rewarded in an answer below its group's mean reward "
         "or penalised in one above it.",
         (("Write `algorithm: {}`, which cannot flip a sign.", lambda _: {"pool": "outcome"}),)),
    Rule("reward_falls", _reward_falls,
         "The reward fell from {threshold:.2g} to {value:.2g} since step {since}.",
         ("Lower learning_rate, and {checkpoint}.",)),
    Rule("truncated", partial(_above, "length/truncated_share", 0.3),
         "{value:.0%} of the answers were truncated at the length limit.",
         ("Raise max_completion_length (and vllm_max_model_length, if it is set).",
          ("To reward answers that end, write `algorithm: {}`.",
           lambda rule: {"overlong": "soft", "overlong_buffer": max(1, rule.max_tokens // 4)}))),
    Rule("empty_answers", _empty,
         "The answers have {value:.2g} tokens on average: most are empty.",
         ("Give an empty answer a lower reward than any other, or lower learning_rate.",)),
    Rule("entropy_collapse", partial(_entropy, -1, 0.2),
         "The policy's entropy fell to {value:.3g} nats, below a fifth of its mean over the first 20 steps.",
         ("Lower learning_rate, or raise clip_high so that unlikely tokens of correct answers can grow.",)),
    Rule("entropy_explosion", partial(_entropy, 1, 3.0),
         "The policy's entropy rose to {value:.3g} nats, above three times its mean over the first 20 steps.",
         ("Lower learning_rate, and read some answers: they are probably degenerating into noise.", BOUND_WEIGHTS[1])),
    Rule("one_token_takes_all", _one_token_takes_all,
         "A single token gets {value:.0%} of an answer's credit on average.", BOUND_WEIGHTS),
    Rule("off_policy", partial(_above, "ratio/abs_log", 0.1),
         "The trained policy has moved away from the sampling policy: mean |log ratio| is {value:.3g}.",
         (LEARN_LESS,)),
    Rule("sampler_mismatch", _sampler_mismatch,
         "The sampler's probabilities are not the policy's: their KL divergence is {value:.2g} nats per token.",
         ("Give the sampler the same model, temperature and precision, and set top_p=1, top_k=0 and min_p=0. If the "
          "divergence grew from near 0, new weights (or the adapter) do not reach the sampler: restart its server, "
          "merge the adapter when syncing, or sample without vLLM to compare. If it samples some steps ahead on "
          "purpose, lower their number or learning_rate.",)),
    Rule("pass_falls", _pass_falls,
         "Held-out pass@k fell from {threshold:.2f} to {value:.2f}.",
         ("If pass@1 fell too, training harms the model; if not, its answers have become less diverse. With few "
          "problems this may be noise; else lower learning_rate, raise clip_high, or stop earlier.",)),
    Rule("clipped", _clipped,
         "{value:.0%} of the tokens were clipped and got no gradient.", (LEARN_LESS,)),
    Rule("never_clips", _never_clips,
         "Nothing was clipped for {steps} steps, although the policy moves (KL {value:.4f} nats per token): the bounds "
         "do not limit the update.",
         ("Lower clip_low and clip_high: the mean ratio of a whole answer needs about 0.01 where a token's needs 0.2.",
          ("E.g. `algorithm: {}`.",
           lambda rule: {x: round(getattr(rule, x) / 20, 6) for x in ("clip_low", "clip_high")}))),
    Rule("verifier_fails", partial(_above, "verifier/failed_share", 0.01),
         "The verifier timed out on {value:.1%} of the answers, which count as wrong.",
         ("Free some cores for it, and read these answers in the token records (verdict: timeout).",)),
    Rule("no_gradient", partial(_unexplained, partial(_stays_below, "grad_norm", 0.0, 5)),
         "The gradient was exactly 0 for {steps} steps, so nothing is learned.",
         ("Check groups/mixed_share and length/truncated_share: if all answers to a prompt have the same reward, every "
          "advantage is 0.", _check_threshold)),
    Rule("not_finite", _not_finite,
         "The loss or the gradient is {value}: the weights are or will be corrupted.",
         ("Lower learning_rate, use bf16 instead of fp16, and {checkpoint}.",)),
    Rule("skipped", _skipped,
         "The step was skipped: a logit, an entropy, the loss or the gradient was infinite or NaN.",
         ("Three in a row stop the run. Lower learning_rate, use bf16 instead of fp16.",)),
    Rule("credit_not_finite", partial(_above, "steps/credit_not_finite", 0.0),
         "The step was skipped: a reward or an advantage was infinite or NaN.",
         ("Three in a row stop the run. Check the reward function, and the algorithm if it is your own.",)),
    Rule("batch_not_full", partial(_unexplained, partial(_above, "groups/short", 0.0)),
         "Dynamic sampling stopped at max_rounds, {value:.0f} groups short; the step trained on the rest, if any.",
         ("Choose problems that the model solves sometimes.", _check_threshold,
          ("To sample longer, write `algorithm: {}`.", lambda rule: {"max_rounds": 2 * rule.max_rounds}))),
)
# fmt: on


class Alarms:
    """The alarms of a run. `algorithm`: the `dew.Algorithm` for which remedies are written. `by_correctness`: whether
    its credit depends on which answers are correct. `checkpoints`: returns the steps of existing checkpoints."""

    def __init__(
        self, algorithm: Any = None, by_correctness: bool = True, checkpoints: Callable[[], Sequence[int]] = lambda: ()
    ) -> None:
        self.steps: dict[str, int] = {}
        """Number of steps at which the condition of each rule held."""
        self._history, self._counted = History(), dict[str, int]()
        self._algorithm, self._checkpoints = algorithm, checkpoints
        self._rules = [rule for rule in RULES if by_correctness or rule.name != "never_correct"]

    def update(self, step: int, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the alarms that fire with these metrics. A step may be added in several parts."""
        self._history.add(step, metrics)
        fired = []
        for rule in self._rules:
            crossed = rule.condition(self._history)
            if crossed is None or self._counted.get(rule.name) == step:
                continue
            self._counted[rule.name] = step
            self.steps[rule.name] = self.steps.get(rule.name, 0) + 1
            if self.steps[rule.name] == 1:
                message = rule.message.format(**crossed._asdict(), steps=step - crossed.since + 1)
                remedy = self._remedy(rule, crossed.since or step - 1)
                alarm = {"step": step, "alarm": rule.name, "message": message, "remedy": remedy}
                fired.append({**alarm, "value": crossed.value, "threshold": crossed.threshold})
        return fired

    def _remedy(self, rule: Rule, last: int) -> str:
        kept = [step for step in self._checkpoints() if step <= last]
        back = f"go back to checkpoint-{max(kept)}" if kept else "start again: no earlier checkpoint is kept"
        texts = (self._text(x).replace("{checkpoint}", back) for x in rule.remedy)
        return " ".join(filter(None, texts))

    def _text(self, advice: Advice) -> str:
        if isinstance(advice, tuple):
            return self._setting(*advice)
        return advice if isinstance(advice, str) else advice(self._algorithm)

    def _setting(self, sentence: str, settings: Callable[[Any], Mapping[str, Any]]) -> str:
        """Return the sentence for this algorithm, or '' if it lacks the settings, already has them, or rejects them."""
        try:
            wanted = settings(self._algorithm)
            new = next(getattr(self._algorithm, name) != value for name, value in wanted.items())
            replace(self._algorithm, **wanted)
        except (AttributeError, StopIteration, TypeError, ValueError):
            return ""
        return sentence.format(self._algorithm.text(**wanted)) if new else ""

    def restore(self, steps: list[dict[str, Any]], until: int) -> None:
        """Process metrics that were already written, so that a resumed run does not repeat their alarms."""
        for metrics in steps:
            if metrics["step"] <= until:
                self.update(metrics["step"], metrics)
