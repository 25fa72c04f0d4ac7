"""Memory of one optimizer step at full length, by arithmetic.

P parameters, P′ of them trained, w bytes each; L layers of width D with feed-forward width I, queries Q and keys K
wide; B answers per micro-batch, T tokens of prompt and answer; r and c bytes of the residual stream and of products.

    weights        w P              (+ w P for a reference policy, + c P for their copies under mixed precision)
    gradients      w P′
    optimizer      2 w P′           AdamW; 2 P′ in 8 bits
    activations    B T A L          A is what one layer keeps for its backward pass, per token:
                                    2 (4 + r) D     two norms: input in 32 bits, normed
                                    2 c D           their outputs; 5 c D under mixed precision, cast for each product
                                    c (3 Q + 2 K)   queries, keys, values, attention's output before and after
                                    (4 + c) (Q + K) where queries and keys are normed
                                    4 c I           gate, up, silu(gate), their product
                   B T (r D L + A)  with gradient checkpointing, which keeps the inputs of layers and redoes the rest
    head           4 V D + 4 B T D + a tile of scores: the logits themselves are never held
    generation     2 c K L per token of cache, for every answer that is sampled at once; 12 V for each one's scores

Gradients and activations are gone while answers are sampled, so the larger of the two phases counts.
"""

from dataclasses import dataclass
from typing import Any

from dew.engines.trl.config import DewConfig
from dew.preflight.check import Check, failed, ok, warning
from dew.preflight.machine import size
from dew.preflight.model import Model

TILE = (4096, 32768)
"""Tokens and vocabulary entries whose scores TRL's fused head holds at a time."""
ROOM = 0.85
"""Above this share of the free memory it is tight: allocators leave gaps, and the estimate errs."""

Terms = dict[str, float]


@dataclass(frozen=True)
class Estimate:
    """Bytes by what takes them, in each of the two phases of a step."""

    training: Terms
    generation: Terms

    @property
    def phase(self) -> str:
        return "training" if sum(self.training.values()) >= sum(self.generation.values()) else "generation"

    @property
    def terms(self) -> Terms:
        """Of the phase that takes more."""
        return self.training if self.phase == "training" else self.generation

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def largest(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])


def layer_bytes(model: Model, tokens: int) -> float:
    """A: what one layer keeps for its backward pass, per token, in sequences of this many tokens."""
    r, c = model.residual_bytes, model.compute_bytes
    D, Q, K = model.width, model.query, model.key
    norms = 2 * (4 + r) * D + (2 if c == r else 5) * c * D
    attention = c * (3 * Q + 2 * K) + (4 + c) * (Q + K) * model.normed_heads
    scores = model.heads * tokens * (4 + 2 * c) if model.eager else 0
    return norms + attention + scores + 4 * c * model.inner


def optimizer_bytes(optim: str, weight_bytes: float) -> float:
    """Per trained parameter."""
    name = str(getattr(optim, "value", optim))
    if "8bit" in name:
        return 2.0
    if name.startswith(("sgd", "adafactor", "apollo", "galore", "lomo", "adalomo")):
        return 0.0
    return 2 * max(weight_bytes, 2)


def estimate(model: Model, args: DewConfig, prompt: int, device_total: float = 0.0) -> Estimate:
    """For the longest prompt, with every answer as long as it may be."""
    tokens = prompt + int(args.max_completion_length or 0)
    B = args.per_device_train_batch_size
    w, c = model.weight_bytes, model.compute_bytes
    P, trained = model.parameters, model.trained
    reference = bool(args.build_algorithm().kl_coef) and trained == P
    fixed = {"weights": w * P * (2 if reference else 1)}
    fixed["optimizer"] = trained * optimizer_bytes(args.optim, w)
    A = layer_bytes(model, tokens)
    kept = model.residual_bytes * model.width * model.layers + A if args.gradient_checkpointing else A * model.layers
    head_weight = 4 * model.vocabulary * model.width if trained == P else 0
    tile = c * min(TILE[0], B * tokens) * min(TILE[1], model.vocabulary)
    training = {
        **fixed,
        "gradients": trained * max(w, 2),
        "activations": B * tokens * kept,
        "head": head_weight + 4 * B * tokens * model.width + tile,
    }
    if c < w:
        training["copies in low precision"] = c * P
    generation = _generation(model, args, tokens, device_total)
    if args.use_vllm and not args.vllm_enable_sleep_mode:
        training.update(generation)  # vLLM keeps what it has taken
    return Estimate(training, {**fixed, **generation})


def _generation(model: Model, args: DewConfig, tokens: int, device_total: float) -> Terms:
    if args.use_vllm:
        colocated = args.vllm_mode == "colocate"
        return {"vllm": args.vllm_gpu_memory_utilization * device_total if colocated else 0.0}
    algorithm = args.build_algorithm()
    times = algorithm.oversample if algorithm.dynamic_sampling else 1.0
    at_once = times * args.batches.per_device * args.batches.micro_batches
    cache = at_once * tokens * 2 * model.key * model.layers * max(model.compute_bytes, model.residual_bytes)
    return {"cache": cache, "scores": 12 * model.vocabulary * at_once}


def check(found: Estimate, model: Model, args: DewConfig, device: str, free: float) -> Check:
    total, name = found.total, found.largest
    share = found.terms[name] / total
    facts: dict[str, Any] = {
        "bytes": round(total),
        "free": round(free),
        "device": device,
        "phase": found.phase,
        "largest": name,
        "terms": {key: round(value) for key, value in found.terms.items()},
        "parameters": model.parameters,
        "trained": model.trained,
    }
    says = f"About {size(total)} at full length while {_doing(found.phase)}, of which {name} {share:.0%}; "
    says += f"{device} has {size(free)} free."
    if total <= ROOM * free:
        return ok("memory", says, **facts)
    sharded = bool(args.deepspeed or args.fsdp)
    remedy = _remedy(name, args, found, free)
    if sharded:
        remedy = f"The estimate is for one unsharded process; what is shared out is not counted off. {remedy}"
    return (warning if sharded or total <= free else failed)("memory", says, remedy, **facts)


def _doing(phase: str) -> str:
    return "training" if phase == "training" else "sampling answers"


def _remedy(name: str, args: DewConfig, found: Estimate, free: float) -> str:
    if name == "activations" and not args.gradient_checkpointing:
        return "Set gradient_checkpointing: true."
    if name in ("activations", "head", "cache", "scores"):
        return _smaller_batch(name, args, found, free)
    return {
        "vllm": "Lower vllm_gpu_memory_utilization, or run vLLM as a server on a GPU of its own.",
        "optimizer": "Set use_peft: true (LoRA trains a hundredth of the weights), or optim: adamw_8bit.",
        "gradients": "Set use_peft: true: LoRA trains a hundredth of the weights.",
    }.get(name, "Take a smaller model, or dtype: bfloat16 with use_peft: true.")


def _smaller_batch(name: str, args: DewConfig, found: Estimate, free: float) -> str:
    batch, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    rows = _fitting(found, ROOM * free, batch)
    if rows is None:
        return "Set a shorter max_completion_length, or take a larger device."
    if name in ("cache", "scores"):
        return f"Sample fewer at once (per_device_train_batch_size: {rows}), or use_vllm: true."
    accumulation = f"gradient_accumulation_steps: {steps * batch // rows}"
    return f"Set per_device_train_batch_size: {rows} and {accumulation}, which trains the same."


def _fitting(found: Estimate, free: float, batch: int) -> int | None:
    """The most answers per micro-batch, a power of two below the present one, that fit the memory."""
    shrinking = {key: value for key, value in found.terms.items() if key in ("activations", "cache", "scores")}
    rest = found.total - sum(shrinking.values())
    rows = batch // 2
    while rows and rest + sum(shrinking.values()) * rows / batch > free:
        rows //= 2
    return rows or None if batch % max(rows, 1) == 0 else None
