"""Memory of one step at full length, by arithmetic; the plan, memory and disk checks of a run on TRL.

P parameters, P′ of them trained; L layers of width D with feed-forward width I, queries Q and keys K wide; V vocabulary
entries. w, r and c are bytes per weight, per element of the residual stream and per element of a matrix product.

    weights        w P              (+ w P for a reference policy, + c P for low-precision copies in mixed precision)
    gradients      w P′
    optimizer      2 w P′           AdamW; 2 P′ for 8-bit optimizers
    activations    A L per token    A is what one layer keeps for its backward pass:
                                    2 (4 + r) D     two norms: input in float32, normalized
                                    2 c D           their outputs; 5 c D in mixed precision, cast for each product
                                    c (3 Q + 2 K)   queries, keys, values, attention output before and after
                                    (4 + c) (Q + K) if queries and keys are normalized
                                    4 c I           gate, up, silu(gate), their product
                   r D L + A        with gradient checkpointing: the inputs of all layers, one layer recomputed
    KV cache       2 c K L per token

One process on TRL trains on B answers of T tokens per micro-batch and adds

    head           4 V D + 4 B T D + a tile of scores: the logits are never materialized
    scores         12 V for each answer sampled at once

Gradients and activations are freed before sampling, so the larger of the two phases counts.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dew.compare.sampling import prompt_text
from dew.errors import ConfigError, not_loaded
from dew.memory import free_memory
from dew.preflight import Check, graded
from dew.preflight.machine import free_disk, gpus, size
from dew.run.config import find_model

if TYPE_CHECKING:
    from dew.engines.trl.config import DewConfig
    from dew.engines.trl.launch import Parsed
    from dew.engines.trl.trainer import DewTrainer

LONGEST_TRIED = 256
"""Prompts to tokenize when looking for the longest: those with the most characters."""
TILE = (4096, 32768)
"""Tokens and vocabulary entries whose scores TRL's fused head holds at a time."""
ROOM = 0.85
"""Share of the free memory that a run may use without a warning: allocators fragment, and the estimate is not exact."""

TYPICAL_PROMPT = 200
"""Tokens of a prompt, in a plan made without reading the data."""

Terms = dict[str, float]


@dataclass(frozen=True)
class Shape:
    """Dimensions and precision of a transformer. The default precision is bf16."""

    parameters: float
    layers: int
    width: int
    inner: int
    """I; for a mixture of experts, of the active experts together."""
    query: int
    key: int
    """Q and K: of all heads together. Values are as wide as keys."""
    vocabulary: int
    adapters: float = 0
    """Parameters of LoRA's adapters, the only ones trained; 0 without LoRA."""
    context: int | None = None
    """Maximum number of positions."""
    weight_bytes: float = 2
    """Per parameter; 0.5 if quantized to 4 bits."""
    compute_bytes: int = 2
    """Per activation of a matrix product."""
    normed_heads: bool = False
    """Queries and keys have norms of their own, as in Qwen3."""

    @property
    def trained(self) -> float:
        """P′."""
        return self.adapters or self.parameters

    @property
    def residual_bytes(self) -> int:
        """r."""
        return max(2, round(self.weight_bytes)) if self.weight_bytes >= 2 else self.compute_bytes

    @property
    def cache_bytes(self) -> int:
        """KV cache per token."""
        return 2 * max(self.compute_bytes, self.residual_bytes) * self.key * self.layers

    @property
    def layer_bytes(self) -> float:
        """A, per token."""
        r, c, D, Q, K = self.residual_bytes, self.compute_bytes, self.width, self.query, self.key
        norms = 2 * (4 + r) * D + (2 if c == r else 5) * c * D
        attention = c * (3 * Q + 2 * K) + (4 + c) * (Q + K) * self.normed_heads
        return norms + attention + 4 * c * self.inner

    def activation_bytes(self, checkpointing: bool) -> float:
        """Per token, of all layers."""
        A = self.layer_bytes
        return self.residual_bytes * self.width * self.layers + A if checkpointing else A * self.layers


def optimizer_bytes(optim: str, weight_bytes: float) -> float:
    """Per trained parameter."""
    if "8bit" in optim:
        return 2.0
    if optim.startswith(("sgd", "adafactor", "apollo", "galore", "lomo", "adalomo")):
        return 0.0
    return 2 * max(weight_bytes, 2)


def shape_of(model: Any, **more: Any) -> Shape:
    """Of a model, whose weights may be on the meta device; `more` are fields of Shape that do not follow from it."""
    config = model.config.get_text_config()
    heads, width = config.num_attention_heads, config.hidden_size
    head_width = getattr(config, "head_dim", None) or width // heads
    experts, inner = getattr(config, "num_experts_per_tok", None), getattr(config, "intermediate_size", None)
    if experts and getattr(config, "moe_intermediate_size", None):
        inner = experts * config.moe_intermediate_size
    return Shape(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=config.num_hidden_layers,
        width=width,
        inner=inner or 4 * width,
        query=heads * head_width,
        key=(getattr(config, "num_key_value_heads", None) or heads) * head_width,
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None),
        normed_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        **more,
    )


def shape_of_run(parsed: "Parsed") -> Shape:
    """From the model's config, with the run's precision and LoRA's adapters. No weights are loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model, args = parsed.model, parsed.args
    name, trusted = model.model_name_or_path, args.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(find_model(name), revision=model.model_revision, trust_remote_code=trusted)
        with torch.device("meta"):  # takes no memory
            empty = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    except Exception as error:  # many kinds, from the hub and from the file system
        raise ConfigError(not_loaded("model_name_or_path", name, error)) from None
    dtype = str((args.model_init_kwargs or {}).get("dtype") or model.dtype or "float32").removeprefix("torch.")
    kind = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype, None)
    stored = 0.5 if model.load_in_4bit else 1.0 if model.load_in_8bit else (kind or torch.float32).itemsize
    s = shape_of(empty, weight_bytes=stored, compute_bytes=_compute_bytes(args, stored))
    # LoRA on all linear layers: the rank times the sum of both widths of each
    widths = 2 * (s.width + s.query) + 2 * (s.width + s.key) + 3 * (s.width + s.inner)
    return replace(s, adapters=int(model.lora_r) * widths * s.layers if model.use_peft else 0)


def _compute_bytes(args: "DewConfig", stored: float) -> int:
    return 2 if args.bf16 or args.fp16 or stored <= 2 else 4


def check_model(parsed: "Parsed", rows: list[dict[str, Any]]) -> list[Check]:
    """What follows from the model's config: context, memory, disk."""
    from transformers import AutoTokenizer

    shape, wanted, trusted = shape_of_run(parsed), parsed.model, parsed.args.trust_remote_code
    folder = find_model(wanted.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(folder, revision=wanted.model_revision, trust_remote_code=trusted)
    return _check_shape(shape, parsed.args, longest_prompt(tokenizer, rows), len(rows))


def check_loaded_model(trainer: "DewTrainer", rows: list[dict[str, Any]]) -> list[Check]:
    """The same checks for a model that is already loaded."""
    model, args = trainer.model, trainer.args
    weights = list(model.parameters())
    stored = sum(p.numel() * p.element_size() for p in weights) / sum(p.numel() for p in weights)
    adapters = sum(p.numel() for p in weights if p.requires_grad) if hasattr(model, "peft_config") else 0
    shape = shape_of(model, adapters=adapters, weight_bytes=stored, compute_bytes=_compute_bytes(args, stored))
    return _check_shape(shape, args, longest_prompt(trainer._tokenizer, rows), len(rows), loaded=True)


def _check_shape(shape: Shape, args: "DewConfig", prompt: int, rows: int, loaded: bool = False) -> list[Check]:
    gpu = None if args.use_cpu else next(iter(gpus()), None)
    device, free = (gpu["name"], gpu["free"]) if gpu else ("this machine", free_memory())
    free += loaded * shape.weight_bytes * shape.parameters
    return [
        check_context(shape, prompt, int(args.max_completion_length or 0)),
        check_memory(estimate(shape, args, prompt, free), shape, args, device, free),
        check_disk(args, shape, rows),
    ]


def longest_prompt(tokenizer: Any, rows: list[dict[str, Any]]) -> int:
    """Tokens of the longest prompt."""
    texts = sorted((prompt_text(tokenizer, row["prompt"]) for row in rows), key=len)[-LONGEST_TRIED:]
    return max(len(ids) for ids in tokenizer(texts)["input_ids"])


def check_context(shape: Shape, prompt: int, limit: int) -> Check:
    """Whether the longest prompt and the longest answer fit the model's context."""
    facts = {"prompt": prompt, "answer": limit, "context": shape.context}
    says = f"The longest prompt has {prompt} tokens; with max_completion_length={limit} that makes "
    says += f"{prompt + limit}, and the model has {shape.context or 'no fixed number of'} positions."
    room = limit if shape.context is None else shape.context - prompt
    remedy = f"Set max_completion_length to at most {room}." if room > 0 else "Remove the longest prompts."
    return graded("context", says, remedy, warn=False, fail=limit > room, **facts)


def estimate(shape: Shape, args: "DewConfig", prompt: int, device_total: float = 0.0) -> dict[str, Terms]:
    """Bytes per term, in each of the two phases of a step, for the longest prompt and answers of full length."""
    tokens = prompt + int(args.max_completion_length or 0)
    B, w, c = args.per_device_train_batch_size, shape.weight_bytes, shape.compute_bytes
    algorithm = args.build_algorithm()
    models = 2 if algorithm.kl_coef and not shape.adapters else 1  # with the reference policy
    kept = {
        "weights": models * w * shape.parameters,
        "optimizer": optimizer_bytes(args.optim, w) * shape.trained,
    }
    head_weight = 0 if shape.adapters else 4 * shape.vocabulary * shape.width
    tile = c * min(TILE[0], B * tokens) * min(TILE[1], shape.vocabulary)
    training = {
        **kept,
        "gradients": max(w, 2) * shape.trained,
        "activations": B * tokens * shape.activation_bytes(args.gradient_checkpointing),
        "head": head_weight + 4 * B * tokens * shape.width + tile,
    }
    if c < w:
        training["copies in low precision"] = c * shape.parameters
    if args.use_vllm:
        colocated = args.vllm_mode == "colocate"
        sampling = {"vllm": args.vllm_gpu_memory_utilization * device_total if colocated else 0.0}
        if not args.vllm_enable_sleep_mode:
            training.update(sampling)  # vLLM keeps its memory
    else:
        at_once = args.batches.per_process * (algorithm.oversample if algorithm.dynamic_sampling else 1.0)
        sampling = {"cache": at_once * tokens * shape.cache_bytes, "scores": 12 * shape.vocabulary * at_once}
    return {"training": training, "generation": {**kept, **sampling}}


def larger(phases: dict[str, Terms]) -> tuple[str, Terms, float]:
    """The phase that takes more memory, its terms and their sum."""
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    return phase, phases[phase], sum(phases[phase].values())


def check_memory(phases: dict[str, Terms], shape: Shape, args: "DewConfig", device: str, free: float) -> Check:
    phase, terms, total = larger(phases)
    name = max(terms, key=lambda term: terms[term])
    facts: dict[str, Any] = {"bytes": round(total), "free": round(free), "device": device, "phase": phase}
    facts |= {"largest": name, "terms": {key: round(value) for key, value in terms.items()}}
    facts |= {"parameters": shape.parameters, "trained": shape.trained}
    says = f"About {size(total)} at full length during {phase}, {terms[name] / total:.0%} of it {name}; "
    says += f"{device} has {size(free)} free."
    sharded = bool(args.deepspeed or args.fsdp)
    hint = "The estimate is for one process without sharding, so the run may still fit. " if sharded else ""
    remedy = hint + REMEDIES.get(name, "Use a smaller model, or dtype: bfloat16 with use_peft: true.")
    return graded("memory", says, remedy, warn=total > ROOM * free, fail=total > free and not sharded, **facts)


SMALLER_BATCH = (
    "Halve per_device_train_batch_size and double gradient_accumulation_steps until it fits; the result is the same."
)
FEWER_AT_ONCE = "Sample fewer answers at once (a smaller per_device_train_batch_size), or set use_vllm: true."
REMEDIES = {
    "vllm": "Lower vllm_gpu_memory_utilization, or run vLLM as a server on a GPU of its own.",
    "optimizer": "Set use_peft: true (LoRA trains about 1% of the weights), or optim: adamw_8bit.",
    "gradients": "Set use_peft: true (LoRA trains about 1% of the weights).",
    "activations": f"Set gradient_checkpointing: true. {SMALLER_BATCH}",
    "head": SMALLER_BATCH,
    "cache": FEWER_AT_ONCE,
    "scores": FEWER_AT_ONCE,
}
"""What to change, by the largest term."""


def optimizer_steps(args: "DewConfig", rows: int) -> int:
    if args.max_steps > 0:
        return int(args.max_steps)
    prompts_per_step = args.batches.trained / args.batches.answers
    return math.ceil(args.num_train_epochs * rows * args.num_iterations / prompts_per_step)


def checkpoints(args: "DewConfig", steps: int) -> int:
    """How many checkpoints are on disk at once, including the one being written."""
    if args.save_strategy == "no":
        return 0
    every = args.save_steps if args.save_steps >= 1 else max(1, args.save_steps * steps)
    written = math.ceil(args.num_train_epochs if args.save_strategy == "epoch" else steps / every)
    return min(written, args.save_total_limit + 1) if args.save_total_limit else written


def check_disk(args: "DewConfig", shape: Shape, rows: int) -> Check:
    """Whether the checkpoints and the final model fit on the disk."""
    weights = 4.0 * shape.adapters or shape.weight_bytes * shape.parameters
    state = 0.0 if args.save_only_model else shape.trained * optimizer_bytes(args.optim, shape.weight_bytes)
    count, free = checkpoints(args, optimizer_steps(args, rows)), free_disk(Path(args.output_dir))
    needed = count * (weights + state) + weights
    says = f"Checkpoints ({count} of {size(weights + state)}) and model take {size(needed)}; {size(free)} free."
    remedy = "Set save_total_limit: 2, a larger save_steps, or an output_dir on a larger disk."
    facts = {"checkpoints": count, "bytes": round(needed), "free": free}
    return graded("disk", says, remedy, warn=needed > 0.9 * free, fail=needed > free, **facts)


def plan(parsed: "Parsed") -> dict[str, str]:
    """What `dew train --dry-run` prints: heading -> text."""
    args, batches = parsed.args, parsed.args.batches
    found = {
        "model": parsed.model.model_name_or_path,
        "data": parsed.data,
        "algorithm": args.build_algorithm().label,
        "batches": str(batches),
    }
    if steps := optimizer_steps(args, parsed.run.problems if parsed.run.task else 0):  # 0: known once data are read
        generations = math.ceil(steps / batches.optimizer_steps)
        most = "" if args.max_steps > 0 else "at most "  # a file may have fewer problems than the run asks for
        found["length"] = f"{most}{steps:,} optimizer steps on {generations:,} generations: "
        found["length"] += f"{generations * batches.sampled:,} answers of at most {args.max_completion_length} tokens"
    try:
        shape = shape_of_run(parsed)
    except ConfigError:
        return {**found, "memory": "not estimated: the model's config is not on this machine"}
    device = next((gpu["total"] for gpu in gpus()), 80e9)
    *_, total = larger(estimate(shape, args, TYPICAL_PROMPT, device))
    return {**found, "memory": f"about {size(total)} on each device, for prompts of {TYPICAL_PROMPT} tokens"}
