"""All checks of a run on TRL, in order. A check that needs what another one found missing is skipped."""

from collections.abc import Callable, Mapping
from pathlib import Path

from dew.config import Run
from dew.engines.trl.config import DewConfig
from dew.engines.trl.rewards import check_weights, outcome_index
from dew.engines.trl.settings import Parsed, parse
from dew.errors import DewError, Problem
from dew.preflight.answers import check_answers, check_filter, check_reward, sample
from dew.preflight.check import Check, attempt, from_problem, guarded, ok, passed, skipped, warning
from dew.preflight.data import Data, check_columns, check_golds, read_data
from dew.preflight.machine import check_folder, check_versions
from dew.preflight.memory import check_model

ABOUT_BATCHES = ("groups of", "num_generations=")
"""Words of the problems that are reported as `batches` instead of `settings`."""
Say = Callable[[str], None]


def preflight(
    run: Run,
    typed: Mapping[str, str] | None = None,
    *,
    answers: int = 128,
    untrusted: bool = False,
    say: Say = print,
) -> list[Check]:
    """Every check of a run before it trains. `answers`: how many to sample; 0 samples none."""
    checks = [check_versions()]
    try:
        parsed = parse(run, typed, untrusted=untrusted)
    except DewError as error:
        checks += [from_problem(_subject(problem), problem) for problem in error.problems]
        return [*checks, skipped("the rest", "Data, rewards, model and disk are checked once the settings are valid.")]
    checks += [ok("settings", f"{len(parsed.run.settings)} settings, all valid."), check_batches(parsed.args)]
    checks += guarded("folder", check_folder, Path(parsed.args.output_dir))
    data, failures = attempt("data", read_data, parsed)
    if data is None:
        return [*checks, *failures, skipped("the rest", "There are no data to check.")]
    checks.append(check_columns(data))
    if checks[-1].status == "failed":
        return [*checks, skipped("the rest", "Gold answers, rewards, memory and a sample need the columns.")]
    checks += guarded("model", check_model, parsed, data.rows)
    trainable = passed([check for check in checks if check.name not in ("folder", "disk")])
    return checks + check_rewards(parsed, data, answers if trainable else 0, say)


def _subject(problem: Problem) -> str:
    return "batches" if any(words in str(problem) for words in ABOUT_BATCHES) else "settings"


def check_batches(args: DewConfig) -> Check:
    """Completions, prompts and optimizer steps per generation."""
    batches = args.batches
    facts = {**vars(batches), "completions": batches.completions, "prompts": batches.completions // batches.answers}
    if batches.micro_batches % batches.accumulation == 0:
        return ok("batches", f"{batches}.", **facts)
    nearest = -(-batches.micro_batches // batches.accumulation) * batches.accumulation
    says = f"{batches}: optimizer steps do not line up with generations."
    remedy = f"Set steps_per_generation to a multiple of gradient_accumulation_steps, such as {nearest}."
    return warning("batches", says, remedy, **facts)


def check_rewards(parsed: Parsed, data: Data, count: int, say: Say) -> list[Check]:
    """Gold answers, a sample of the model's answers, each reward on both, and the filter of dynamic sampling."""
    args = parsed.args
    outcome, failures = attempt("outcome", find_outcome, args, data.names)
    if outcome is None:
        return [*failures, skipped("gold, rewards, answers", "No outcome reward decides which answers are correct.")]
    name, threshold, answers = data.names[outcome], args.build_algorithm().threshold, None
    others = ", ".join(other for other in data.names if other != name)
    says = f"{name} decides: answers above {threshold:g} are correct{'; added to it: ' * bool(others)}{others}."
    checks = [ok("outcome", says, outcome=outcome)]
    if callable(data.rewards[outcome]):
        checks += guarded("gold", check_golds, data.rewards[outcome], name, data, threshold)
    if count:
        say(f"sampling {count} answers ...")
        answers, failures = attempt("answers", sample, parsed, data, count)
        checks += failures if answers is None else check_answers(answers, int(args.max_completion_length or 0))
    else:
        checks.append(skipped("answers", "None sampled: --answers 0, or a failed check above."))
    for i, reward in enumerate(data.names):
        checks += guarded(f"reward {reward}", check_reward, i, outcome, data, answers, threshold)
    return checks + guarded("filter", check_filter, args, outcome, data, answers)


def find_outcome(args: DewConfig, names: list[str]) -> int:
    """Index of the reward that decides whether an answer is correct."""
    needed = not args.build_algorithm().engine_loss
    index = outcome_index(names, args.outcome_reward, needed)
    if needed:
        check_weights(names, args.reward_weights, index)
    return index
