"""A run on verl: its plan (memory, tokens per second, hours) by arithmetic, and the checks before it trains.

The letters are those of `dew.preflight.memory`, in bf16. N GPUs share weights, gradients and optimizer state evenly
(FSDP2); m tokens are in a micro-batch of one GPU.

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

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from dew.engines.compat import trl_beside_verl
from dew.engines.problems import verifier_of
from dew.engines.verl.data import Data, load_tokenizer, prepare_data, write_data
from dew.engines.verl.launch import Launch, check_with_verl, prepare
from dew.engines.verl.recipe import Batches
from dew.engines.verl.settings import ACTOR, FSDP, MODEL, ROLLOUT
from dew.errors import DewError
from dew.preflight.check import EMPTY_REMEDY, Check, failed, from_problem, graded, guarded, ok, skipped
from dew.preflight.machine import GB, check_folder, check_versions, gpus, size
from dew.preflight.memory import Estimate, Shape, shape_of, training_state
from dew.run.config import Run
from dew.run.permission import check_permission

CHUNK = 2048
"""Tokens whose entropy verl computes at a time."""
USABLE = 0.92
"""Share of a GPU's memory; CUDA, NCCL and fragmentation take the rest."""
MFU, BANDWIDTH_SHARE = 0.4, 0.6
SEQUENCES = 256
"""Maximum number of answers that a sampler decodes at once: verl's max_num_seqs."""
TYPICAL_ANSWER, TYPICAL_PROMPT = 0.25, 200
"""Assumed mean length of an answer as a share of the limit, and of a prompt in tokens."""
PROBED = 64
"""Number of rows whose gold and empty answers are passed to the verifier."""

SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(0.494e9, 24, 896, 4864, 896, 128, 151936),
    "Qwen/Qwen2.5-1.5B-Instruct": Shape(1.544e9, 28, 1536, 8960, 1536, 256, 151936),
    "Qwen/Qwen2.5-7B": Shape(7.616e9, 28, 3584, 18944, 3584, 512, 152064),
    "Qwen/Qwen2.5-32B": Shape(32.764e9, 64, 5120, 27648, 5120, 1024, 152064),
}
"""From the models' config files, so that a plan needs no download."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float
    peak: float
    """Dense bf16 operations per second."""
    bandwidth: float


H100 = Gpu("80 GB (H100)", 80 * GB, 989e12, 3.35e12)
H200 = Gpu("141 GB (H200)", 141 * GB, 989e12, 4.8e12)
GPUS = (H100, H200)


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is distributed."""

    shape: Shape
    batches: Batches
    prompt_limit: int
    answer_limit: int
    steps: int
    micro_batch: int = 16384
    sampler_share: float = 0.5
    weight_bytes: int = 4
    """Per parameter of the sharded weights."""
    param_offload: bool = False
    optimizer_offload: bool = False
    """Both: in host memory while answers are sampled."""
    offload_policy: bool = False
    """Weights, gradients and optimizer state stay in host memory. The time that this costs is not estimated."""
    checkpointing: bool = True


def estimate(job: Job, gpu: Gpu) -> Estimate:
    """Bytes on each GPU in the backward pass, and while answers are sampled, when gradients are freed."""
    s, w, m, N = job.shape, job.weight_bytes, job.micro_batch, job.batches.gpus
    state = {name: n / N * (not job.offload_policy) for name, n in training_state(s, w, 2 * w).items()}
    ends = 2 * s.vocabulary * s.width
    layer = (s.parameters - ends) / s.layers
    training = {
        **state,
        "gathered": s.weight_bytes * (2 * layer + ends) if N > 1 else 0.0,
        "activations": m * s.activation_bytes(job.checkpointing),
        "logits": 4 * m * s.vocabulary,
        "entropy": 12 * min(CHUNK, m) * s.vocabulary,
    }
    generation = {
        "weights": state["weights"] * (not job.param_offload),
        "optimizer": state["optimizer"] * (not job.optimizer_offload),
        "sampler": job.sampler_share * gpu.memory,
    }
    return Estimate(training, generation)


def fits(job: Job, gpu: Gpu) -> bool:
    """In both phases, with KV cache for at least one answer of full length."""
    cached = cache_tokens(job, gpu) >= job.prompt_limit + job.answer_limit
    return cached and estimate(job, gpu).total <= USABLE * gpu.memory


def cache_tokens(job: Job, gpu: Gpu) -> float:
    """Tokens in the KV cache of one sampler."""
    s, t = job.shape, job.batches.tensor_parallel
    room = job.sampler_share * gpu.memory - s.weight_bytes * s.parameters / t
    return max(0.0, room) * t / s.cache_bytes


def pace(job: Job, gpu: Gpu, mean_answer: float | None = None) -> dict[str, float]:
    """Seconds per step of both phases, tokens per second of all GPUs, hours of the run."""
    s, t = job.shape, job.batches.tensor_parallel
    n, p = mean_answer or TYPICAL_ANSWER * job.answer_limit, min(TYPICAL_PROMPT, job.prompt_limit)
    R, samplers = job.batches.prompts * job.batches.answers, max(1, job.batches.gpus // t)
    running = max(1.0, min(SEQUENCES, R / samplers, cache_tokens(job, gpu) / (p + n)))
    passes, limit = job.batches.passes, job.answer_limit
    generation, training = step_seconds(s, gpu, R / samplers, p, n, limit, running=running, passes=passes, gpus=t)
    step = generation + training
    speed, hours = R * (p + n) / step, job.steps * step / 3600
    return {"generation": generation, "training": training, "tokens_per_second": speed, "hours": hours}


def step_seconds(
    s: Shape, gpu: Gpu, answers: float, p: float, n: float, limit: int, *, running: float, passes: int, gpus: int = 1
) -> tuple[float, float]:
    """Generation and training of one sampler's answers on its GPUs. `running` answers are decoded at once."""
    weights, bandwidth = s.compute_bytes * s.parameters, gpus * gpu.bandwidth * BANDWIDTH_SHARE
    decoding_step = (weights + running * (p + n / 2) * s.cache_bytes) / bandwidth
    generation = max(answers / running * n * decoding_step, limit * weights / bandwidth)
    return generation, answers * (p + n) * (2 + 8 * passes) * s.parameters / (gpus * gpu.peak * MFU)


def plan_of(launch: Launch, kinds: Sequence[Gpu] = GPUS) -> dict[str, Any]:
    """Per kind of GPU: whether the run fits, bytes of each phase, seconds per step, hours."""
    model, job = launch[f"{MODEL}.path"], job_of(launch)
    if job is None:
        return {"model": model}
    on = {}
    for gpu in kinds:
        found, fit = estimate(job, gpu), fits(job, gpu)
        on[gpu.name] = {"fits": fit, "training_bytes": found.training, "generation_bytes": found.generation}
        on[gpu.name] |= pace(job, gpu)
    return {"model": model, "gpus": job.batches.gpus, "on": on}


def plan_lines(plan: dict[str, Any]) -> list[str]:
    if "on" not in plan:
        return [f"No plan: {plan['model']} is neither a local folder nor a model whose shape dew knows."]
    lines = []
    for name, on in plan["on"].items():
        training, sampling = (sum(on[phase].values()) / GB for phase in ("training_bytes", "generation_bytes"))
        lines.append(
            f"Plan, {plan['gpus']} x {name}: {'fits' if on['fits'] else 'does NOT fit'}; training {training:.0f} GB, "
            f"sampling {sampling:.0f} GB each; about {on['hours']:.1f} h if answers reach {TYPICAL_ANSWER:.0%} of the "
            "maximum length on average (estimated, see docs/scale.md)."
        )
    return lines


def job_of(launch: Launch) -> Job | None:
    """None if the shape of the model is unknown."""
    get = launch.__getitem__
    shape = SHAPES.get(get(f"{MODEL}.path")) or local_shape(get(f"{MODEL}.path"))
    if shape is None:
        return None
    epochs = get("trainer.total_epochs")
    return Job(
        shape=replace(shape, adapters=lora_parameters(shape, get(f"{MODEL}.lora_rank") or 0)),
        batches=launch.batches,
        prompt_limit=get("data.max_prompt_length"),
        answer_limit=get("data.max_response_length"),
        steps=get("trainer.total_training_steps") or epochs * max(1, launch.run.problems // launch.batches.prompts),
        micro_batch=get(f"{ACTOR}.ppo_max_token_len_per_gpu"),
        sampler_share=get(f"{ROLLOUT}.gpu_memory_utilization") or 0.5,
        weight_bytes=4 if get(f"{FSDP}.model_dtype") == "fp32" else 2,
        offload_policy=bool(get(f"{FSDP}.offload_policy")),
        param_offload=bool(get(f"{FSDP}.param_offload")),
        optimizer_offload=bool(get(f"{FSDP}.optimizer_offload")),
        checkpointing=bool(get(f"{MODEL}.enable_gradient_checkpointing")),
    )


def lora_parameters(s: Shape, rank: int) -> int:
    """Adapters of all linear layers: rank times the sum of both widths of each."""
    widths = 2 * (s.width + s.query) + 2 * (s.width + s.key) + 3 * (s.width + s.inner)
    return rank * widths * s.layers


def local_shape(model: str) -> Shape | None:
    """From the config.json of a model folder."""
    try:
        config = SimpleNamespace(**json.loads((Path(model).expanduser() / "config.json").read_text()))
        s = shape_of(config, parameters=0)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    layer = 2 * s.width * s.query + 2 * s.width * s.key + 3 * s.width * s.inner
    ends = s.vocabulary * s.width * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    return replace(s, parameters=s.layers * layer + ends)


def preflight_verl(run: Run, typed: Collection[str] = (), untrusted: bool = False) -> list[Check]:
    """Versions, settings, batches, GPUs, memory, folder, data, verifier."""
    conflict = trl_beside_verl()
    checks = [check_versions("verl") if conflict is None else from_problem("versions", conflict)]
    try:
        check_permission(run, typed, untrusted)
        launch = prepare(run)
        composed = check_with_verl(launch)
    except DewError as error:
        checks += [from_problem("settings", problem) for problem in error.problems]
        return [*checks, skipped("the rest", "Data, GPUs and memory are checked once the settings are valid.")]
    by = "verl accepts all of them." if composed else "verl is not installed here, so its own keys are not checked."
    checks.append(ok("settings", f"{len(launch.overrides)} overrides; {by}", notes=launch.notes))
    checks.append(ok("batches", f"{launch.batches}.", **vars(launch.batches)))
    checks += guarded("gpus", lambda: check_gpus(launch.batches, gpus()))
    checks += guarded("memory", lambda: check_memory(launch, gpus()))
    checks += guarded("folder", check_folder, Path(launch["algorithm.dew_run.folder"]))
    checks += guarded("data", check_data, launch)
    why = "No answers are sampled on verl: truncation, mixed groups and entropy show at the first step."
    return [*checks, skipped("answers", why)]


def check_gpus(batches: Batches, found: Sequence[dict[str, Any]]) -> Check:
    """Compare this machine with one node of the plan; the other nodes of a cluster are not visible from here."""
    n, wanted = len(found), batches.gpus_per_node
    says = f"The run asks for {batches.nodes} x {wanted} GPUs; this machine has {n}."
    remedy = f"Run it on a node of the cluster, or set trainer.n_gpus_per_node={n}." if n else "Run it on the cluster."
    return graded("gpus", says, remedy, warn=n < wanted, nodes=batches.nodes, per_node=wanted, here=n)


def check_memory(launch: Launch, here: Sequence[dict[str, Any]]) -> Check:
    """The plan for this machine's GPUs or, if it has none, for the two kinds that dew knows."""
    kinds = [Gpu(here[0]["name"], here[0]["total"], 1.0, 1.0)] if here else GPUS
    plan = plan_of(launch, kinds)
    if "on" not in plan:
        return skipped("memory", plan_lines(plan)[0])
    facts: dict[str, Any] = {}
    says = f"Estimated per GPU ({plan['gpus']} in all):"
    for name, on in plan["on"].items():
        training, generation = sum(on["training_bytes"].values()), sum(on["generation_bytes"].values())
        says += f" {name}: training {size(training)}, sampling {size(generation)}"
        says += "." if on["fits"] else f", does not fit {USABLE:.0%} of it."
        facts[name] = {"training": training, "generation": generation}
    remedy = "Use more GPUs, lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu (logits and activations), or set "
    remedy += "actor_rollout_ref.actor.fsdp_config.offload_policy=true."
    return graded("memory", says, remedy, warn=not any(on["fits"] for on in plan["on"].values()), **facts)


def check_data(launch: Launch) -> list[Check]:
    """The problems as verl will read them, and the verifier."""
    data = prepare_data(launch, load_tokenizer(launch))
    with TemporaryDirectory() as folder:
        write_data(data, Path(folder))
    says = f"{len(data.train):,} training problems, {len(data.validation):,} validation problems"
    says += f"; {data.too_long} left out because their prompts are too long." if data.too_long else "."
    checks = [ok("data", says, train=len(data.train), validation=len(data.validation), too_long=data.too_long)]
    return checks + guarded("verifier", check_verifier, launch, data)


def check_verifier(launch: Launch, data: Data) -> Check:
    """Call the verifier on boxed gold answers and on empty answers."""
    if launch.own_reward:
        return skipped("verifier", "A reward function of your own is not called here.")
    verifier = verifier_of(launch.run)
    assert verifier is not None
    rows = [row["extra_info"] for row in data.train[:PROBED]]
    if empty := sum(verdict.correct for verdict in verifier.verdicts([""] * len(rows), rows)):
        return failed("verifier", f"{verifier.name} accepts {empty} of {len(rows)} empty answers.", EMPTY_REMEDY)
    if verifier.columns != ("answer",):
        return ok("verifier", f"{verifier.name} accepts none of {len(rows)} empty answers.")
    boxed = [rf"\boxed{{{row['answer']}}}" for row in rows]
    good = sum(verdict.correct for verdict in verifier.verdicts(boxed, rows))
    says = f"{verifier.name} accepts {good} of {len(rows)} gold answers and no empty one."
    remedy = "Correct or remove those rows."
    return graded("verifier", says, remedy, warn=good < len(rows), gold=good, rows=len(rows))
