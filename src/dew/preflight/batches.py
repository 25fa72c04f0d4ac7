"""The settings as a whole, and the arithmetic of batches among them."""

from collections.abc import Mapping

from dew.config import Run
from dew.engines.trl.launch import Parsed, parse
from dew.errors import DewError
from dew.preflight.check import Check, from_text, ok, warning

ABOUT_BATCHES = ("whole number of groups", "generation_batch_size=", "num_generations=")


def read(run: Run, typed: Mapping[str, str] | None, untrusted: bool = False) -> tuple[Parsed | None, list[Check]]:
    """The run as the engine sees it, or every reason why it cannot."""
    try:
        parsed = parse(run, typed, untrusted=untrusted)
    except DewError as error:
        return None, [from_text(_subject(problem), problem) for problem in _problems(str(error))]
    return parsed, [ok("settings", f"{len(parsed.run.settings)} settings, all known."), check(parsed)]


def check(parsed: Parsed) -> Check:
    """Completions, prompts and optimizer steps of one generation."""
    batches = parsed.args.batches
    facts = {**vars(batches), "completions": batches.completions, "prompts": batches.completions // batches.answers}
    if batches.micro_batches % batches.accumulation:
        says = f"{batches}: the last optimizer step of a generation is cut short by the next."
        nearest = -(-batches.micro_batches // batches.accumulation) * batches.accumulation
        remedy = f"Set steps_per_generation to a multiple of gradient_accumulation_steps, such as {nearest}."
        return warning("batches", says, remedy, **facts)
    return ok("batches", f"{batches}.", **facts)


def _problems(text: str) -> list[str]:
    """A list of problems one by one, without its heading; anything else is one problem."""
    listed = [line for line in text.splitlines() if line.startswith("- ")]
    return listed or [text]


def _subject(problem: str) -> str:
    return "batches" if any(words in problem for words in ABOUT_BATCHES) else "settings"
