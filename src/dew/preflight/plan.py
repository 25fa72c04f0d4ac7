"""What `dew train --dry-run` prints: the run in a few lines, with memory and time by arithmetic."""

import math
from dataclasses import replace

from dew.engines.trl.config import DewConfig
from dew.engines.trl.settings import Parsed
from dew.errors import DewError
from dew.preflight.memory import Shape, estimate, optimizer_steps, read_shape, weight_bytes
from dew.preflight.verl import GPUS, SHAPES, TYPICAL_ANSWER, TYPICAL_PROMPT, Gpu, lora_parameters, step_seconds


def plan(parsed: Parsed) -> dict[str, str]:
    """Heading -> text, for a table."""
    args = parsed.args
    found = {
        "model": parsed.model.model_name_or_path,
        "data": parsed.data,
        "algorithm": args.build_algorithm().label,
        "batches": str(args.batches),
    }
    steps = optimizer_steps(args, parsed.run.problems if parsed.run.task else 0)
    generations = math.ceil(steps * args.batches.accumulation / (args.batches.micro_batches * args.num_iterations))
    limit, answers = int(args.max_completion_length or 0), generations * args.batches.completions
    if steps:  # else the number of problems is known only when the data are read
        most = "" if args.max_steps > 0 else "at most "  # a file may have fewer problems than the run asks for
        found["length"] = f"{most}{steps:,} optimizer steps on {generations:,} generations: {answers:,} completions"
        found["length"] += f" of at most {limit} tokens"
    try:
        shape = _shape(parsed)
    except DewError:
        return {**found, "memory, time": "not estimated: the model is neither local nor one whose shape dew knows"}
    total = estimate(shape, args, TYPICAL_PROMPT, GPUS[-1].memory if args.use_vllm else 0.0).total / 2**30
    found["memory"] = f"about {total:.1f} GiB on each device, for prompts of {TYPICAL_PROMPT} tokens"
    if parsed.run.settings.get("use_cpu"):  # not args.use_cpu, which a dry run sets where there is no GPU
        return {**found, "time": "`dew preflight` measures how long a generation takes here"}
    if steps:
        hours = ", ".join(f"{_hours(shape, args, generations, gpu):.1f} h on {gpu.name}" for gpu in GPUS)
        share = f"if answers reach {TYPICAL_ANSWER:.0%} of the limit on average"
        found["time"] = f"about {hours}, {share} (arithmetic, see docs/scale.md; `dew preflight` measures)"
    return found


def _shape(parsed: Parsed) -> Shape:
    known = SHAPES.get(parsed.model.model_name_or_path)
    if known is None:
        return read_shape(parsed)
    rank = int(parsed.model.lora_r) if parsed.model.use_peft else 0
    return replace(known, weight_bytes=weight_bytes(parsed, None), adapters=lora_parameters(known, rank))


def _hours(shape: Shape, args: DewConfig, generations: int, gpu: Gpu) -> float:
    """All answers of a process are decoded at once, then trained on."""
    answers, limit = args.batches.completions / args.batches.processes, int(args.max_completion_length or 0)
    p, n, passes = TYPICAL_PROMPT, TYPICAL_ANSWER * limit, args.num_iterations
    return generations * sum(step_seconds(shape, gpu, answers, p, n, limit, running=answers, passes=passes)) / 3600
