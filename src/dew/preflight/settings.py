"""The settings of a run on TRL, and what follows from them: batches, checkpoints and their size on disk."""

import math
from collections.abc import Mapping
from pathlib import Path

from dew.config import Run
from dew.engines.trl.config import DewConfig
from dew.engines.trl.settings import Parsed, parse
from dew.errors import DewError, Problem
from dew.preflight.check import Check, from_problem, graded, ok, warning
from dew.preflight.machine import free_disk, size
from dew.preflight.memory import Shape, optimizer_bytes

ABOUT_BATCHES = ("groups of", "num_generations=")


def read(run: Run, typed: Mapping[str, str] | None, untrusted: bool = False) -> tuple[Parsed | None, list[Check]]:
    """The run as TRL parses it, or None and a failed check for each problem."""
    try:
        parsed = parse(run, typed, untrusted=untrusted)
    except DewError as error:
        return None, [from_problem(_subject(problem), problem) for problem in error.problems]
    return parsed, [ok("settings", f"{len(parsed.run.settings)} settings, all valid."), check_batches(parsed.args)]


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


def optimizer_steps(args: DewConfig, rows: int) -> int:
    if args.max_steps > 0:
        return int(args.max_steps)
    batches = args.batches
    prompts_per_step = batches.per_device * batches.processes * batches.accumulation / batches.answers
    return math.ceil(args.num_train_epochs * rows * args.num_iterations / prompts_per_step)


def checkpoints(args: DewConfig, steps: int) -> int:
    """How many checkpoints are on disk at once, including the one being written."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "no":
        return 0
    if strategy == "epoch":
        written = math.ceil(args.num_train_epochs)
    else:
        every = args.save_steps if args.save_steps >= 1 else max(1, args.save_steps * steps)
        written = max(1, math.ceil(steps / every))
    return min(written, args.save_total_limit + 1) if args.save_total_limit else written


def check_disk(args: DewConfig, shape: Shape, rows: int) -> Check:
    """Whether the checkpoints and the final model fit on the disk."""
    weights = 4.0 * shape.adapters if shape.adapters else shape.weight_bytes * shape.parameters
    state = 0.0 if args.save_only_model else shape.trained * optimizer_bytes(args.optim, shape.weight_bytes)
    count = checkpoints(args, optimizer_steps(args, rows))
    needed = count * (weights + state) + weights
    free = free_disk(Path(args.output_dir))
    facts = {"checkpoints": count, "bytes": round(needed), "free": free}
    each = f"{count} checkpoint{'s' * (count != 1)} of {size(weights + state)}"
    says = f"{each} and the model take {size(needed)}; {size(free)} free."
    remedy = "Set save_total_limit: 2, a larger save_steps, or an output_dir on a larger disk."
    return graded("disk", says, remedy, warn=needed > 0.9 * free, fail=needed > free, **facts)
