"""Checks of a run on TRL: settings, data, gold answers, rewards, and answers sampled by the run's own trainer."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from dew.algorithms import Algorithm
from dew.compare.scores import call_as_trl
from dew.compare.statistics import mean_interval
from dew.engines.credit import give_credit
from dew.engines.recorder import gold_of
from dew.engines.trl import rewards as trl_rewards
from dew.engines.trl.batch import join_columns
from dew.engines.trl.config import DewConfig
from dew.engines.trl.launch import Parsed, build_trainer, data_of, parse, rewards_of
from dew.errors import DewError
from dew.preflight import EMPTY_REMEDY, Check, attempt, from_problem, graded, guarded, ok, passed, skipped, warning
from dew.preflight.machine import check_folder, check_model, check_versions
from dew.rewards import Verifier
from dew.rewards.user_function import reward_name
from dew.rewards.verifiers import text_of
from dew.run.config import Run
from dew.tasks import Row

STREAMED_ROWS = 1000
LORA_RATES = (1e-5, 2e-4)
TOLERATED = 0.01
"""If more than this share of the gold answers is rejected, the check fails; below it, it warns."""
CONCLUSIVE = 8
"""The check fails if none of at least this many groups is mixed. If 1 in 4 were, 1 sample in 10 would have none."""
PROBED = 32


@dataclass(frozen=True)
class Data:
    rows: list[Row]
    rewards: list[Any]

    @property
    def names(self) -> list[str]:
        return [reward_name(reward) for reward in self.rewards]


def read_data(parsed: Parsed) -> Data:
    """Return all rows, or the first ones of a streamed data set, and the rewards."""
    train, _ = data_of(parsed)
    parsed.args.batches.check_rows(train)
    rows = islice(train, None if hasattr(train, "__len__") else STREAMED_ROWS)
    return Data([dict(row) for row in rows], rewards_of(parsed))


def check_columns(data: Data) -> Check:
    columns = list(data.rows[0])
    missing = trl_rewards.missing_columns(columns, data.rewards)
    empty = 0 if missing else sum(not row["prompt"] for row in data.rows)
    says = " ".join(missing) or f"{len(data.rows)} rows with {', '.join(columns)}."
    says += f" {empty} prompts are empty." if empty else ""
    remedy = "Name the columns of a file with task_settings {prompt: ..., answer: ...}; remove rows without a prompt."
    warn, fail = empty > 0, bool(missing)
    return graded("columns", says, remedy, warn=warn, fail=fail)


def correct_answers(row: Row) -> list[str]:
    """Return the row's worked solution, if any, then its gold answer in the formats that rewards usually expect."""
    gold = gold_of(row)
    given = [text_of(row[key]) for key in ("solution", "completion") if isinstance(row.get(key), str | list)]
    answers = [text for text in given if text and text != gold][:1]
    if gold is not None:
        worked = answers[0] if answers else gold
        answers += [gold, f"\\boxed{{{gold}}}", f"<answer>{gold}</answer>", f"#### {gold}"]
        answers.append(f"<think>{worked}</think>\\boxed{{{gold}}}")
        answers.append(f"<think>\n{worked}\n</think>\n<answer>\n{gold}\n</answer>")
    return answers


def score(reward: Any, texts: Sequence[str], rows: Sequence[Row]) -> np.ndarray:
    """Call the reward as the trainer does, on `texts[i]` as the answer to `rows[i]`. NaN stands for None."""
    return np.array(call_as_trl(reward, texts, [[] for _ in texts], rows), dtype=float)


def check_golds(data: Data, outcome: int, threshold: float) -> Check:
    """Check that the outcome reward accepts every row's gold answer in one of the usual formats."""
    reward, name, tries = data.rewards[outcome], data.names[outcome], [correct_answers(row) for row in data.rows]
    n, rejected = len(tries), [i for i, texts in enumerate(tries) if texts]
    if not rejected and isinstance(reward, Verifier) and "answer" not in reward.columns:
        return skipped("gold", f"The problems of {name} have no gold answer: its verifier checks any solution.")
    if not rejected:
        remedy = "If the reward needs one, name its column answer, gold or solution."
        return warning("gold", "The rows have no gold answer.", remedy)
    given, seen = len(rejected), set[float]()
    for turn in range(max(map(len, tries))):  # one format after the other, until one is accepted
        asked = [i for i in rejected if turn < len(tries[i])]
        if asked:
            values = score(reward, [tries[i][turn] for i in asked], [data.rows[i] for i in asked])
            seen.update(not_nan(values).round(5).tolist())
            accepted = {i for i, value in zip(asked, values, strict=True) if value > threshold}
            rejected = [i for i in rejected if i not in accepted]
    if not rejected:
        return ok("gold", f"{name} accepts all {given} gold answers.")
    examples = "; ".join(f"row {i}: {gold_of(data.rows[i])!r:.40}" for i in rejected[:3])
    says = f"{name} rejects {len(rejected)} of {n} gold answers, e.g. {examples}."
    remedy, fail = "Correct or remove those rows: no answer to them can be rewarded.", len(rejected) > TOLERATED * n
    own = not (isinstance(reward, Verifier) and reward.columns == ("answer",))
    if own and (len(rejected) == given or len(seen) > 2):
        remedy, fail = "Call the reward on an answer that you know is correct. A graded reward needs no change.", False
    return graded("gold", says, remedy, warn=True, fail=fail)


@dataclass(frozen=True)
class Answers:
    """N groups of G answers, one group per prompt. NaN: the reward returned None."""

    outcome: np.ndarray
    """(N, G) outcome reward, which decides whether an answer is correct."""
    parts: np.ndarray
    signal: list[bool]
    """(N,) whether a group has both a correct and a wrong answer."""
    truncated: list[bool]
    lengths: list[int]
    entropy: float


def not_nan(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def sample(parsed: Parsed, data: Data, count: int) -> Answers:
    """Sample about `count` answers, in whole groups, to prompts spread over the data, in batches as in training."""
    with TemporaryDirectory() as folder:
        args = copy(parsed.args)
        args.output_dir, args.report_to, args.disable_tqdm = folder, [], True
        args.records_every = 1  # so that the entropy is computed
        trainer = build_trainer(replace(parsed, args=args))
        size = trainer.num_generations
        groups = min(max(1, math.ceil(count / size)), len(data.rows))
        chosen = [data.rows[i * len(data.rows) // groups] for i in range(groups)]
        at_once = max(1, args.batches.per_process // size)
        trainer.model.train()
        batches = [
            trainer.sample([dict(row) for row in chosen[start : start + at_once] for _ in range(size)])
            for start in range(0, groups, at_once)
        ]
    columns = join_columns([batch.columns for batch in batches], {})
    signal = torch.cat([give_credit(trainer.algorithm, batch).mixed(size) for batch in batches])  # user code may raise
    entropies = columns["entropy"][columns["mask"]]
    return Answers(
        outcome=columns["outcome"].double().view(-1, size).cpu().numpy(),
        parts=columns["parts"].double().cpu().numpy(),
        signal=signal.tolist(),
        truncated=columns["truncated"].tolist(),
        lengths=columns["length"].tolist(),
        entropy=float(entropies.mean()) if entropies.numel() else 0.0,
    )


def check_length(answers: Answers, limit: int) -> Check:
    n, cut, mean = len(answers.truncated), sum(answers.truncated), float(np.mean(answers.lengths))
    says = f"{cut} of {n} answers ({cut / n:.0%}) are truncated at max_completion_length={limit}; "
    says += f"mean {mean:.0f} tokens."
    remedy = f"Raise max_completion_length, e.g. to {2 * limit}, or ask for shorter answers in the prompt."
    return graded("truncated", says, remedy, warn=cut > 0.3 * n, fail=cut > 0.7 * n)


def check_groups(answers: Answers) -> Check:
    n, mixed = len(answers.signal), sum(answers.signal)
    if not not_nan(answers.outcome).size:
        return skipped("groups", "No answer has a reward.")
    says = f"{mixed} of {n} groups have answers with different outcomes to learn from."
    remedy = "Check that rewards differ; choose problems that the model solves sometimes, or raise num_generations."
    few, none = mixed < max(1, 0.1 * n), mixed == 0 and n >= CONCLUSIVE
    return graded("groups", says, remedy, warn=few, fail=none)


def check_mean(answers: Answers) -> Check:
    n, scored = answers.outcome.size, not_nan(answers.outcome)
    if not scored.size:
        says = f"The reward returned None, NaN or infinity for all {n} answers."
        return graded("mean reward", says, "Return a number.", warn=True, fail=True)
    span = (min(0.0, float(scored.min())), max(1.0, float(scored.max())))
    mean = mean_interval([not_nan(group).mean() for group in answers.outcome if not_nan(group).size], span=span)
    says = f"Mean {mean.value:.3f}, 95% interval {mean.low:.3f} to {mean.high:.3f}, over {scored.size} of {n} answers."
    remedy = "Read some answers (dew eval saves them): without a reward, or with equal rewards, nothing is learned."
    warn = scored.size < 0.99 * n or not np.ptp(scored)
    return graded("mean reward", says, remedy, warn=warn)


def check_entropy(answers: Answers) -> Check:
    remedy = "Raise temperature, or start from a model with more varied answers: identical answers train nothing."
    H = answers.entropy
    return graded("entropy", f"Mean {H:.3f} nats per token.", remedy, warn=H < 0.01)


def probe(reward: Any, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Return the reward of correct answers, each in the format that scores highest, and of empty answers."""
    rows = data.rows[:PROBED]
    empty = score(reward, [""] * len(rows), rows)
    best = np.full(len(rows), np.nan)
    tries = [(i, text) for i, row in enumerate(rows) for text in correct_answers(row)]
    if tries:
        values = score(reward, [text for _, text in tries], [rows[i] for i, _ in tries])
        np.fmax.at(best, [i for i, _ in tries], values)
    return best, empty


def check_reward(index: int, outcome: int, data: Data, answers: Answers | None, algorithm: Algorithm) -> Check:
    """Check that rewards are finite, that they differ, and that the outcome reward rejects empty answers."""
    name, reward = f"reward {data.names[index]}", data.rewards[index]
    if not callable(reward):
        return skipped(name, "Reward models are not probed.")
    gold, empty = probe(reward, data)
    own = answers.parts[:, index] if answers else np.empty(0)
    if bad := int(np.isinf(np.concatenate((gold, empty, own))).sum()):  # infinity stands for NaN, too
        remedy = "Return a number, or None for no reward: steps with such a reward are skipped."
        return graded(name, f"It returned NaN or infinity for {bad} answers.", remedy, warn=True, fail=True)
    says = f"On gold answers {_mean(gold)}, on empty ones {_mean(empty)}, on the model's {_mean(own)}."
    if index == outcome:
        by_value = not algorithm.uses_threshold and not_nan(own).size > 0
        if (empty > (np.nanmean(own) if by_value else algorithm.threshold)).any():
            says += f" An empty answer {'scores above that' if by_value else 'counts as correct'}."
            return graded(name, says, EMPTY_REMEDY, warn=False, fail=True)
    seen, on_answers = _distinct(gold, empty, own), _distinct(own)
    if len(seen) < 2:
        says += f" It is always {seen[0]:g}." if seen else " It never returned a number."
    elif len(on_answers) == 1:
        says += f" It is {on_answers[0]:g} for every answer of the model."
    remedy = "Compare the format that it expects with the one that the prompt asks for, or use another reward."
    warn, fail = len(seen) < 2 or len(on_answers) == 1, len(seen) == 1 and answers is not None
    return graded(name, says, remedy, warn=warn, fail=fail)


def check_filter(args: DewConfig, name: str, answers: Answers) -> Check:
    """Check that the outcome reward is not graded. Such a reward differs between almost any two answers, so dynamic
    sampling would keep every group."""
    algorithm, chosen = args.build_algorithm(), "threshold" in (args.algorithm_kwargs or {})
    problem = algorithm.graded(torch.from_numpy(answers.outcome))
    if problem is None:
        return ok("filter", f"{algorithm.name} can use what {name} returned.")
    remedy = "Nothing to change if answers above your threshold are the correct ones." if chosen else problem.remedy
    fail = algorithm.dynamic_sampling and not chosen
    return graded("filter", f"{name}: {problem.says}", remedy, warn=True, fail=fail)


def _mean(values: np.ndarray) -> str:
    return f"{np.nanmean(values):.2f}" if not_nan(values).size else "no reward"


def _distinct(*values: np.ndarray) -> list[float]:
    return np.unique(not_nan(np.concatenate(values)).round(5)).tolist()


def check_run(
    run: Run, typed: Mapping[str, str] | None, answers: int, untrusted: bool, say: Callable[[str], None]
) -> list[Check]:
    checks = [check_versions()]
    try:
        parsed = parse(run, typed, untrusted=untrusted)
    except DewError as error:
        checks += [from_problem("settings", problem) for problem in error.problems]
        return [*checks, skipped("the rest", "Data, rewards, model and disk are checked once the settings are valid.")]
    args = parsed.args
    checks.append(ok("settings", f"Settings given: {len(parsed.run.settings)}, all valid."))
    checks += [warning("settings", problem.says, problem.remedy) for problem in args.warnings()]
    checks.append(ok("batches", f"{args.batches}."))
    checks += guarded("folder", check_folder, Path(args.output_dir))
    low, high = LORA_RATES
    if parsed.model.use_peft and not low / 2 <= args.learning_rate <= high:
        says = f"learning_rate={args.learning_rate:g} with LoRA, which usually trains at {low:g} to {high:g}."
        remedy = "Set learning_rate: 1e-5 or more; 1e-6 suits full weights." if args.learning_rate < low else ""
        checks.append(graded("learning rate", says, remedy or f"Lower learning_rate to {high:g} or less.", warn=True))
    data, failures = attempt("data", read_data, parsed)
    if data is None:
        return [*checks, *failures, skipped("the rest", "There is no data to check.")]
    checks.append(check_columns(data))
    if checks[-1].status == "failed":
        return [*checks, skipped("the rest", "Gold answers, rewards, memory and a sample need the columns.")]
    checks += guarded("model", check_model, parsed, data.rows)
    trainable = passed([check for check in checks if check.name not in ("folder", "disk")])
    return checks + check_rewards(parsed, data, answers * trainable, say)


def check_rewards(parsed: Parsed, data: Data, count: int, say: Callable[[str], None]) -> list[Check]:
    """Check gold answers, a sample of the model's answers, each reward on both, and the filter of dynamic sampling."""
    args, answers = parsed.args, None
    outcome, failures = attempt("outcome", trl_rewards.check_rewards, data.rewards, args, None)
    if outcome is None:
        return [*failures, skipped("gold, rewards, answers", "No outcome reward decides which answers are correct.")]
    name, algorithm = data.names[outcome], args.build_algorithm()
    threshold = algorithm.threshold
    others = ", ".join(other for other in data.names if other != name)
    says = f"{name} decides: answers above {threshold:g} are correct{'; added to it: ' * bool(others)}{others}."
    checks = [ok("outcome", says)]
    if callable(data.rewards[outcome]):
        checks += guarded("gold", check_golds, data, outcome, threshold)
    if count:
        say(f"sampling {count} answers ...")
        answers, failures = attempt("answers", sample, parsed, data, count)
        checks += failures
    else:
        checks.append(skipped("answers", "Skipped (--answers 0, or an earlier check failed)."))
    if answers is not None:
        checks.append(check_length(answers, int(args.max_completion_length or 0)))
        checks += [check_groups(answers), check_mean(answers), check_entropy(answers)]
        checks.append(check_filter(args, name, answers))
    for i, reward in enumerate(data.names):
        checks += guarded(f"reward {reward}", check_reward, i, outcome, data, answers, algorithm)
    return checks
