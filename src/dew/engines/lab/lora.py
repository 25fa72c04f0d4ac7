"""Many LoRA runs of one language model at once: the base is shared and frozen, adapters have a replica axis R.

The model's own forward pass runs, with the linear layers of `adapters`. An update packs the rows of all replicas into
one sequence without padding. `dew.decoding` samples.
"""

import hashlib
import inspect
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dew.compare.sampling import end_tokens
from dew.decoding import Decoder, Draw, refusal, replaced
from dew.decoding.buffers import PAGE, cache_shape
from dew.engines.lab.adapters import Joined, Rows, fuse, stack_adapters
from dew.engines.lab.study_settings import LoraSettings
from dew.engines.lab.tasks import Answers
from dew.engines.lab.tiny import Adam
from dew.errors import ConfigError, Problem, loading
from dew.kernels import Head, linear_logprob_entropy, plain_head
from dew.memory import free_memory
from dew.run.config import find_model

PACKED = "dew_packed"
"""The name under which `packed_attention` is registered with transformers."""
HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # else always enabled
BETAS = (0.9, 0.999)
Asked = Sequence[Sequence[tuple[int, int]]]
"""The problem and the length of the answer of each of (R, b) rows."""
AT_ONCE = 1024
"""Minimum number of answers sampled at a time: a step with fewer rows hardly takes less time."""
PASS_SHARE = 0.5
"""Share of the memory for a pass of an update; the rest is for adapters and the KV cache."""
PROMPT = 256
"""Prompt length assumed in the memory estimate, in tokens."""


def packed_attention(
    _: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None,
    cu_seq_lens_q: Any = None, max_length_q: int = 0, **__: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention within each of several packed sequences: (1, heads, N, D) -> (1, N, heads, D)."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        more: Any = {"enable_gqa": True} if HAS_GQA else {}
        mixed: Any = varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(-1, 0), **more)
        return mixed[None], None
    sizes = cu_seq_lens_q.diff().tolist()
    parts = zip(*(x.split(sizes, 2) for x in (query, key, value)), strict=True)
    mix = partial(F.scaled_dot_product_attention, is_causal=True, scale=scaling, enable_gqa=True)
    return torch.cat([mix(*part) for part in parts], 2).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)


# ── the base model ──────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Base:
    """A language model that all runs start from."""

    name: str
    model: Any
    tokenizer: Any
    ends: tuple[int, ...]
    """Tokens that end an answer."""
    head: Head

    @property
    def pad(self) -> int:
        return self.ends[0] if self.tokenizer.pad_token_id is None else int(self.tokenizer.pad_token_id)

    @property
    def digest(self) -> str:
        """Hash of the first 64 values of every parameter: runs are comparable if they started from the same model."""
        some = [p.flatten()[:64].float().cpu().numpy().tobytes() for _, p in sorted(self.model.state_dict().items())]
        return hashlib.sha256(b"".join(some)).hexdigest()[:12]

    def memory(self, settings: LoraSettings) -> tuple[float, float]:
        """Bytes per run (adapters and KV cache), and bytes that all runs share (a pass of an update)."""
        head = self.model.get_output_embeddings()
        linear = [m for m in self.model.modules() if isinstance(m, nn.Linear) and m is not head]
        adapter = settings.rank * sum(m.in_features + m.out_features for m in linear)
        slots = settings.answers * settings.max_new_tokens + settings.prompts * PROMPT
        cache = slots * math.prod(cache_shape(self.model, 1)) // PAGE * self.model.dtype.itemsize
        return adapter * (18.0 + 4) + cache, self.pass_tokens(settings) * self._token_memory

    def pass_tokens(self, settings: LoraSettings) -> int:
        """Tokens in one pass of an update, which may take PASS_SHARE of the memory that the model leaves."""
        if self.model.device.type == "cuda":
            room = torch.cuda.get_device_properties(self.model.device).total_memory - self.model.get_memory_footprint()
        else:
            room = free_memory()
        return max(1, min(settings.pass_tokens, int(PASS_SHARE * room / self._token_memory)))

    @property
    def _token_memory(self) -> float:
        """Bytes of activations that an update keeps per token."""
        config = self.model.config.get_text_config()
        width = 8.0 * config.hidden_size + 4 * config.intermediate_size
        return width * config.num_hidden_layers * self.model.dtype.itemsize


def load_base(name: str, device: str) -> Base:
    """Load a model from a folder, the Hub or dew's bundled models; in bfloat16 on a GPU, else in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # Every pass has another size: with fixed segments PyTorch comes to reserve up to 40% more memory.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    path = find_model(name, "--model")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    with loading("model", name, (OSError, ValueError)):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=False, use_safetensors=True, dtype=dtype, attn_implementation="sdpa"
        )
    return as_base(path, model.to(device).eval().requires_grad_(False), tokenizer)


def as_base(name: str, model: Any, tokenizer: Any) -> Base:
    head = plain_head(model)
    why = refusal(model, devices=("cuda", "cpu")) or (head if isinstance(head, str) else None)
    if why or not isinstance(head, Head):
        remedy = "Choose a dense model such as Qwen2, Qwen3, Llama or SmolLM2, or train it with `dew compare`."
        raise ConfigError(Problem(f"{name}: the lab cannot stack adapters on this model: {why}.", remedy=remedy))
    return Base(name, model, tokenizer, end_tokens(model, tokenizer), head)


# ── policies ────────────────────────────────────────────────────────────────────────────────────────────────
class LoraPolicies:
    """R adapters on one model, each with its own learning rate; the same interface as `TinyPolicies`."""

    noise = (2,)
    refills = True

    def __init__(
        self, base: Base, prompts: Sequence[Sequence[int]], seeds: Sequence[int], rates: Tensor,
        settings: LoraSettings, ended: Callable[[Sequence[int], Tensor], None] | None = None,
        sum_sq: bool = False,
    ) -> None:  # fmt: skip
        """`prompts`: token ids of each problem. `ended(problems, tokens)` is called as answers end. `sum_sq`: also
        compute Σπ², which some runs read."""
        self.ended = ended
        self.base, self.prompts, self.settings, device = base, prompts, settings, base.model.device
        self.rows, self.device = Rows(len(seeds), device), device
        self.pass_tokens = base.pass_tokens(settings)
        self.layers = stack_adapters(base.model, self.rows, seeds, settings)
        self.joined = list({id(x.joined): x.joined for x in self.layers.values()}.values())
        self.parameters = {f"{name}.{side}": getattr(x, side) for name, x in self.layers.items() for side in "ab"}
        self.adam = Adam(self.parameters, rates, BETAS, partial(_refresh, self.joined))
        self.parts = fuse(base.model)
        draw = Draw(sum_sq=sum_sq)
        self.decoder = Decoder(base.model, draw, ends=base.ends, pad=base.pad, keep=True, arrange=self.rows.arrange)

    def sample(self, problems: Tensor, uniforms: Tensor) -> Answers:
        """Sample answers to (R, P, 1) problems; (R, P·G, T, 2) uniform numbers decide their tokens."""
        (R, P), (B, T) = problems.shape[:2], uniforms.shape[1:3]
        numbers = problems[..., 0].repeat_interleave(B // P, 1)
        asked = numbers.flatten().tolist()
        prompts, owners = [self.prompts[i] for i in asked], [i for i in range(R) for _ in range(B)]
        if self.decoder.affordable(max(map(len, prompts)), T) < R:
            raise torch.OutOfMemoryError("The KV cache does not fit one answer per run.")
        rows = max(R * self.settings.answers, AT_ONCE)

        def on_ended(numbers: Sequence[int], tokens: Tensor) -> None:
            if self.ended:
                self.ended([asked[i] for i in numbers], tokens.cpu())

        found = self.decoder.rows(prompts, T, rows, owners=owners, uniforms=uniforms.flatten(0, 1), on_ended=on_ended)
        tokens, lengths, *signals = (x.unflatten(0, (R, B)) for x in found)
        mask = torch.arange(T, device=tokens.device) < lengths[..., None]
        logp, entropy, *squares = (torch.where(mask, x, 0) for x in signals)
        return Answers(torch.where(mask, tokens, -1), logp, entropy, mask, *squares)

    def passes(self, problems: Tensor, lengths: Tensor) -> Iterator[tuple[slice, Asked]]:
        """Split the (R, b) rows of an optimizer step by columns, `pass_tokens` tokens or at least one column a pass.

        Yield the columns of a pass with what `score` has to know of them: if each pass asked the GPU for that, Python
        could not work ahead of it.
        """
        numbers, sizes = torch.stack([problems[..., 0], lengths]).tolist()
        rows = [list(zip(*row, strict=True)) for row in zip(numbers, sizes, strict=True)]
        columns = [sum(len(self.prompts[i]) + n for i, n in column if n) for column in zip(*rows, strict=True)]
        first, size = 0, 0
        for i, tokens in enumerate([*columns, math.inf]):
            if (size and size + tokens > self.pass_tokens) or i == len(columns):
                yield slice(first, i), [row[first:i] for row in rows]
                first, size = i, 0
            size += tokens

    def score(self, asked: Asked, tokens: Tensor, mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """(R, b, T) log π of the tokens where the mask is True, else 0; and the entropies, without gradient."""
        (R, b, T), given = tokens.shape, [pair for row in asked for pair in row]
        texts = {i: self.prompts[i] for i, _ in given}
        first = dict(zip(texts, accumulate(map(len, texts.values()), initial=0), strict=False))
        text = self._copied([token for ids in texts.values() for token in ids])
        # The last token is not an input.
        sizes = [len(texts[i]) + n - 1 if n else 0 for i, n in given]
        total, longest = sum(sizes), max(sizes)
        rows = [(first[i], len(texts[i]), n, size) for (i, n), size in zip(given, sizes, strict=True)]
        begin, prompt, answer, size = self._copied(rows).T
        bounds = F.pad(size.cumsum(0), (1, 0))
        row, place = _runs(size, total)
        later = (place - prompt[row]).clamp_min(0)
        read = text[(begin[row] + place).clamp_max(len(text) - 1)]
        ids = torch.where(place < prompt[row], read, tokens.flatten(0, 1)[row, later])
        self.rows.count(size.view(R, b).sum(1), total)
        starts = self._copied([0, *accumulate(filter(None, sizes))]).int()
        attention = (self.base.model.config.get_text_config(), "_attn_implementation_internal", PACKED)
        with replaced([*self.parts, attention]):
            hidden = self.base.model.base_model(
                input_ids=ids[None], position_ids=place[None], use_cache=False,
                cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=longest, max_length_k=longest,
            ).last_hidden_state[0]  # fmt: skip
        row, place = _runs(answer, sum(n for _, n in given))
        where, after = row * T + place, bounds[row] + prompt[row] - 1 + place
        head, target = self.base.head, tokens.flatten()[where]
        how: dict[str, Any] = {"bias": head.bias, "temperature": head.temperature, "softcap": head.softcap}
        found = linear_logprob_entropy(hidden[after], head.weight, target, all_live=True, **how)
        logp, entropy = (x.new_zeros(R * b * T).index_copy(0, where, x).view(R, b, T) for x in found)
        return logp, entropy

    @torch.no_grad()
    def score_start(self, asked: Asked, tokens: Tensor, mask: Tensor) -> Tensor:
        """(R, b, T) log π₀ of the tokens: π₀ is the model without adapters, from which all runs start."""
        with replaced([(some, "scale", 0.0) for some in self.joined]):
            return self.score(asked, tokens, mask)[0]

    def _copied(self, values: Sequence[Any]) -> Tensor:
        """A tensor on the device. From pinned memory it is copied without waiting for the device."""
        return torch.tensor(values, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)

    def save(self, replica: int, folder: Path) -> None:
        """Write a replica's adapter in PEFT's format."""
        from safetensors.torch import save_file

        names, dtype = sorted({name.rpartition(".")[2] for name in self.layers}), self.base.model.dtype
        about = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": self.base.name,
            "r": self.settings.rank, "lora_alpha": self.settings.alpha, "target_modules": names, "lora_dropout": 0.0,
            "bias": "none", "inference_mode": True,
        }  # fmt: skip
        weights = {}
        for name, layer in self.layers.items():
            weights[f"base_model.model.{name}.lora_A.weight"] = layer.a[replica].detach().T.to(dtype).contiguous()
            weights[f"base_model.model.{name}.lora_B.weight"] = layer.b[replica].detach().to(dtype).contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: x.cpu() for name, x in weights.items()}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(about, indent=1))


@torch.no_grad()
def _refresh(layers: Sequence[Joined]) -> None:
    """Copy the adapters to the concatenated tensors that the kernels read."""
    own = [x for some in layers for x in (*some.a, *some.b)]
    torch._foreach_copy_([x for some in layers for x in some.parts], own)


def _runs(sizes: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For `total` elements in consecutive runs of these sizes: the run of each element, and its index in the run."""
    run = torch.repeat_interleave(sizes, output_size=total)
    return run, torch.arange(total, device=sizes.device) - (sizes.cumsum(0) - sizes)[run]
