"""The tables of memory and time in docs/scale.md: the paper's runs on 8, 16 and 64 GPUs.

    python scripts/scale_tables.py     prints both tables; a test compares them with the page

Bytes on each GPU, in bf16: P parameters, L layers of width D with feed-forward width I, queries Q and keys K wide; V
vocabulary entries. N GPUs share weights, gradients and optimizer state evenly (FSDP2); m tokens are in a micro-batch of
one GPU; A = 16 D + 6 Q + 4 K + 8 I is what a layer keeps of a token for its backward pass.

    training     weights, gradients, optimizer: 4 + 4 + 8 bytes · P/N     2 + 2 + 4 with model_dtype bf16
                 gathered    2 · (2 layers + embedding and head)  bf16, one layer in use and one prefetched
                 activations m · (2 D L + A)                      gradient checkpointing
                 logits      m · V · 4                            bf16, and their gradient
                 entropy     2048 · V · 12                        a chunk in float32, its softmax, their product
    generation   the part of weights and optimizer that is not offloaded, and the sampler's share of the GPU;
                 a sampler spans t GPUs: weights 2 P/t, the rest is KV cache

Seconds of a step with R answers of mean length n to prompts of length p:

    training     R (p + n) · (2 + 8 E) P / (N · peak · 0.4): 2 P for the old policy; in each of E passes 6 P forward
                 and backward, 2 P recomputed
    generation   R n / (tokens per second of all samplers), at least the longest answer by itself. Each decoding step
                 of a sampler reads its weights and the cache of its running answers at 0.6 of the memory bandwidth.

0.4 and 0.6 are assumptions; docs/scale.md compares the result with published runs.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from dew.compare.verdicts import markdown_table
from dew.engines.verl.config import FSDP
from dew.engines.verl.launch import MICRO_BATCH, SAMPLER_GPUS, Launch, prepare
from dew.preflight.machine import GB
from dew.run.config import flat, read_run
from dew.run.settings import MODEL, ROLLOUT

Terms = dict[str, float]


@dataclass(frozen=True)
class Shape:
    """Dimensions of a transformer in bf16."""

    parameters: float
    layers: int
    width: int
    inner: int
    query: int
    key: int
    vocabulary: int

    @property
    def cache_bytes(self) -> int:
        """KV cache per token."""
        return 4 * self.key * self.layers

    @property
    def layer_bytes(self) -> int:
        """A, per token."""
        return 16 * self.width + 6 * self.query + 4 * self.key + 8 * self.inner

    def activation_bytes(self, checkpointing: bool) -> int:
        """Per token, of all layers."""
        return 2 * self.width * self.layers + self.layer_bytes if checkpointing else self.layer_bytes * self.layers


RECIPES = Path(__file__).parents[1] / "recipes" / "paper"
RUNS = [(model, gpus) for model in ("7b", "32b") for gpus in (8, 16, 64)]
TERMS = ("weights", "gradients", "adam", "gathered", "activations", "logits", "entropy")
"""Column titles for the terms of training, in the order of `estimate`."""
SHAPES = {
    "7b": Shape(7.616e9, 28, 3584, 18944, 3584, 512, 152064),
    "32b": Shape(32.764e9, 64, 5120, 27648, 5120, 1024, 152064),
}
"""Of Qwen2.5, from the models' config files."""
CHUNK = 2048
"""Tokens whose entropy verl computes at a time."""
USABLE = 0.92
"""Share of a GPU's memory; CUDA, NCCL and fragmentation take the rest."""
MFU, BANDWIDTH_SHARE = 0.4, 0.6
SEQUENCES = 256
"""Maximum number of answers that a sampler decodes at once: verl's max_num_seqs."""
PROMPT = 200
"""Assumed mean length of a prompt."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float
    peak: float
    """Dense bf16 operations per second."""
    bandwidth: float


GPUS = (Gpu("80 GB (H100)", 80 * GB, 989e12, 3.35e12), Gpu("141 GB (H200)", 141 * GB, 989e12, 4.8e12))


def paper_run(model: str, gpus: int, **verl: float) -> tuple[Launch, Shape]:
    """The paper's run on this many GPUs; `verl` changes keys, with __ for the dots."""
    run = read_run(RECIPES / f"qwen2.5-{model}.yaml")
    own = {"trainer.nnodes": gpus // 8, "trainer.n_gpus_per_node": 8}
    own |= {key.replace("__", "."): value for key, value in verl.items()}
    launch = prepare(replace(run, verl={**flat(run.verl), **own}))
    return launch, SHAPES[model]


def estimate(launch: Launch, shape: Shape, gpu_memory: float) -> tuple[Terms, Terms]:
    """Bytes on each GPU in the backward pass, and while answers are sampled, when gradients are freed."""
    N, m, w = launch.batches.processes, launch[MICRO_BATCH], 4 if launch[f"{FSDP}.model_dtype"] == "fp32" else 2
    on_gpu = not launch[f"{FSDP}.offload_policy"]  # else weights, gradients and optimizer stay in host memory
    share = shape.parameters / N * on_gpu
    ends = 2 * shape.vocabulary * shape.width
    layer = (shape.parameters - ends) / shape.layers
    training = {
        "weights": w * share,
        "gradients": w * share,
        "optimizer": 2 * w * share,
        "gathered": 2 * (2 * layer + ends) if N > 1 else 0.0,
        "activations": m * shape.activation_bytes(bool(launch[f"{MODEL}.enable_gradient_checkpointing"])),
        "logits": 4 * m * shape.vocabulary,
        "entropy": 12 * min(CHUNK, m) * shape.vocabulary,
    }
    generation = {
        "weights": training["weights"] * (not launch[f"{FSDP}.param_offload"]),
        "optimizer": training["optimizer"] * (not launch[f"{FSDP}.optimizer_offload"]),
        "sampler": sampler_share(launch) * gpu_memory,
    }
    return training, generation


def sampler_share(launch: Launch) -> float:
    return float(launch[f"{ROLLOUT}.gpu_memory_utilization"] or 0.5)


def cache_tokens(launch: Launch, shape: Shape, gpu_memory: float) -> float:
    """Tokens in the KV cache of one sampler."""
    t = launch[SAMPLER_GPUS]
    room = sampler_share(launch) * gpu_memory - 2 * shape.parameters / t
    return max(0.0, room) * t / shape.cache_bytes


def fits(launch: Launch, shape: Shape, gpu_memory: float) -> bool:
    """In both phases, with KV cache for at least one answer of full length."""
    longest = launch["data.max_prompt_length"] + launch["data.max_response_length"]
    largest = max(sum(terms.values()) for terms in estimate(launch, shape, gpu_memory))
    return cache_tokens(launch, shape, gpu_memory) >= longest and largest <= USABLE * gpu_memory


def pace(launch: Launch, s: Shape, gpu: Gpu, n: float) -> dict[str, float]:
    """Seconds per step of both phases, tokens per second, hours of the run, for answers of mean length n."""
    t, batches, limit = launch[SAMPLER_GPUS], launch.batches, launch["data.max_response_length"]
    answers, samplers = batches.sampled, max(1, batches.processes // t)
    running = max(1.0, min(SEQUENCES, answers / samplers, cache_tokens(launch, s, gpu.memory) / (PROMPT + n)))
    seconds = step_seconds(s, gpu, answers / samplers, PROMPT, n, limit, running=running, passes=batches.passes, gpus=t)
    speed, hours = answers * (PROMPT + n) / sum(seconds), launch["trainer.total_training_steps"] * sum(seconds) / 3600
    return {"generation": seconds[0], "training": seconds[1], "tokens_per_second": speed, "hours": hours}


def step_seconds(
    s: Shape, gpu: Gpu, answers: float, p: float, n: float, limit: int, *, running: float, passes: int, gpus: int = 1
) -> tuple[float, float]:
    """Generation and training of one sampler's answers on its GPUs. `running` answers are decoded at once."""
    weights, bandwidth = 2 * s.parameters, gpus * gpu.bandwidth * BANDWIDTH_SHARE
    decoding_step = (weights + running * (p + n / 2) * s.cache_bytes) / bandwidth
    generation = max(answers / running * n * decoding_step, limit * weights / bandwidth)
    return generation, answers * (p + n) * (2 + 8 * passes) * s.parameters / (gpus * gpu.peak * MFU)


def memory_table() -> str:
    """GB on each GPU."""
    heads = [*TERMS, "training", *(f"sampling, {gpu.name}" for gpu in GPUS), *(f"fits {gpu.name}" for gpu in GPUS)]
    rows = []
    for model, gpus in RUNS:
        job = paper_run(model, gpus)
        terms = list(estimate(*job, GPUS[0].memory)[0].values())
        sampling = [sum(estimate(*job, gpu.memory)[1].values()) for gpu in GPUS]
        cells = [f"{number / GB:.1f}" for number in (*terms, sum(terms), *sampling)]
        cells += ["yes" if fits(*job, gpu.memory) else "**no**" for gpu in GPUS]
        rows.append([f"Qwen2.5-{model.upper()}, {gpus}", *cells])
    return markdown_table(["model, GPUs", *heads], rows)


def pace_table() -> str:
    """Seconds per step, tokens per second and hours at two mean lengths."""
    head = "model, GPUs", "GPU", "mean answer", "sampling s", "training s", "tokens/s", "per GPU", "hours, 210 steps"
    rows = []
    for model, gpus in RUNS:
        job = paper_run(model, gpus)
        for gpu in (gpu for gpu in GPUS if fits(*job, gpu.memory)):
            for mean in (1024, 4096):
                found = pace(*job, gpu, mean)
                speed = found["tokens_per_second"]
                seconds = [f"{found[phase]:.0f}" for phase in ("generation", "training")]
                rates = [f"{speed:,.0f}", f"{speed / gpus:,.0f}", f"{found['hours']:.1f}"]
                rows.append([f"Qwen2.5-{model.upper()}, {gpus}", gpu.name, f"{mean:,}", *seconds, *rates])
    return markdown_table(head, rows)


if __name__ == "__main__":
    print(f"{memory_table()}\n{pace_table()}")
