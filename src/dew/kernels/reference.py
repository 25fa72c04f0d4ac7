"""The output head of a language model, and a slow reference implementation that defines the operator, for tests.

z = softcap · tanh((h Wᵀ + b) / softcap) / T    logp = z_y − log Σ_v e^{z_v}    H = −Σ_v p_v log p_v    Σ_v p_v²
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

IGNORE = -100
"""Marks rows without a target: output 0, no gradient."""


@dataclass(frozen=True)
class Head:
    """A plain linear head and the two transforms that models apply after it."""

    weight: Tensor
    """(V, D)"""
    bias: Tensor | None = None
    """(V,)"""
    temperature: float = 1.0
    softcap: float | None = None
    """Scores are squashed into (−softcap, softcap) before the division by the temperature."""


def plain_head(model: Any) -> Head | str:
    """The head of a causal transformers model (PEFT wrappers included), or the reason why it is not a plain one."""
    if not hasattr(model, "get_output_embeddings"):
        return f"{type(model).__name__} has no get_output_embeddings(), so its output head cannot be found"
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        return f"the output head is a {type(layer).__name__}, not a plain nn.Linear"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "the output head has forward hooks, which a fused head would skip"
    weight = layer.weight
    if weight.ndim != 2 or weight.numel() == 0 or hasattr(weight, "full_tensor"):
        return "the output head's weight is sharded over several processes (ZeRO-3, FSDP or a DTensor)"
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    given = {name: float(value) for name in names if (value := getattr(text, name, None)) is not None}
    others = ("output_multiplier_scale", "lm_head_multiplier", "mup_width_multiplier", "dim_model_base")
    unsupported = [name for name in others if getattr(text, name, None) is not None]
    if unsupported or len(given) > 1:
        return f"the model transforms its scores by {' and '.join(unsupported or given)}, which is not supported"
    temperature = given.get("logits_scaling", 1.0 / given.get("logit_scale", 1.0))
    return Head(weight, layer.bias, temperature, given.get("final_logit_softcapping"))


def logits(hidden: Float[Tensor, "N D"], head: Head) -> Float[Tensor, "N V"]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    z = hidden.to(wide) @ head.weight.to(wide).T
    if head.bias is not None:
        z = z + head.bias.to(wide)
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z / head.temperature


def logprob_entropy(
    hidden: Float[Tensor, "N D"], head: Head, targets: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target, and entropy and sum of squares of each row's distribution, each (N,)."""
    live = targets != IGNORE
    logq = torch.log_softmax(logits(hidden, head), -1)
    logp = logq.gather(-1, torch.where(live, targets, 0)[:, None]).squeeze(-1)
    p = logq.exp()
    entropy = -(p * logq.masked_fill(p == 0, 0)).sum(-1)  # 0 · log 0 = 0
    squares = p.square().sum(-1)
    return torch.where(live, logp, 0), torch.where(live, entropy, 0), torch.where(live, squares, 0)
