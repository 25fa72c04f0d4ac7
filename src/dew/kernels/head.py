"""The output head of a language model: hidden states -> scores over the vocabulary.

z = softcap · tanh((h Wᵀ + b) / softcap) / temperature          without the tanh if softcap is None
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Head:
    """A plain linear head and the two transforms that models apply after it."""

    weight: Tensor
    """(V, D)"""
    bias: Tensor | None = None
    """(V,)"""
    temperature: float = 1.0
    """Divisor of the scores."""
    softcap: float | None = None
    """Scores are squashed into (−softcap, softcap) before the division."""


def plain_head(model: Any) -> Head | str:
    """The head of a transformers causal model (PEFT wrappers included), or the reason why it has no plain one."""
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
