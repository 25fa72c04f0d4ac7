"""What a run on verl takes, by arithmetic: bytes on each GPU, tokens per second, hours.

P parameters, L layers of width D, feed-forward width I, queries Q and keys K wide, V vocabulary entries. N GPUs share
weights, gradients and Adam's moments evenly (FSDP2); m tokens are in a micro-batch of one GPU.

    training     weights 4 P/N + gradients 4 P/N + Adam 8 P/N     float32; 2 + 2 + 4 with model_dtype bf16
                 gathered    2 · (2 layers + embedding and head)  bf16, one layer in use and one on its way
                 activations m · (2 D L + A)                      checkpointed: inputs of layers, one layer redone
                 logits      m · V · 4                            bf16 and their gradient; verl holds both
                 entropy     2048 · V · 12                        a chunk in float32, its softmax, their product
    generation   what is not offloaded of 16 P/N, and the sampler's share of the GPU
                 a sampler spans t GPUs: weights 2 P/t, the rest is cache, 4 K L/t bytes per token

    A is what one layer keeps for its backward pass per token, bf16: 16 D + 6 Q + 4 K + 8 I

Seconds of a step with R answers of mean length n to prompts of length p:

    training     R (p + n) · 10 P / (N · peak · 0.4)      6 P forward and backward, 2 P redone, 2 P for the old policy
    generation   R n / (tokens per second of all samplers); each step of a sampler reads its weights and the cache of
                 the answers at hand once, at 0.6 of the memory's bandwidth, and not before the longest answer is done

0.4 and 0.6 are assumptions. docs/scale.md holds the result against published runs.
"""

from dataclasses import asdict, dataclass
from typing import Any

from dew.engines.verl.launch import Launch
from dew.engines.verl.settings import ACTOR, FSDP, MODEL, ROLLOUT

GB = 1e9
CHUNK = 2048
"""Rows whose entropy verl computes at a time."""
USABLE = 0.92
"""Of a GPU's memory: CUDA, NCCL and fragments take the rest."""
MFU, BANDWIDTH_SHARE = 0.4, 0.6
SEQUENCES = 256
"""Answers that a sampler has at hand at once: verl's max_num_seqs."""
TYPICAL_ANSWER, TYPICAL_PROMPT = 0.25, 200
"""Mean length of an answer as a share of the limit, and of a prompt in tokens, where nothing else is said."""


@dataclass(frozen=True)
class Shape:
    """A transformer's measures."""

    parameters: float
    layers: int
    width: int
    inner: int
    query: int
    key: int
    vocabulary: int

    @property
    def layer_bytes(self) -> int:
        """A, in bf16."""
        return 16 * self.width + 6 * self.query + 4 * self.key + 8 * self.inner

    @property
    def layer_parameters(self) -> float:
        return (self.parameters - 2 * self.vocabulary * self.width) / self.layers

    @property
    def cache_bytes(self) -> int:
        """Of one token, in bf16."""
        return 4 * self.key * self.layers


SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(0.494e9, 24, 896, 4864, 896, 128, 151936),
    "Qwen/Qwen2.5-1.5B-Instruct": Shape(1.544e9, 28, 1536, 8960, 1536, 256, 151936),
    "Qwen/Qwen2.5-7B": Shape(7.616e9, 28, 3584, 18944, 3584, 512, 152064),
    "Qwen/Qwen2.5-32B": Shape(32.764e9, 64, 5120, 27648, 5120, 1024, 152064),
}
"""From the models' configuration files, so that a plan needs no download."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float
    peak: float
    """bf16 operations per second, dense."""
    bandwidth: float


H100 = Gpu("80 GB (H100)", 80 * GB, 989e12, 3.35e12)
H200 = Gpu("141 GB (H200)", 141 * GB, 989e12, 4.8e12)
GPUS = (H100, H200)


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is shared out."""

    shape: Shape
    gpus: int
    prompts: int
    answers: int
    prompt_limit: int
    answer_limit: int
    steps: int
    tensor_parallel: int = 1
    micro_batch: int = 16384
    sampler_share: float = 0.5
    weight_bytes: int = 4
    param_offload: bool = False
    optimizer_offload: bool = False
    """Both: on the host while answers are sampled."""
    offload_policy: bool = False
    """Weights, gradients and moments live on the host; slow, and counted as no time here."""
    checkpointing: bool = True
    trained: float = 1.0
    """Share of the parameters with a gradient: 1, or LoRA's."""


def training_bytes(job: Job) -> dict[str, float]:
    """On each GPU in the backward pass."""
    s, w, m = job.shape, job.weight_bytes, job.micro_batch
    P, N = s.parameters * (not job.offload_policy), job.gpus
    kept = 2 * s.width * s.layers + s.layer_bytes if job.checkpointing else s.layer_bytes * s.layers
    return {
        "weights": w * P / N,
        "gradients": w * P * job.trained / N,
        "adam": 2 * w * P * job.trained / N,
        "gathered": 2 * (2 * s.layer_parameters + 2 * s.vocabulary * s.width) if N > 1 else 0.0,
        "activations": m * kept,
        "logits": 4 * m * s.vocabulary,
        "entropy": 12 * min(CHUNK, m) * s.vocabulary,
    }


def generation_bytes(job: Job, gpu: Gpu) -> dict[str, float]:
    """On each GPU while answers are sampled; gradients are gone."""
    held = training_bytes(job)
    return {
        "weights": 0.0 if job.param_offload else held["weights"],
        "adam": 0.0 if job.optimizer_offload else held["adam"],
        "sampler": job.sampler_share * gpu.memory,
    }


def cache_tokens(job: Job, gpu: Gpu) -> float:
    """Tokens that the cache of one sampler holds."""
    s, t = job.shape, job.tensor_parallel
    room = job.sampler_share * gpu.memory - 2 * s.parameters / t
    return max(0.0, room) * t / s.cache_bytes


@dataclass(frozen=True)
class Fit:
    """One job on one kind of GPU."""

    gpu: Gpu
    training: float
    generation: float
    largest: str
    cache: float
    """Tokens of cache in one sampler."""
    fits: bool


def fit(job: Job, gpu: Gpu) -> Fit:
    training, generation = training_bytes(job), generation_bytes(job, gpu)
    most = max(sum(training.values()), sum(generation.values()))
    cache = cache_tokens(job, gpu)
    return Fit(
        gpu,
        sum(training.values()),
        sum(generation.values()),
        max(training, key=lambda name: training[name]),
        cache,
        most <= USABLE * gpu.memory and cache >= job.prompt_limit + job.answer_limit,
    )


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, tokens per second of the whole, hours of the run."""

    generation: float
    training: float
    tokens_per_second: float
    hours: float


def pace(job: Job, gpu: Gpu, mean_answer: float | None = None) -> Pace:
    s, t = job.shape, job.tensor_parallel
    n, p = mean_answer or TYPICAL_ANSWER * job.answer_limit, min(TYPICAL_PROMPT, job.prompt_limit)
    R = job.prompts * job.answers
    training = R * (p + n) * 10 * s.parameters / (job.gpus * gpu.peak * MFU)
    samplers = max(1, job.gpus // t)
    at_hand = max(1.0, min(SEQUENCES, R / samplers, cache_tokens(job, gpu) / (p + n)))
    reads = (2 * s.parameters + at_hand * (p + n / 2) * s.cache_bytes) / t
    turn = reads / (gpu.bandwidth * BANDWIDTH_SHARE)
    alone = 2 * s.parameters / t / (gpu.bandwidth * BANDWIDTH_SHARE)
    generation = max(R * n / samplers / at_hand * turn, job.answer_limit * alone)
    step = generation + training
    return Pace(generation, training, R * (p + n) / step, job.steps * step / 3600)


# ── a run's own plan ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Plan:
    """The plan of a translated recipe; None where the model's measures are not known here."""

    model: str
    job: Job | None

    def lines(self) -> list[str]:
        if self.job is None:
            return [f"No plan: the measures of {self.model} are not known here."]
        return [self._line(gpu) for gpu in GPUS]

    def _line(self, gpu: Gpu) -> str:
        assert self.job is not None
        found, speed = fit(self.job, gpu), pace(self.job, gpu)
        verdict = "fits" if found.fits else f"does NOT fit ({found.largest} takes most)"
        return (
            f"Plan, {self.job.gpus} x {gpu.name}: {verdict}; training {found.training / GB:.0f} GB, sampling "
            f"{found.generation / GB:.0f} GB each; about {speed.hours:.1f} h at a mean answer of "
            f"{TYPICAL_ANSWER * self.job.answer_limit:.0f} tokens (arithmetic, docs/scale.md)."
        )

    def to_dict(self) -> dict[str, Any]:
        if self.job is None:
            return {"model": self.model}
        per_gpu = {
            gpu.name: {
                "fits": fit(self.job, gpu).fits,
                "training_bytes": training_bytes(self.job),
                "generation_bytes": generation_bytes(self.job, gpu),
                **asdict(pace(self.job, gpu)),
            }
            for gpu in GPUS
        }
        return {"model": self.model, "gpus": self.job.gpus, "on": per_gpu}


def plan_of(launch: Launch) -> Plan:
    get, batches = launch.__getitem__, launch.batches
    model = get(f"{MODEL}.path")
    shape = SHAPES.get(model) or local_shape(model)
    if shape is None:
        return Plan(model, None)
    rank = get(f"{MODEL}.lora_rank") or 0
    return Plan(
        model,
        Job(
            shape=shape,
            gpus=batches.gpus,
            prompts=batches.prompts,
            answers=batches.answers,
            prompt_limit=get("data.max_prompt_length"),
            answer_limit=get("data.max_response_length"),
            steps=get("trainer.total_training_steps") or 0,
            tensor_parallel=batches.tensor_parallel,
            micro_batch=get(f"{ACTOR}.ppo_max_token_len_per_gpu"),
            sampler_share=get(f"{ROLLOUT}.gpu_memory_utilization") or 0.5,
            weight_bytes=4 if get(f"{FSDP}.model_dtype") == "fp32" else 2,
            offload_policy=bool(get(f"{FSDP}.offload_policy")),
            param_offload=bool(get(f"{FSDP}.param_offload")),
            optimizer_offload=bool(get(f"{FSDP}.optimizer_offload")),
            checkpointing=bool(get(f"{MODEL}.enable_gradient_checkpointing")),
            trained=lora_share(shape, rank) if rank else 1.0,
        ),
    )


def lora_share(s: Shape, rank: int) -> float:
    """Of all linear layers of a block: rank times the sum of both widths of each."""
    widths = 2 * (s.width + s.query) + 2 * (s.width + s.key) + 3 * (s.width + s.inner)
    return rank * widths * s.layers / s.parameters


def local_shape(model: str) -> Shape | None:
    """From config.json, where the model is a folder."""
    import json
    from pathlib import Path

    try:
        c = json.loads((Path(model).expanduser() / "config.json").read_text())
        heads, width = c["num_attention_heads"], c["hidden_size"]
        head = c.get("head_dim") or width // heads
        query, key = heads * head, c.get("num_key_value_heads", heads) * head
        layer = 2 * width * query + 2 * width * key + 3 * width * c["intermediate_size"]
        ends = c["vocab_size"] * width * (1 if c.get("tie_word_embeddings") else 2)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    layers = c["num_hidden_layers"]
    return Shape(layers * layer + ends, layers, width, c["intermediate_size"], query, key, c["vocab_size"])


# ── the tables of docs/scale.md: python -m dew.engines.verl.plan ────────────────────────────────────────────


def paper_job(model: str, gpus: int) -> Job:
    """The paper's set-up on so many GPUs, as the recipes have it."""
    return Job(
        shape=SHAPES[model],
        gpus=gpus,
        prompts=128,
        answers=16,
        prompt_limit=2048,
        answer_limit=4096,
        steps=210,
        tensor_parallel=1 if model.endswith("7B") else 4,
        sampler_share=0.4,
    )


PAPER = [(model, gpus) for model in ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B") for gpus in (8, 16, 64)]


def memory_table() -> str:
    """GB on each GPU."""
    terms = list(training_bytes(paper_job(*PAPER[0])))
    heads = [*terms, "training", *(f"sampling, {gpu.name}" for gpu in GPUS), *(f"fits {gpu.name}" for gpu in GPUS)]
    lines = [f"| model, GPUs | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for model, gpus in PAPER:
        job = paper_job(model, gpus)
        fits = [fit(job, gpu) for gpu in GPUS]
        numbers = [*training_bytes(job).values(), fits[0].training, *(found.generation for found in fits)]
        cells = [f"{number / GB:.1f}" for number in numbers] + ["yes" if found.fits else "**no**" for found in fits]
        lines.append(f"| {model.removeprefix('Qwen/')}, {gpus} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pace_table() -> str:
    """Seconds, tokens per second and hours at two mean lengths."""
    lines = [
        "| model, GPUs | GPU | mean answer | sampling s | training s | tokens/s | per GPU | hours, 210 steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, gpus in PAPER:
        job = paper_job(model, gpus)
        for gpu in GPUS:
            if not fit(job, gpu).fits:
                continue
            for mean in (1024, 4096):
                found = pace(job, gpu, mean)
                lines.append(
                    f"| {model.removeprefix('Qwen/')}, {gpus} | {gpu.name} | {mean:,} | {found.generation:.0f} | "
                    f"{found.training:.0f} | {found.tokens_per_second:,.0f} | {found.tokens_per_second / gpus:,.0f} | "
                    f"{found.hours:.1f} |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{memory_table()}\n\n{pace_table()}")
