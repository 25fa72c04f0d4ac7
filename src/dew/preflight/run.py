"""All checks of one run, in the order in which they can be made; what cannot be made is said to be skipped."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dew.config import Run
from dew.engines.trl.launch import Parsed
from dew.errors import DewError
from dew.preflight import answers as sampling
from dew.preflight import batches, data, disk, filter, gold, memory, model, rewards, versions
from dew.preflight.check import Check, failed, from_text, guarded, passed, skipped
from dew.preflight.folder import check_folder
from dew.preflight.machine import free_device_memory
from dew.preflight.probe import score

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
    """Everything that can be known of a run before it trains. `answers`: how many to sample; 0 samples none."""
    checks = [versions.check()]
    parsed, found = batches.read(run, typed, untrusted)
    checks += found
    if parsed is None:
        return [
            *checks,
            skipped("the rest", "Data, rewards, model and disk are looked at when the settings are right."),
        ]
    return checks + _of_the_run(parsed, answers, say)


def _of_the_run(parsed: Parsed, count: int, say: Say) -> list[Check]:
    args = parsed.args
    checks = guarded("folder", lambda: [check_folder(Path(args.output_dir))])
    try:
        problems, found = data.read(parsed)
    except DewError as error:
        return [*checks, from_text("data", str(error)), skipped("the rest", "There are no data to look at.")]
    checks += found
    if not passed(found):
        return [*checks, skipped("the rest", "Gold answers, rewards, memory and a sample need the columns.")]
    checks += _of_the_model(parsed, problems)
    fits = all(check.status != "failed" or check.name in ("folder", "disk") for check in checks)
    return checks + _of_the_rewards(parsed, problems, count if fits else 0, say)


def _of_the_model(parsed: Parsed, problems: data.Data) -> list[Check]:
    """What follows from the model's configuration."""
    args = parsed.args

    def look() -> list[Check]:
        shape = model.read(parsed)
        prompt = model.longest_prompt(parsed, problems)
        device, free = free_device_memory(args.use_cpu)
        found = memory.estimate(shape, args, prompt, free)
        return [
            model.check_context(shape, prompt, int(args.max_completion_length or 0)),
            memory.check(found, shape, args, device, free),
            disk.check_disk(args, shape, len(problems.rows)),
        ]

    return guarded("model", look)


def _of_the_rewards(parsed: Parsed, problems: data.Data, count: int, say: Say) -> list[Check]:
    """Gold answers, a sample of the model's, each reward on both, and what the filter looks at."""
    args = parsed.args
    threshold = args.build_algorithm().threshold
    try:
        outcome, found = filter.find_outcome(args, problems)
    except DewError as error:
        remedy = "Name as outcome_reward the one that is 1 for correct and 0 for wrong answers, with weight 1."
        undecided = skipped("gold, rewards, answers", "Nothing decides what is correct.")
        return [failed("outcome", str(error), remedy), undecided]
    checks = [found]
    decides: Any = problems.rewards[outcome]
    golds: gold.Golds | None = None
    drawn: sampling.Answers | None = None

    def try_golds() -> list[Check]:
        nonlocal golds
        golds = gold.judge(decides, problems, threshold)
        return [gold.check(golds, problems, problems.names[outcome], decides)]

    def draw() -> list[Check]:
        nonlocal drawn
        say(f"sampling {count} answers ...")
        drawn = sampling.sample(parsed, problems, count)
        return sampling.check(drawn, int(args.max_completion_length or 0))

    if callable(decides):
        checks += guarded("gold", try_golds)
    checks += (
        guarded("answers", draw) if count else [skipped("answers", "None sampled: --answers 0, or a failure above.")]
    )
    for i, name in enumerate(problems.names):
        checks += guarded(
            f"reward {name}",
            lambda i=i: rewards.check(i, outcome, problems, golds, drawn, threshold),  # type: ignore[misc]
        )
    return checks + guarded("filter", lambda: [_filter(parsed, problems, outcome, golds, drawn)])


def _filter(
    parsed: Parsed, problems: data.Data, outcome: int, golds: gold.Golds | None, drawn: sampling.Answers | None
) -> Check:
    probes: list[float | None] = []
    if golds is not None:
        rows = problems.rows[: rewards.PROBED]
        texts = [*golds.texts[: rewards.PROBED], *[""] * len(rows)]
        probes = score(problems.rewards[outcome], texts, [*rows, *rows], problems)
    return filter.check(parsed.args, problems.names[outcome], probes, drawn)
