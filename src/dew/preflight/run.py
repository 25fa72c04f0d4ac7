"""All checks of a run on TRL, in order. A check that needs what another one found missing is skipped."""

from collections.abc import Callable, Mapping
from pathlib import Path

from dew.config import Run
from dew.engines.trl.settings import Parsed
from dew.preflight.answers import Evidence, check_answers, check_filter, check_reward, find_outcome, sample
from dew.preflight.check import Check, attempt, guarded, passed, skipped
from dew.preflight.data import Data, check_columns, check_golds, try_golds
from dew.preflight.data import read as read_data
from dew.preflight.installation import check_versions
from dew.preflight.machine import check_folder, free_device_memory
from dew.preflight.memory import check_context, check_memory, estimate, longest_prompt, read_shape
from dew.preflight.settings import check_disk
from dew.preflight.settings import read as read_settings

ANSWERS = 128
Say = Callable[[str], None]


def preflight(
    run: Run,
    typed: Mapping[str, str] | None = None,
    *,
    answers: int = ANSWERS,
    untrusted: bool = False,
    say: Say = print,
) -> list[Check]:
    """Every check of a run before it trains. `answers`: how many to sample; 0 samples none."""
    parsed, found = read_settings(run, typed, untrusted)
    checks = [check_versions(), *found]
    if parsed is None:
        why = "Data, rewards, model and disk are checked once the settings are valid."
        return [*checks, skipped("the rest", why)]
    checks += guarded("folder", check_folder, Path(parsed.args.output_dir))
    data, failures = attempt("data", read_data, parsed)
    if data is None:
        return [*checks, *failures, skipped("the rest", "There are no data to check.")]
    checks.append(check_columns(data))
    if checks[-1].status == "failed":
        return [*checks, skipped("the rest", "Gold answers, rewards, memory and a sample need the columns.")]
    checks += guarded("model", check_model, parsed, data)
    trainable = passed([check for check in checks if check.name not in ("folder", "disk")])
    return checks + check_rewards(parsed, data, answers if trainable else 0, say)


def check_model(parsed: Parsed, data: Data) -> list[Check]:
    """What follows from the model's config: context, memory, disk."""
    args, shape = parsed.args, read_shape(parsed)
    prompt = longest_prompt(parsed, data.rows)
    device, free = free_device_memory(args.use_cpu)
    return [
        check_context(shape, prompt, int(args.max_completion_length or 0)),
        check_memory(estimate(shape, args, prompt, free), shape, args, device, free),
        check_disk(args, shape, len(data.rows)),
    ]


def check_rewards(parsed: Parsed, data: Data, count: int, say: Say) -> list[Check]:
    """Gold answers, a sample of the model's answers, each reward on both, and the filter of dynamic sampling."""
    args = parsed.args
    found, failures = attempt("outcome", find_outcome, args, data)
    if found is None:
        return [*failures, skipped("gold, rewards, answers", "No outcome reward decides which answers are correct.")]
    outcome, check = found
    checks, golds, answers = [check], None, None
    reward = data.rewards[outcome]
    if callable(reward):
        golds, failures = attempt("gold", try_golds, reward, data, args.build_algorithm().threshold)
        checks += failures if golds is None else [check_golds(golds, data, data.names[outcome], reward)]
    if count:
        say(f"sampling {count} answers ...")
        answers, failures = attempt("answers", sample, parsed, data, count)
        checks += failures if answers is None else check_answers(answers, int(args.max_completion_length or 0))
    else:
        checks.append(skipped("answers", "None sampled: --answers 0, or a failed check above."))
    evidence = Evidence(args, data, outcome, golds, answers)
    for i, name in enumerate(data.names):
        checks += guarded(f"reward {name}", check_reward, i, evidence)
    return checks + guarded("filter", check_filter, evidence)
