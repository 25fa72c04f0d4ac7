"""A sample of the model's answers, drawn and scored by the run's own trainer, and checks of the rewards."""

import copy
import math
from dataclasses import dataclass, replace
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch

from dew.algorithms import Algorithm
from dew.compare.statistics import mean_interval
from dew.engines.credit import Rows, give_credit, outcomes
from dew.engines.trl.batch import join_columns
from dew.engines.trl.config import DewConfig
from dew.engines.trl.launch import Parsed, build_trainer
from dew.engines.trl.trainer import DewTrainer
from dew.preflight import EMPTY_REMEDY, Check, failed, graded, ok, skipped, warning
from dew.preflight.data import Data, correct_answers, score

TRUNCATED_WARNING, TRUNCATED_FAILURE = 0.3, 0.7
MIXED_WARNING = 0.1
CONCLUSIVE = 8
"""With this many groups and none mixed the check fails: if 1 in 4 were mixed, 1 sample in 10 would look like this."""
PROBED = 32
"""Number of rows whose correct and empty answers are passed to every reward."""


@dataclass(frozen=True)
class Answers:
    """N groups of G answers, one group per prompt. NaN where a reward returned None."""

    outcome: np.ndarray
    """(N, G) the outcome reward, which decides whether an answer is correct."""
    parts: np.ndarray
    """(N·G, R) every reward."""
    signal: list[bool]
    """(N,) whether a group has both a correct and a wrong answer."""
    truncated: list[bool]
    lengths: list[int]
    entropy: float
    """Mean over tokens, in nats."""
    seconds: float


def not_nan(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def sample(parsed: Parsed, data: Data, count: int) -> Answers:
    """About `count` answers, drawn by a trainer in a temporary folder."""
    with TemporaryDirectory() as folder:
        args = copy.copy(parsed.args)
        args.output_dir, args.report_to, args.disable_tqdm = folder, [], True
        return sample_with(build_trainer(replace(parsed, args=args)), data, count)


def sample_with(trainer: DewTrainer, data: Data, count: int) -> Answers:
    """About `count` answers: whole groups, to prompts spread over the data. Does not change the trainer.

    No more answers at once than in training, so that they take no more memory.
    """
    size, args, training = trainer.num_generations, trainer.args, trainer.model.training
    groups = min(max(1, math.ceil(count / size)), len(data.rows))
    chosen = [data.rows[i * len(data.rows) // groups] for i in range(groups)]
    at_once = max(1, args.batches.per_process // size)
    batches = []
    every, args.records_every = args.records_every, 1  # keeps the entropy
    trainer.model.train()
    began = perf_counter()
    try:
        with torch.random.fork_rng():
            for start in range(0, groups, at_once):
                rows = chosen[start : start + at_once]
                batches.append(trainer.sample([dict(row) for row in rows for _ in range(size)]))
    finally:
        args.records_every = every
        trainer.model.train(training)
        trainer._metrics["train"].clear()
    seconds = perf_counter() - began
    columns = join_columns([batch.columns for batch in batches], {})
    signal = torch.cat([outcomes(trainer.algorithm, batch).signal for batch in batches])
    entropies = columns["entropy"][columns["mask"]]
    return Answers(
        outcome=columns["outcome"].double().view(-1, size).cpu().numpy(),
        parts=columns["parts"].double().cpu().numpy(),
        signal=signal[::size].tolist(),
        truncated=columns["truncated"].tolist(),
        lengths=columns["length"].tolist(),
        entropy=float(entropies.mean()) if entropies.numel() else 0.0,
        seconds=seconds,
    )


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
    facts = {"groups": n, "mixed": mixed, "answers_per_group": answers.outcome.shape[1]}
    says = f"{mixed} of {n} groups have answers with different outcomes to learn from."
    solved = np.nan_to_num(answers.outcome).mean() > 0.5
    change = "harder problems" if solved else "easier problems, a model that knows the answer format"
    remedy = f"Use {change}, or more answers per prompt (num_generations). Raise --answers for a larger sample."
    differ = sum(len(_distinct(group)) > 1 for group in answers.outcome)
    if differ > mixed:
        remedy = f"The reward differs within {differ} groups but not across the threshold: see the check `filter`."
    few, none = mixed < max(1, MIXED_WARNING * n), mixed == 0 and n >= CONCLUSIVE
    return graded("groups", says, remedy, warn=few, fail=none, **facts)


def check_mean(answers: Answers) -> Check:
    n, scored = answers.outcome.size, not_nan(answers.outcome)
    missing = n - scored.size
    if not scored.size:
        says = f"The reward returned None, NaN or infinity for all {n} answers."
        return failed("mean reward", says, "Return a number.", n=n)
    span = (min(0.0, float(scored.min())), max(1.0, float(scored.max())))
    interval = mean_interval([not_nan(group).mean() for group in answers.outcome if not_nan(group).size], span=span)
    facts = {"mean": interval.value, "low": interval.low, "high": interval.high, "answers": n, "not_judged": missing}
    says = f"Mean {interval.value:.3f}, 95% interval {interval.low:.3f} to {interval.high:.3f}, over {n} answers"
    if missing > 0.01 * n:
        remedy = "Find out why the reward returns None for them: they are left out of training."
        return warning("mean reward", f"{says}; {missing} were not scored.", remedy, **facts)
    if np.ptp(scored) == 0:
        remedy = "Read some answers (dew eval saves them): without different rewards there is nothing to learn."
        return warning("mean reward", f"{says}, all with the same reward.", remedy, **facts)
    return ok("mean reward", f"{says}.", **facts)


def check_entropy(answers: Answers) -> Check:
    H, seconds, tokens = answers.entropy, answers.seconds, sum(answers.lengths)
    says = f"Mean {H:.3f} nats per token; {len(answers.lengths)} answers took {seconds:.1f} s."
    remedy = "Raise temperature, or start from a model with more varied answers: identical answers train nothing."
    return graded("entropy", says, remedy, warn=H < 0.01, nats=H, seconds=seconds, tokens=tokens)


def probe(reward: Any, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """A reward on correct answers, each in the format that scores highest, and on empty answers."""
    rows = data.rows[:PROBED]
    empty = score(reward, [""] * len(rows), rows, data)
    best = np.full(len(rows), np.nan)
    tries = [(i, text) for i, row in enumerate(rows) for text in correct_answers(row)]
    if tries:
        values = score(reward, [text for _, text in tries], [rows[i] for i, _ in tries], data)
        np.fmax.at(best, [i for i, _ in tries], values)
    return best, empty


def check_reward(index: int, outcome: int, data: Data, answers: Answers | None, threshold: float) -> Check:
    """One reward on correct answers, on empty ones and on the model's.

    The outcome reward must not accept an empty answer; any other should differ between answers.
    """
    name, reward = f"reward {data.names[index]}", data.rewards[index]
    if not callable(reward):
        return skipped(name, "Reward models are not probed.")
    gold, empty = probe(reward, data)
    own = answers.parts[:, index] if answers else np.empty(0)
    scored = {"gold": not_nan(gold), "empty": not_nan(empty), "answers": not_nan(own)}
    facts = {key: float(values.mean()) if values.size else None for key, values in scored.items()}
    mean = {key: "None" if value is None else f"{value:.2f}" for key, value in facts.items()}
    says = f"On correct answers {mean['gold']}, on empty ones {mean['empty']}"
    says += f", on the model's {mean['answers']}." if answers else "."
    if index == outcome:
        wrong = bool((empty > threshold).any())
        says += " An empty answer counts as correct." * wrong
        return graded(name, says, EMPTY_REMEDY, warn=False, fail=wrong, **facts)
    seen, on_answers = _distinct(gold, empty, own), _distinct(own)
    if not seen:
        remedy = "Remove it, or find out why it returns None."
        return warning(name, f"{says} It never returned a number.", remedy, **facts)
    if len(seen) == 1:
        remedy = "Compare the format that it expects with the one that the prompt asks for, or remove it."
        return graded(name, f"{says} It is always {seen[0]:g}.", remedy, warn=True, fail=bool(answers), **facts)
    if len(on_answers) == 1:
        remedy = "Show the format in the prompt, or remove this reward: it does not distinguish answers."
        return warning(name, f"{says} It is {on_answers[0]:g} for every answer of the model.", remedy, **facts)
    return ok(name, says, **facts)


def check_filter(args: DewConfig, outcome: int, data: Data, answers: Answers | None) -> Check:
    """Whether the outcome reward separates correct from wrong answers, if the algorithm depends on it.

    A shaped or summed reward differs between almost any two answers: dynamic sampling by it keeps every group, even
    those without a correct answer.
    """
    algorithm, name, reward = args.build_algorithm(), data.names[outcome], data.rewards[outcome]
    credit = give_credit(algorithm, four_wrong(algorithm))  # a user's own rule may raise here, as in training
    probes = probe(reward, data) if callable(reward) else ()
    different = _distinct(*probes, answers.outcome.ravel() if answers else np.empty(0))
    facts = {"values": different[:20], "different": len(different), "dynamic_sampling": algorithm.dynamic_sampling}
    if not algorithm.uses_threshold:
        return ok("filter", f"{algorithm.name} trains on every group whose rewards differ; {name} decides.", **facts)
    if credit.signal.any():
        says = f"{algorithm.name} keeps a group of wrong answers if another reward differs between them."
        return failed("filter", says, "Base Algorithm.signal on the outcome reward alone.")
    problem = algorithm.graded(torch.tensor(different))
    if problem is None:
        return ok("filter", f"{name} decides which answers are correct, a binary reward.", **facts)
    says = f"{name}: {problem.what} {problem.why}"
    if "threshold" in (args.algorithm_kwargs or {}):
        remedy = "Nothing to change if answers above your threshold are the correct ones."
        return warning("filter", says, remedy, **facts)
    return graded("filter", says, problem.remedy, warn=True, fail=algorithm.dynamic_sampling, **facts)


def _distinct(*values: np.ndarray) -> list[float]:
    return np.unique(not_nan(np.concatenate(values)).round(5)).tolist()


def four_wrong(algorithm: Algorithm) -> Rows:
    """A group of four wrong answers of two tokens, between which another reward differs."""
    same_group = torch.zeros(4, dtype=torch.long)
    mask, extra = torch.ones(4, 2, dtype=torch.bool), torch.linspace(0.0, 1.0, 4)
    signals = dict.fromkeys(algorithm.signals, torch.full((4, 2), 0.5))
    return Rows(group=same_group, mask=mask, outcome=torch.zeros(4), extra=extra, **signals)
