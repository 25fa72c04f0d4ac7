"""The policy's measures, read from its configuration alone: no weights are loaded."""

from dataclasses import dataclass
from typing import Any

from dew.engines.trl.launch import Parsed, local_model
from dew.errors import ConfigError
from dew.evaluate.sampling import prompt_text
from dew.preflight.check import Check, failed, ok
from dew.preflight.data import Data

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
LONGEST_TRIED = 256
"""Of so many of the prompts with the most characters the tokens are counted."""


@dataclass(frozen=True)
class Model:
    """P parameters in L layers of width D; V vocabulary entries."""

    parameters: int
    trained: int
    """Parameters with a gradient: all of them, or LoRA's."""
    layers: int
    width: int
    inner: int
    """Width of the feed-forward part (of the experts that one token visits)."""
    heads: int
    query: int
    """Width of all queries together."""
    key: int
    """Width of all keys together, and of all values."""
    vocabulary: int
    context: int | None
    """Most positions that it can tell apart."""
    weight_bytes: float
    """Per parameter; 0.5 if quantised to 4 bits."""
    compute_bytes: int
    """Per activation of a matrix product."""
    eager: bool
    """Attention that holds all its weights, a (T, T) matrix per head."""
    normed_heads: bool = False
    """Queries and keys pass a norm of their own, as in Qwen3."""

    @property
    def residual_bytes(self) -> int:
        return max(2, round(self.weight_bytes)) if self.weight_bytes >= 2 else self.compute_bytes


def read(parsed: Parsed) -> Model:
    from transformers import AutoConfig
    from trl import get_peft_config

    wanted, init = parsed.model, parsed.args.model_init_kwargs or {}
    folder = local_model(wanted.model_name_or_path)
    try:
        config = AutoConfig.from_pretrained(
            folder, revision=wanted.model_revision, trust_remote_code=parsed.args.trust_remote_code
        )
    except Exception as error:  # the hub's many kinds of "not there"
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"model_name_or_path: {wanted.model_name_or_path!r} cannot be read ({reason}).") from None
    parameters, trained, normed_heads = _count(config, get_peft_config(wanted))
    c = config.get_text_config()
    heads = c.num_attention_heads
    head_width = getattr(c, "head_dim", None) or c.hidden_size // heads
    weight_bytes = _weight_bytes(parsed, config, init)
    mixed = parsed.args.bf16 or parsed.args.fp16
    attention = init.get("attn_implementation") or wanted.attn_implementation
    return Model(
        parameters=parameters,
        trained=trained,
        layers=c.num_hidden_layers,
        width=c.hidden_size,
        inner=_inner(c),
        heads=heads,
        query=heads * head_width,
        key=(getattr(c, "num_key_value_heads", None) or heads) * head_width,
        vocabulary=c.vocab_size,
        context=getattr(c, "max_position_embeddings", None),
        weight_bytes=weight_bytes,
        compute_bytes=2 if mixed or weight_bytes <= 2 else 4,
        eager=attention == "eager",
        normed_heads=normed_heads,
    )


def _count(config: Any, peft: Any) -> tuple[int, int, bool]:
    """(all parameters, those that train, whether queries are normed), of a model that takes no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if peft is not None:
            from peft import get_peft_model

            model = get_peft_model(model, peft)
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return (
        sum(p.numel() for p in parameters),
        trained,
        any(name.endswith("q_norm") for name, _ in model.named_modules()),
    )


def _weight_bytes(parsed: Parsed, config: Any, init: dict[str, Any]) -> float:
    if parsed.model.load_in_4bit:
        return 0.5
    if parsed.model.load_in_8bit:
        return 1.0
    dtype = init.get("dtype") or parsed.model.dtype or "float32"
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or "float32"
    return BYTES.get(str(dtype).removeprefix("torch."), 4)


def _inner(c: Any) -> int:
    experts = getattr(c, "num_experts_per_tok", None)
    if experts and getattr(c, "moe_intermediate_size", None):
        return int(experts * c.moe_intermediate_size)
    return int(getattr(c, "intermediate_size", None) or 4 * c.hidden_size)


def longest_prompt(parsed: Parsed, data: Data) -> int:
    """Tokens of the longest prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        local_model(parsed.model.model_name_or_path), trust_remote_code=parsed.args.trust_remote_code
    )
    if data.conversational and tokenizer.chat_template is None:
        raise ConfigError(
            "The prompts are chat messages, and the model's tokenizer has no chat template. Take a model that was "
            "trained to chat, or write the prompts as text."
        )
    texts = sorted((prompt_text(tokenizer, row["prompt"]) for row in data.rows), key=len)[-LONGEST_TRIED:]
    return max(len(ids) for ids in tokenizer(texts)["input_ids"])


def check_context(model: Model, prompt: int, completion: int) -> Check:
    """Whether the longest prompt and the longest answer fit the positions that the model knows."""
    facts = {"prompt": prompt, "completion": completion, "context": model.context}
    says = f"The longest prompt has {prompt} tokens; with max_completion_length={completion} that makes "
    says += f"{prompt + completion}, and the model has {model.context or 'no fixed number of'} positions."
    if model.context is None or prompt + completion <= model.context:
        return ok("context", says, **facts)
    room = model.context - prompt
    remedy = f"Set max_completion_length to at most {room}." if room > 0 else "Leave out the longest prompts."
    return failed("context", says, remedy, **facts)
