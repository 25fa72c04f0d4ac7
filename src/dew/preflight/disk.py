"""Where the run writes: is there room for its checkpoints?"""

import math
from pathlib import Path

from dew.engines.trl.config import DewConfig
from dew.preflight.check import Check, failed, ok, warning
from dew.preflight.machine import free_disk, size
from dew.preflight.memory import optimizer_bytes
from dew.preflight.model import Model


def optimizer_steps(args: DewConfig, rows: int) -> int:
    if args.max_steps > 0:
        return int(args.max_steps)
    batches = args.batches
    per_step = batches.per_device * batches.processes * batches.accumulation / batches.answers
    return math.ceil(args.num_train_epochs * rows * args.num_iterations / per_step)


def checkpoints(args: DewConfig, steps: int) -> int:
    """How many lie on the disk at once, the one that is being written included."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "no":
        return 0
    if strategy == "epoch":
        written = math.ceil(args.num_train_epochs)
    else:
        every = args.save_steps if args.save_steps >= 1 else max(1, args.save_steps * steps)
        written = max(1, math.ceil(steps / every))
    return min(written, args.save_total_limit + 1) if args.save_total_limit else written


def check_disk(args: DewConfig, model: Model, rows: int) -> Check:
    weights = model.weight_bytes * model.parameters if model.trained == model.parameters else 4.0 * model.trained
    state = 0.0 if args.save_only_model else model.trained * optimizer_bytes(args.optim, model.weight_bytes)
    count = checkpoints(args, optimizer_steps(args, rows))
    needed = count * (weights + state) + weights
    free = free_disk(Path(args.output_dir))
    facts = {"checkpoints": count, "bytes": round(needed), "free": free}
    each = f"{count} checkpoint{'s' * (count != 1)} of {size(weights + state)}"
    says = f"{each} and the model: {size(needed)}; {size(free)} are free."
    if needed <= 0.9 * free:
        return ok("disk", says, **facts)
    remedy = "Set save_total_limit: 2, a larger save_steps, or an output_dir on a larger disk."
    return (warning if needed <= free else failed)("disk", says, remedy, **facts)
