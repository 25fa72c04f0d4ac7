"""The checks of a run on verl, and its memory on each GPU, by arithmetic.

The letters are those of `dew.preflight.memory`, in bf16. N GPUs share weights, gradients and optimizer state evenly
(FSDP2); m tokens are in a micro-batch of one GPU.

    training     weights, gradients, optimizer: 4 + 4 + 8 bytes · P/N     2 + 2 + 4 with model_dtype bf16
                 gathered    2 · (2 layers + embedding and head)  bf16, one layer in use and one prefetched
                 activations m · (2 D L + A)                      gradient checkpointing
                 logits      m · V · 4                            bf16, and their gradient
                 entropy     2048 · V · 12                        a chunk in float32, its softmax, their product
    generation   the part of weights and optimizer that is not offloaded, and the sampler's share of the GPU;
                 a sampler spans t GPUs: weights 2 P/t, the rest is KV cache

`scripts/scale_tables.py` adds seconds per step and hours.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dew.engines.compat import trl_beside_verl
from dew.engines.problems import verifier_of
from dew.engines.verl.config import FSDP
from dew.engines.verl.data import Data, load_tokenizer, prepare_data, write_data
from dew.engines.verl.launch import MICRO_BATCH, SAMPLER_GPUS, Launch, check_with_verl, prepare
from dew.errors import ConfigError, DewError
from dew.preflight import EMPTY_REMEDY, Check, failed, from_problem, graded, guarded, ok, skipped
from dew.preflight.machine import GB, check_folder, check_versions, gpus, size
from dew.preflight.memory import Estimate, Shape, known_shape, lora_parameters, training_state
from dew.run.config import Run
from dew.run.permission import check_permission
from dew.run.settings import MODEL, ROLLOUT

CHUNK = 2048
"""Tokens whose entropy verl computes at a time."""
USABLE = 0.92
"""Share of a GPU's memory; CUDA, NCCL and fragmentation take the rest."""
GPUS = {"80 GB": 80 * GB, "141 GB": 141 * GB}
"""The kinds of GPU in a plan, and their memory."""
PROBED = 64
"""Number of rows whose gold and empty answers are passed to the verifier."""


def estimate(launch: Launch, shape: Shape, gpu_memory: float) -> Estimate:
    """Bytes on each GPU in the backward pass, and while answers are sampled, when gradients are freed."""
    N, m, w = launch.batches.processes, launch[MICRO_BATCH], 4 if launch[f"{FSDP}.model_dtype"] == "fp32" else 2
    on_gpu = not launch[f"{FSDP}.offload_policy"]  # else weights, gradients and optimizer stay in host memory
    state = {name: n / N * on_gpu for name, n in training_state(shape, w, 2 * w).items()}
    ends = 2 * shape.vocabulary * shape.width
    layer = (shape.parameters - ends) / shape.layers
    training = {
        **state,
        "gathered": shape.weight_bytes * (2 * layer + ends) if N > 1 else 0.0,
        "activations": m * shape.activation_bytes(bool(launch[f"{MODEL}.enable_gradient_checkpointing"])),
        "logits": 4 * m * shape.vocabulary,
        "entropy": 12 * min(CHUNK, m) * shape.vocabulary,
    }
    generation = {
        "weights": state["weights"] * (not launch[f"{FSDP}.param_offload"]),
        "optimizer": state["optimizer"] * (not launch[f"{FSDP}.optimizer_offload"]),
        "sampler": sampler_share(launch) * gpu_memory,
    }
    return Estimate(training, generation)


def sampler_share(launch: Launch) -> float:
    return float(launch[f"{ROLLOUT}.gpu_memory_utilization"] or 0.5)


def cache_tokens(launch: Launch, shape: Shape, gpu_memory: float) -> float:
    """Tokens in the KV cache of one sampler."""
    t = launch[SAMPLER_GPUS]
    room = sampler_share(launch) * gpu_memory - shape.weight_bytes * shape.parameters / t
    return max(0.0, room) * t / shape.cache_bytes


def fits(launch: Launch, shape: Shape, gpu_memory: float) -> bool:
    """In both phases, with KV cache for at least one answer of full length."""
    longest = launch["data.max_prompt_length"] + launch["data.max_response_length"]
    cached = cache_tokens(launch, shape, gpu_memory) >= longest
    return cached and estimate(launch, shape, gpu_memory).total <= USABLE * gpu_memory


def shape_of_model(launch: Launch) -> Shape:
    shape = known_shape(launch[f"{MODEL}.path"])
    return replace(shape, weight_bytes=2, adapters=lora_parameters(shape, launch[f"{MODEL}.lora_rank"] or 0))


def check_memory(launch: Launch, here: Sequence[dict[str, Any]] = ()) -> Check:
    """On this machine's GPUs or, if it has none, on the two kinds that dew knows."""
    kinds = {gpu["name"]: gpu["total"] for gpu in here[:1]} or GPUS
    try:
        shape = shape_of_model(launch)
    except (ConfigError, ImportError):
        model = launch[f"{MODEL}.path"]
        return skipped("memory", f"Not estimated: {model} is neither a local folder nor a model that dew knows.")
    facts: dict[str, Any] = {}
    says = f"Estimated on each of {launch.batches.processes} GPUs:"
    for name, total in kinds.items():
        found, fit = estimate(launch, shape, total), fits(launch, shape, total)
        training, generation = sum(found.training.values()), sum(found.generation.values())
        says += f" {name}: training {size(training)}, sampling {size(generation)}, {'fits' if fit else 'does NOT fit'}."
        facts[name] = {"fits": fit, "training": found.training, "generation": found.generation}
    remedy = f"Use more GPUs, lower {MICRO_BATCH} (logits and activations), or set {FSDP}.offload_policy=true."
    return graded("memory", says, remedy, warn=not any(kind["fits"] for kind in facts.values()), **facts)


def check_run(run: Run, typed: Collection[str] = (), untrusted: bool = False) -> list[Check]:
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
    checks.append(ok("batches", f"{launch.batches}.", **launch.batches.facts()))
    checks += guarded("gpus", lambda: check_gpus(launch, gpus()))
    checks += guarded("memory", lambda: check_memory(launch, gpus()))
    checks += guarded("folder", check_folder, Path(launch["algorithm.dew_run.folder"]))
    checks += guarded("data", check_data, launch)
    why = "No answers are sampled on verl: truncation, mixed groups and entropy show at the first step."
    return [*checks, skipped("answers", why)]


def check_gpus(launch: Launch, found: Sequence[dict[str, Any]]) -> Check:
    """Compare this machine with one node of the run; the other nodes of a cluster are not visible from here."""
    n, nodes, wanted = len(found), launch["trainer.nnodes"], launch["trainer.n_gpus_per_node"]
    says = f"The run asks for {nodes} x {wanted} GPUs; this machine has {n}."
    remedy = f"Run it on a node of the cluster, or set trainer.n_gpus_per_node={n}." if n else "Run it on the cluster."
    return graded("gpus", says, remedy, warn=n < wanted, nodes=nodes, per_node=wanted, here=n)


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
    verifier = None if launch.own_reward else verifier_of(launch.run)
    if verifier is None:
        return skipped("verifier", "A reward function of your own is not called here.")
    rows = [row["extra_info"] for row in data.train[:PROBED]]
    if empty := sum(verdict.correct for verdict in verifier.verdicts([""] * len(rows), rows)):
        return failed("verifier", f"{verifier.name} accepts {empty} of {len(rows)} empty answers.", EMPTY_REMEDY)
    if verifier.columns != ("answer",):
        return ok("verifier", f"{verifier.name} accepts none of {len(rows)} empty answers.")
    boxed = [rf"\boxed{{{row['answer']}}}" for row in rows]
    good = sum(verdict.correct for verdict in verifier.verdicts(boxed, rows))
    says = f"{verifier.name} accepts {good} of {len(rows)} gold answers and no empty one."
    return graded("verifier", says, "Correct or remove those rows.", warn=good < len(rows), gold=good, rows=len(rows))
