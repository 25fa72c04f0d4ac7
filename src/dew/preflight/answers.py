"""A sample of the model's answers, drawn and scored by the trainer that will train, and the rewards on them."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from dew.algorithms import Algorithm
from dew.engines.credit import Rows, judge
from dew.engines.trl.config import DewConfig
from dew.engines.trl.launch import build_trainer
from dew.engines.trl.rewards import check_weights, outcome_index
from dew.engines.trl.settings import Parsed
from dew.evaluate import mean_interval
from dew.preflight.check import EMPTY_REMEDY, Check, failed, graded, ok, skipped, warning
from dew.preflight.data import Data, Golds, correct_answers, score

TRUNCATED_WARNING, TRUNCATED_FAILURE = 0.3, 0.7
MIXED_WARNING = 0.1
CONCLUSIVE = 8
"""Groups of which none is mixed that make a failure: if 1 in 4 were mixed, 1 sample in 10 would look like this."""
PROBED = 32
"""Rows on whose correct and empty answers every reward is called."""

Values = list[float | None]
"""One per answer; None where the reward returned none."""


@dataclass(frozen=True)
class Answers:
    """N answers; the G answers to one prompt are consecutive."""

    size: int
    """G."""
    outcome: Values
    """(N,) the outcome reward, which decides whether an answer is correct."""
    parts: list[Values]
    """(N, R) every reward."""
    signal: list[bool]
    """Per group: whether it has both a correct and a wrong answer."""
    truncated: list[bool]
    lengths: list[int]
    entropy: float
    """Mean over tokens, in nats."""
    seconds: float

    @property
    def groups(self) -> list[list[float]]:
        """Outcomes per group, without missing ones."""
        groups = [self.outcome[i : i + self.size] for i in range(0, len(self.outcome), self.size)]
        return [[value for value in group if value is not None] for group in groups]

    @property
    def group_means(self) -> list[float]:
        return [fmean(group) for group in self.groups if group]


def sample(parsed: Parsed, data: Data, count: int) -> Answers:
    """About `count` answers: whole groups, to prompts spread over the data."""
    from transformers.utils.logging import disable_progress_bar

    size = parsed.args.num_generations
    groups = min(max(1, math.ceil(count / size)), len(data.rows))
    chosen = [data.rows[i * len(data.rows) // groups] for i in range(groups)]
    disable_progress_bar()
    with TemporaryDirectory() as folder:
        trainer = build_trainer(replace(parsed, args=_isolated(parsed.args, folder)))
        trainer.model.train()
        began = perf_counter()
        batch = trainer.sample([dict(row) for row in chosen for _ in range(size)])
        seconds = perf_counter() - began
        signal = judge(trainer.algorithm, batch).signal[::size].tolist()
    assert batch.entropy is not None
    return Answers(
        size=size,
        outcome=_values(batch.outcome.tolist()),
        parts=[_values(row) for row in batch.parts.tolist()],
        signal=signal,
        truncated=batch.truncated.tolist(),
        lengths=batch.length.tolist(),
        entropy=float(batch.entropy[batch.mask].mean()) if batch.mask.any() else 0.0,
        seconds=seconds,
    )


def _isolated(args: Any, folder: str) -> Any:
    """The same settings, writing to a temporary folder and reporting to no tracker."""
    args = copy.copy(args)
    args.output_dir, args.report_to, args.disable_tqdm = folder, [], True
    args.records_every = 1  # keeps the entropy
    return args


def _values(values: Sequence[float]) -> Values:
    return [None if math.isnan(value) else value for value in values]


def check_answers(answers: Answers, limit: int) -> list[Check]:
    return [check_length(answers, limit), check_groups(answers), check_mean(answers), check_entropy(answers)]


def check_length(answers: Answers, limit: int) -> Check:
    n, cut = len(answers.truncated), sum(answers.truncated)
    share, mean, longest = cut / n, fmean(answers.lengths), max(answers.lengths)
    facts = {"truncated": cut, "answers": n, "share": share, "limit": limit, "mean": mean, "longest": longest}
    says = f"{cut} of {n} answers ({share:.0%}) are truncated at max_completion_length={limit}; mean {mean:.0f} tokens."
    remedy = f"Raise max_completion_length, e.g. to {2 * limit}, or ask for shorter answers in the prompt."
    warn, fail = share > TRUNCATED_WARNING, share > TRUNCATED_FAILURE
    return graded("truncated", says, remedy, warn=warn, fail=fail, **facts)


def check_groups(answers: Answers) -> Check:
    n, mixed = len(answers.signal), sum(answers.signal)
    facts = {"groups": n, "mixed": mixed, "answers_per_group": answers.size}
    says = f"{mixed} of {n} groups have both a correct and a wrong answer; only these groups train."
    solved = bool(answers.group_means) and fmean(answers.group_means) > 0.5
    change = "harder problems" if solved else "easier problems, a model that knows the answer format"
    remedy = f"Use {change}, or more answers per prompt (num_generations). Raise --answers for a larger sample."
    few, none = mixed < max(1, MIXED_WARNING * n), mixed == 0 and n >= CONCLUSIVE
    return graded("groups", says, remedy, warn=few, fail=none, **facts)


def check_mean(answers: Answers) -> Check:
    n, given = len(answers.outcome), [value for value in answers.outcome if value is not None]
    missing = n - len(given)
    if not given:
        says = f"The reward returned None for all {n} answers."
        return failed("mean reward", says, "Return a number instead of None.", n=n)
    interval = mean_interval(answers.group_means, span=(min(0.0, *given), max(1.0, *given)))
    facts = {"mean": interval.value, "low": interval.low, "high": interval.high, "answers": n, "not_judged": missing}
    says = f"Mean {interval.value:.3f}, 95 % interval {interval.low:.3f} to {interval.high:.3f}, over {n} answers"
    if missing > 0.01 * n:
        remedy = "Find out why the reward returns None for them: they are left out of training."
        return warning("mean reward", f"{says}; {missing} were not scored.", remedy, **facts)
    if min(given) == max(given):
        remedy = "Read some answers (dew eval saves them): without different rewards there is nothing to learn."
        return warning("mean reward", f"{says}, all with the same reward.", remedy, **facts)
    return ok("mean reward", f"{says}.", **facts)


def check_entropy(answers: Answers) -> Check:
    H = answers.entropy
    says = f"Mean {H:.3f} nats per token; {len(answers.lengths)} answers took {answers.seconds:.1f} s."
    facts: dict[str, Any] = {"nats": H, "seconds": answers.seconds, "tokens": sum(answers.lengths)}
    remedy = "Raise temperature, or start from a model with more varied answers: identical answers train nothing."
    return graded("entropy", says, remedy, warn=H < 0.01, **facts)


@dataclass(frozen=True)
class Evidence:
    """Input of the checks of the rewards."""

    args: DewConfig
    data: Data
    outcome: int
    """Index of the outcome reward."""
    golds: Golds | None = None
    """None if they could not be scored."""
    answers: Answers | None = None
    """None if none were sampled."""


def find_outcome(args: DewConfig, data: Data) -> tuple[int, Check]:
    """(index, check) of the outcome reward."""
    index = outcome_index(data.names, args.outcome_reward)
    check_weights(data.names, args.reward_weights, index)
    threshold = args.build_algorithm().threshold
    others = ", ".join(name for i, name in enumerate(data.names) if i != index)
    says = f"{data.names[index]} decides: answers above {threshold:g} are correct"
    return index, ok("outcome", f"{says}; added to it: {others}." if others else f"{says}.", outcome=index)


def check_reward(index: int, evidence: Evidence) -> Check:
    """One reward on correct answers, on empty ones and on the model's."""
    data, answers = evidence.data, evidence.answers
    name, reward = f"reward {data.names[index]}", data.rewards[index]
    if not callable(reward) or isinstance(reward, str):
        return skipped(name, "Reward models are not probed.")
    on_gold, empty = _probe(index, evidence)
    on_answers = [row[index] for row in answers.parts] if answers else []
    facts = {"gold": _mean(on_gold), "empty": _mean(empty), "answers": _mean(on_answers)}
    mean = {key: "None" if value is None else f"{value:.2f}" for key, value in facts.items()}
    says = f"On correct answers {mean['gold']}, on empty ones {mean['empty']}"
    says += f", on the model's {mean['answers']}." if answers else "."
    if index != evidence.outcome:
        return _check_addition(name, says, _distinct([*on_gold, *empty]), _distinct(on_answers), bool(answers), facts)
    if any(value is not None and value > evidence.args.build_algorithm().threshold for value in empty):
        return failed(name, f"{says} An empty answer counts as correct.", EMPTY_REMEDY, **facts)
    return ok(name, says, **facts)


def _probe(index: int, evidence: Evidence) -> tuple[Values, Values]:
    """A reward on (correct answers, empty answers).

    For the outcome reward, the correct answer is in the format that it accepted; for any other, in the format that
    scores highest.
    """
    data, reward = evidence.data, evidence.data.rewards[index]
    rows = data.rows[:PROBED]
    empty = score(reward, [""] * len(rows), rows, data)
    if index == evidence.outcome and evidence.golds is not None:
        return score(reward, evidence.golds.texts[:PROBED], rows, data), empty
    tries = [(text, row) for row in rows for text in correct_answers(row)]
    if not tries:
        return [], empty
    values = iter(score(reward, [text for text, _ in tries], [row for _, row in tries], data))
    per_row = [[next(values) for _ in correct_answers(row)] for row in rows]
    return [max((v for v in row if v is not None), default=None) for row in per_row if row], empty


def _check_addition(
    name: str, says: str, probes: set[float], answers: set[float], sampled: bool, facts: dict[str, Any]
) -> Check:
    """A reward that is added to the outcome reward should differ between answers."""
    seen = probes | answers
    if not seen:
        remedy = "Remove it, or find out why it returns None."
        return warning(name, f"{says} It never returned a number.", remedy, **facts)
    if len(seen) == 1:
        remedy = "Compare the format that it expects with the one that the prompt asks for, or remove it."
        return graded(name, f"{says} It is always {seen.pop():g}.", remedy, warn=True, fail=sampled, **facts)
    if len(answers) == 1:
        remedy = "Show the format in the prompt, or remove this reward: it does not distinguish answers."
        return warning(name, f"{says} It is {answers.pop():g} for every answer of the model.", remedy, **facts)
    return ok(name, says, **facts)


def check_filter(evidence: Evidence) -> Check:
    """Whether dynamic sampling filters by correctness.

    A shaped or summed reward differs between almost any two answers: a filter on it keeps every group, also those
    without a correct answer, and the policy trains on noise.
    """
    args, answers = evidence.args, evidence.answers
    algorithm, name = args.build_algorithm(), evidence.data.names[evidence.outcome]
    if keeps_noise(algorithm):
        says = f"{algorithm.name} keeps a group of wrong answers if another reward differs between them."
        return failed("filter", says, "Base Algorithm.signal on the outcome reward alone.")
    probes = _probe(evidence.outcome, evidence) if evidence.golds is not None else ()
    given = [value for part in (*probes, answers.outcome if answers else []) for value in part]
    values = sorted({round(value, 4) for value in given if value is not None})
    facts = {"values": values[:20], "different": len(values), "dynamic_sampling": algorithm.dynamic_sampling}
    if len(values) <= 2:
        active = "uses" if algorithm.dynamic_sampling else "is off; it would use"
        return ok("filter", f"Dynamic sampling {active} {name} alone, a binary reward.", **facts)
    shown = ", ".join(f"{value:g}" for value in values[:4])
    says = f"{name} decides, but is not binary: it returned {len(values)} different values ({shown}, ...)"
    if answers:
        mixed = sum(len(set(group)) > 1 for group in answers.groups)
        says += f", and {mixed} of {len(answers.signal)} groups look mixed by it"
    if isinstance(args.algorithm_kwargs, dict) and "threshold" in args.algorithm_kwargs:
        remedy = "Nothing to change if answers above your threshold are the correct ones."
        return warning("filter", f"{says}; correct above {algorithm.threshold:g}.", remedy, **facts)
    remedy = (
        "Set outcome_reward to a reward that is 1 for correct and 0 for wrong answers and keep this one as an "
        "addition; or set algorithm_kwargs {threshold: ...}, above which an answer is correct."
    )
    return graded("filter", f"{says}.", remedy, warn=True, fail=algorithm.dynamic_sampling, **facts)


def keeps_noise(algorithm: Algorithm) -> bool:
    """Whether four wrong answers count as a mixed group because another reward differs between them."""
    same_group, guided = torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.bool)
    mask, extra = torch.ones(4, 1, dtype=torch.bool), torch.linspace(0.0, 1.0, 4)
    outcome, entropy = torch.zeros(4), torch.ones(4, 1)
    rows = Rows(group=same_group, mask=mask, outcome=outcome, extra=extra, entropy=entropy, guided=guided)
    return bool(judge(algorithm, rows).signal.any())


def _distinct(values: Values) -> set[float]:
    return {round(value, 6) for value in values if value is not None}


def _mean(values: Values) -> float | None:
    given = [value for value in values if value is not None]
    return fmean(given) if given else None
