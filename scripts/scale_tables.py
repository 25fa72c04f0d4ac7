"""The tables of memory and time in docs/scale.md: the paper's runs on 8, 16 and 64 GPUs.

python scripts/scale_tables.py     prints both tables; a test compares them with the page
"""

from dew.engines.verl.recipe import Batches
from dew.preflight.machine import GB
from dew.preflight.verl import GPUS, SHAPES, Job, estimate, fits, pace

RUNS = [(model, gpus) for model in ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B") for gpus in (8, 16, 64)]
TERMS = ("weights", "gradients", "adam", "gathered", "activations", "logits", "entropy")
"""Column titles for the terms of training, in the order of `estimate`."""


def paper_job(model: str, gpus: int) -> Job:
    """The paper's run, as in recipes/paper, on this many GPUs."""
    parallel = 1 if model.endswith("7B") else 4
    batches = Batches(128, mini=128, answers=16, nodes=gpus // 8, gpus_per_node=8, tensor_parallel=parallel)
    return Job(
        shape=SHAPES[model],
        batches=batches,
        prompt_limit=2048,
        answer_limit=4096,
        steps=210,
        sampler_share=0.4,
    )


def memory_table() -> str:
    """GB on each GPU."""
    heads = [*TERMS, "training", *(f"sampling, {gpu.name}" for gpu in GPUS), *(f"fits {gpu.name}" for gpu in GPUS)]
    lines = [f"| model, GPUs | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for model, gpus in RUNS:
        job = paper_job(model, gpus)
        terms = list(estimate(job, GPUS[0]).training.values())
        sampling = [sum(estimate(job, gpu).generation.values()) for gpu in GPUS]
        cells = [f"{number / GB:.1f}" for number in (*terms, sum(terms), *sampling)]
        cells += ["yes" if fits(job, gpu) else "**no**" for gpu in GPUS]
        lines.append(f"| {model.removeprefix('Qwen/')}, {gpus} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pace_table() -> str:
    """Seconds per step, tokens per second and hours at two mean lengths."""
    lines = [
        "| model, GPUs | GPU | mean answer | sampling s | training s | tokens/s | per GPU | hours, 210 steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, gpus in RUNS:
        job = paper_job(model, gpus)
        for gpu in (gpu for gpu in GPUS if fits(job, gpu)):
            for mean in (1024, 4096):
                found = pace(job, gpu, mean)
                speed = found["tokens_per_second"]
                lines.append(
                    f"| {model.removeprefix('Qwen/')}, {gpus} | {gpu.name} | {mean:,} | {found['generation']:.0f} | "
                    f"{found['training']:.0f} | {speed:,.0f} | {speed / gpus:,.0f} | {found['hours']:.1f} |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{memory_table()}\n\n{pace_table()}")
