"""All checks of a run on TRL, in order. Checks that need something that is missing are skipped."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from dew.engines.trl.config import DewConfig
from dew.engines.trl.launch import Parsed, parse
from dew.engines.trl.rewards import outcome_index
from dew.engines.trl.trainer import DewTrainer
from dew.errors import DewError
from dew.preflight import Check, attempt, from_problem, guarded, ok, passed, skipped, warning
from dew.preflight.answers import (
    Answers,
    Data,
    check_answers,
    check_columns,
    check_filter,
    check_golds,
    check_reward,
    read_data,
    rows_of,
    sample,
    sample_with,
)
from dew.preflight.machine import check_folder, check_versions
from dew.preflight.memory import check_loaded_model, check_model
from dew.run.config import Run

Say = Callable[[str], None]
Draw = Callable[[Data, int], Answers]


def check_run(run: Run, typed: Mapping[str, str] | None, answers: int, untrusted: bool, say: Say) -> list[Check]:
    checks = [check_versions()]
    try:
        parsed = parse(run, typed, untrusted=untrusted)
    except DewError as error:
        checks += [from_problem("settings", problem) for problem in error.problems]
        return [*checks, skipped("the rest", "Data, rewards, model and disk are checked once the settings are valid.")]
    checks.append(check_settings(parsed))
    checks += guarded("folder", check_folder, Path(parsed.args.output_dir))
    checks.append(check_batches(parsed.args))
    data, failures = attempt("data", read_data, parsed)
    if data is None:
        return [*checks, *failures, skipped("the rest", "There is no data to check.")]
    checks.append(check_columns(data))
    if checks[-1].status == "failed":
        return [*checks, skipped("the rest", "Gold answers, rewards, memory and a sample need the columns.")]
    checks += guarded("model", check_model, parsed, data.rows)
    return checks + check_rewards(parsed.args, data, partial(sample, parsed), answers * _trainable(checks), say)


def check_trainer(trainer: DewTrainer, answers: int, say: Say) -> list[Check]:
    args = trainer.args
    checks = [check_versions(), check_batches(args), *guarded("folder", check_folder, Path(args.output_dir))]
    rewards = [getattr(reward, "__wrapped__", reward) for reward in trainer.reward_funcs]
    data = Data(rows_of(trainer.train_dataset), rewards)
    checks.append(check_columns(data))
    checks += guarded("model", check_loaded_model, trainer, data.rows)
    return checks + check_rewards(args, data, partial(sample_with, trainer), answers * _trainable(checks), say)


def _trainable(checks: list[Check]) -> bool:
    return passed([check for check in checks if check.name not in ("folder", "disk")])


def check_settings(parsed: Parsed) -> Check:
    valid = f"Settings given: {len(parsed.run.settings)}, all valid."
    if problem := parsed.args.filtered_sampling():
        return warning("settings", f"{valid} {problem.what} {problem.why}", problem.remedy)
    return ok("settings", valid)


def check_batches(args: DewConfig) -> Check:
    """Prompts, answers and optimizer steps per generation."""
    batches = args.batches
    if problem := args.misaligned():
        return warning("batches", problem.what, problem.remedy, **batches.facts())
    return ok("batches", f"{batches}.", **batches.facts())


def check_rewards(args: DewConfig, data: Data, draw: Draw, count: int, say: Say) -> list[Check]:
    """Gold answers, a sample of the model's answers, each reward on both, and the filter of dynamic sampling."""
    outcome, failures = attempt("outcome", outcome_index, data.names, args)
    if outcome is None:
        return [*failures, skipped("gold, rewards, answers", "No outcome reward decides which answers are correct.")]
    name, threshold, answers = data.names[outcome], args.build_algorithm().threshold, None
    others = ", ".join(other for other in data.names if other != name)
    says = f"{name} decides: answers above {threshold:g} are correct{'; added to it: ' * bool(others)}{others}."
    checks = [ok("outcome", says, outcome=outcome)]
    if callable(data.rewards[outcome]):
        checks += guarded("gold", check_golds, data, outcome, threshold)
    if count:
        say(f"sampling {count} answers ...")
        answers, failures = attempt("answers", draw, data, count)
        checks += failures if answers is None else check_answers(answers, int(args.max_completion_length or 0))
    else:
        checks.append(skipped("answers", "Skipped (--answers 0, or an earlier check failed)."))
    for i, reward in enumerate(data.names):
        checks += guarded(f"reward {reward}", check_reward, i, outcome, data, answers, threshold)
    return checks + guarded("filter", check_filter, args, outcome, data, answers)
