"""Many LoRA runs of one language model at once: the base is shared and frozen, adapters have a replica axis R.

The model's own code runs. Its linear layers are replaced by `StackedLinear`, whose rows, sorted by replica, get the
product with the base weight and that with their replica's adapter. An update packs the rows of all replicas into one
sequence without padding; sampling is that of `dew.decoding`.
"""

import hashlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dew.decoding import Decoder, Draw, refusal, replaced
from dew.engines.lab.stack import Answers, Settings
from dew.engines.lab.tasks import generator
from dew.engines.lab.tiny import Adam, deterministic
from dew.errors import ConfigError, Problem, not_loaded
from dew.kernels import Head, linear_logprob_entropy, plain_head
from dew.run.config import find_model

HAS_TRITON = importlib.util.find_spec("triton") is not None
PACKED = "dew_packed"
"""The name under which transformers finds `packed_attention`."""
TILE, COLUMNS = 64, 64
"""Rows of a tile, and of what the widths of joined layers are multiples; see `lora_kernels`."""
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that read the same input."""
HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # else it needs no word
BETAS = (0.9, 0.999)
AT_ONCE = 1024
"""Answers that are sampled at a time, if there are so many: a step of fewer rows hardly takes less time."""
PROMPT = 256
"""Tokens of a prompt that the estimate of memory allows for."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings(Settings):
    """What all runs of a study on a language model share."""

    group_size: int = 8
    prompts: int = 16
    generations: int = 30
    eval_problems: int = 512
    eval_k: int = 4
    max_new_tokens: int = 512
    """Maximum length of an answer."""
    rank: int = 16
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    target_modules: str = "all"
    """Names of the linear layers with adapters, e.g. "q_proj,v_proj"; "all" but the head."""
    pass_tokens: int = 49_152
    """Tokens in one pass of an update."""

    @property
    def spacing(self) -> float:
        """Generations between evaluations: the mean of the last few is the score."""
        return max(1.0, self.generations / 10)


QUICK = LoraSettings(
    prompts=8, optimizer_steps=2, generations=20, eval_problems=32, eval_k=4, evaluations=2, max_new_tokens=48, rank=8,
    alpha=16.0, pass_tokens=8192,
)  # fmt: skip


class Rows:
    """Which replica each row of a product belongs to. Rows are sorted by replica."""

    def __init__(self, replicas: int, device: torch.device | str) -> None:
        self.every = torch.arange(replicas, device=device)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def arrange(self, owners: Tensor, tokens: int = 1) -> None:
        """Neighbouring rows, `tokens` of each of the `owners`, in ascending order."""
        self.count((owners[:, None] == self.every).sum(0) * tokens, len(owners) * tokens)

    def count(self, counts: Tensor, total: int) -> None:
        """(R,) rows of each replica. Tensors of the same total keep their addresses, which graphs refer to."""
        ends = counts.cumsum(0)
        starts, tiles = F.pad(ends, (1, 0)), (counts + TILE - 1) // TILE
        last = tiles.cumsum(0)
        number = torch.arange(total // TILE + len(self.every), device=counts.device)
        replica = torch.searchsorted(last, number, right=True)
        inside, replica = replica < len(self.every), replica.clamp_max(len(self.every) - 1)
        first = starts[replica] + (number - (last - tiles)[replica]) * TILE
        new = torch.stack([replica, first, torch.where(inside, ends[replica], 0)], 1).int(), starts.int()
        for old, now in zip(self._kept.setdefault(total, new), new, strict=True):
            old.copy_(now)

    def __getitem__(self, total: int) -> tuple[Tensor, Tensor]:
        """Replica, first row and end of each tile, and the first row of each replica with the end of the last."""
        return self._kept[total]


class StackedLinear(nn.Module):
    """A frozen linear layer with an adapter for each replica: A (R, in, r) and B (R, out, r)."""

    joined: "Joined"
    """The layers that are computed with it, in one product."""
    number: int
    """Its place among them."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base, self.a, self.b = base, a, b

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(x, self.number)


class Joined:
    """Linear layers that read the same input, one after the other: the first call computes them all."""

    def __init__(self, layers: Sequence[StackedLinear], rows: Rows, scale: float) -> None:
        self.layers, self.rows, self.scale = layers, rows, scale
        self._read: Tensor | None = None
        self._left = dict[int, Tensor]()
        bases = [x.base for x in layers]
        self.weight: Tensor = bases[0].weight
        self.bias: Tensor | None = bases[0].bias
        if len(layers) > 1:  # the layers keep views
            self.weight = torch.cat([x.weight for x in bases])
            self.bias = None if self.bias is None else torch.cat([x.bias for x in bases])
            for base, part in zip(bases, self.weight.split([x.out_features for x in bases]), strict=True):
                base.weight = nn.Parameter(part, requires_grad=False)
        self.a, self.b = ([getattr(x, side) for x in layers] for side in "ab")
        self.low = tuple(torch.cat(x, i).to(self.weight.dtype).detach() for x, i in ((self.a, 2), (self.b, 1)))
        """What kernels read, in the dtype of the base."""
        rank = self.a[0].shape[2]
        self.parts = [*self.low[0].split(rank, 2), *self.low[1].split([x.out_features for x in bases], 1)]
        for i, layer in enumerate(layers):
            layer.joined, layer.number = self, i
        if self.weight.is_cuda and HAS_TRITON:
            from dew.engines.lab import lora_kernels

            self._kernels, device = lora_kernels, self.weight.device
            sizes = ([bases[0].in_features], rank * len(bases)), ([x.out_features for x in bases], rank)
            self._layouts = [lora_kernels.Layout(*x, device) for x in sizes]

    def __call__(self, x: Tensor, number: int) -> Tensor:
        if self._read is not x or number not in self._left:
            self._read, self._left = x, dict(enumerate(self._product(x)))
        found = self._left.pop(number)
        if not self._left:
            self._read = None
        return found

    def _product(self, x: Tensor) -> Sequence[Tensor]:
        if self.weight.is_cuda and HAS_TRITON:
            found = self.fused(x)
            return found if isinstance(found, tuple) else (found,)
        flat = x.reshape(-1, x.shape[-1])
        starts = self.rows[len(flat)][1].tolist()
        base = F.linear(flat, self.weight, self.bias).split([len(x.base.weight) for x in self.layers], 1)
        parts = zip(base, self.a, self.b, strict=True)
        return [(y + self.scale * _adapted(flat, a, b, starts)).view(*x.shape[:-1], -1) for y, a, b in parts]

    def fused(self, x: Tensor, gated: bool = False) -> Any:
        """With kernels: the output of each layer; `gated`: silu of the first times the second."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        given = (self.low, self._layouts, self.rows[len(flat)], self.scale, gated, *self.a, *self.b)
        found = self._kernels.AdaptedLinear.apply(flat, self.weight, self.bias, *given)
        if isinstance(found, tuple):
            return tuple(y.view(*x.shape[:-1], -1) for y in found)
        return found.view(*x.shape[:-1], -1)


def _adapted(x: Tensor, a: Tensor, b: Tensor, starts: Sequence[int]) -> Tensor:
    parts = zip(x.split([j - i for i, j in pairwise(starts)]), a, b, strict=True)
    return torch.cat([rows @ A.to(x.dtype) @ B.to(x.dtype).T for rows, A, B in parts])


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
        """Of some numbers of every parameter: runs are comparable if they started from the same model."""
        some = [p.flatten()[:64].float().cpu().numpy().tobytes() for _, p in sorted(self.model.state_dict().items())]
        return hashlib.sha256(b"".join(some)).hexdigest()[:12]

    def memory(self, settings: LoraSettings) -> tuple[float, float]:
        """Bytes that each run needs, for adapters and cache, and that all need together, for a pass of an update."""
        config, size = self.model.config.get_text_config(), self.model.dtype.itemsize
        linear = [
            m for m in self.model.modules() if isinstance(m, nn.Linear) and m is not self.model.get_output_embeddings()
        ]
        adapter = settings.rank * sum(m.in_features + m.out_features for m in linear)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        slots = settings.answers * settings.max_new_tokens + settings.prompts * PROMPT
        cache = slots * 2 * config.num_hidden_layers * heads * width * size
        token = config.num_hidden_layers * (8 * config.hidden_size + 4 * config.intermediate_size) * size
        return adapter * (18.0 + 4) + cache, 1.0 * settings.pass_tokens * token


def load_base(name: str, device: str, dtype: torch.dtype | None = None) -> Base:
    """From a folder, the hub or the models that come with dew; in bfloat16 on a GPU, else in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = find_model(name, "--model")
    dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=False, use_safetensors=True, dtype=dtype, attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise ConfigError(not_loaded("model", name, error)) from None
    return as_base(path, model.to(device).eval().requires_grad_(False), tokenizer)


def as_base(name: str, model: Any, tokenizer: Any) -> Base:
    head = plain_head(model)
    why = refusal(model, devices=("cuda", "cpu")) or (head if isinstance(head, str) else None)
    if why or not isinstance(head, Head):
        remedy = "Choose a dense model such as Qwen2, Qwen3, Llama or SmolLM2, or train it with `dew compare`."
        raise ConfigError(Problem(f"{name}: the lab cannot stack adapters on this model: {why}.", remedy=remedy))
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    return Base(name, model, tokenizer, tuple(ends) if isinstance(ends, list | tuple) else (ends,), head)


def _stack_adapters(base: Base, rows: Rows, seeds: Sequence[int], settings: LoraSettings) -> dict[str, StackedLinear]:
    """Replace the linear layers, those of an earlier stack too. Adapters start as in PEFT: A by seed, B at 0."""
    wanted, head = settings.target_modules.split(","), base.model.get_output_embeddings()
    linear = {
        name: module
        for name, module in base.model.named_modules()
        if (type(module) is nn.Linear and module is not head and not name.endswith(".base"))
        or isinstance(module, StackedLinear)
    }
    chosen = {name: x for name, x in linear.items() if wanted == ["all"] or name.rpartition(".")[2] in wanted}
    if not chosen:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        what = f"target_modules={settings.target_modules}: the model has no such linear layers."
        raise ConfigError(Problem(what, remedy=f"Name some of: {known}."))
    found = dict[str, StackedLinear]()
    for name, module in linear.items():
        layer: Any = module.base if isinstance(module, StackedLinear) else module
        if name in chosen:
            weight = layer.weight
            a = {seed: _first_matrix(seed, name, layer, settings.rank) for seed in set(seeds)}
            A = torch.stack([a[seed] for seed in seeds]).to(weight.device).requires_grad_()
            B = torch.zeros(len(seeds), layer.out_features, settings.rank, device=weight.device, requires_grad=True)
            layer = found[name] = StackedLinear(layer, A, B)
        base.model.set_submodule(name, layer)
    for some in _same_input(found):
        Joined([found[name] for name in some], rows, settings.alpha / settings.rank)
    return found


def _same_input(layers: dict[str, StackedLinear]) -> list[list[str]]:
    """Names of layers that read the same input: q, k and v of an attention, gate and up of a gated unit. All of a group
    have a bias, or none."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for name, layer in layers.items():
        owner, _, own = name.rpartition(".")
        kind = next((" ".join(x) for x in JOINED if own in x), own)
        if layer.base.out_features % COLUMNS:
            kind = own
        groups.setdefault((owner, kind, layer.base.bias is None), []).append(name)
    return list(groups.values())


def _first_matrix(seed: int, name: str, layer: nn.Linear, rank: int) -> Tensor:
    bound = layer.in_features**-0.5
    return torch.rand(layer.in_features, rank, generator=generator(seed, "adapter", name)) * 2 * bound - bound


def _fuse(model: Any) -> list[Any]:
    """Compute norms and gated units with one kernel each; return what an update replaces besides: rotary embeddings."""
    if model.device.type != "cuda" or not HAS_TRITON:
        return []
    from dew.decoding.fused import fused_parts
    from dew.engines.lab.lora_kernels import Rotary

    def forward(mlp: Any, x: Tensor) -> Tensor:
        found: Tensor = mlp.down_proj(mlp.gate_proj.joined.fused(x, gated=True))
        return found

    parts = fused_parts(model)
    for mlp in model.modules():
        both = [getattr(mlp, name, None) for name in JOINED[1]]
        joined = getattr(both[0], "joined", None)
        if joined and joined.layers == both and "SiLU" in type(getattr(mlp, "act_fn", None)).__name__:
            parts.append((mlp, "forward", partial(forward, mlp)))
    rotary = [(owner, name, Rotary.apply) for owner, name, _ in parts if name != "forward"]
    for part in parts:
        if part[1] == "forward":
            setattr(*part)
    return rotary


# ── policies ────────────────────────────────────────────────────────────────────────────────────────────────


class LoraPolicies:
    """R adapters on one model, with learning rates of their own; the same interface as `tiny.Policies`."""

    noise = (2,)
    refills = True

    def __init__(
        self, base: Base, prompts: Callable[[int], Sequence[int]], seeds: Sequence[int], rates: Tensor,
        settings: LoraSettings, ended: Callable[[Sequence[int], Tensor], None] | None = None,
        sum_sq: bool = False,
    ) -> None:  # fmt: skip
        """`prompts` gives the token ids of a problem by its number; `ended` is told of problems and answers as these
        end; `sum_sq`: some run reads Σπ²."""
        self.ended = ended
        self.base, self.prompts, self.settings, device = base, prompts, settings, base.model.device
        self.rows, self.device = Rows(len(seeds), device), device
        self.layers = _stack_adapters(base, self.rows, seeds, settings)
        self.joined = list({id(x.joined): x.joined for x in self.layers.values()}.values())
        named = {f"{name}.{side}": getattr(x, side) for name, x in self.layers.items() for side in ("a", "b")}
        self.parameters: dict[str, Tensor] = named
        self.adam = Adam(named, rates, BETAS)
        self.parts = _fuse(base.model)
        draw = Draw(sum_sq=sum_sq)
        self.decoder = Decoder(base.model, draw, ends=base.ends, pad=base.pad, keep=True, arrange=self.rows.arrange)

    def sample(self, problems: Tensor, uniforms: Tensor) -> Answers:
        """Answers to (R, P, 1) problems; (R, P·G, T, 2) uniform numbers decide their tokens."""
        (R, P), (B, T) = problems.shape[:2], uniforms.shape[1:3]
        numbers = problems[..., 0].repeat_interleave(B // P, 1)
        asked = numbers.flatten().tolist()
        prompts, owners = [self.prompts(i) for i in asked], [i for i in range(R) for _ in range(B)]
        if self.decoder.affordable(max(map(len, prompts)), T) < R:
            raise torch.OutOfMemoryError("The cache of one answer of each run does not fit.")
        rows = max(R * self.settings.answers, AT_ONCE)

        def told(numbers: Sequence[int], tokens: Tensor) -> None:
            if self.ended:
                self.ended([asked[i] for i in numbers], tokens.cpu())

        found = self.decoder.rows(prompts, T, rows, owners=owners, uniforms=uniforms.flatten(0, 1), told=told)
        tokens, lengths, *signals = (x.unflatten(0, (R, B)) for x in found)
        mask = torch.arange(T, device=tokens.device) < lengths[..., None]
        logp, entropy, *squares = (torch.where(mask, x, 0) for x in signals)
        return Answers(torch.where(mask, tokens, -1), logp, entropy, mask, *squares)

    def passes(self, problems: Tensor, lengths: Tensor) -> list[slice]:
        """As many columns of rows in each as have `pass_tokens` tokens, and at least one."""
        numbers = problems[..., 0].tolist()
        prompts = torch.tensor([[len(self.prompts(i)) for i in row] for row in numbers], device=lengths.device)
        columns = torch.where(lengths > 0, prompts + lengths, 0).sum(0).tolist()
        found, first, size = [], 0, 0
        for i, tokens in enumerate(columns):
            if size and size + tokens > self.settings.pass_tokens:
                found.append(slice(first, i))
                first, size = i, 0
            size += tokens
        return [*found, slice(first, len(columns))]

    def score(self, problems: Tensor, tokens: Tensor, mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """(R, b, T) log π of the tokens where the mask is True, and their entropies, without gradient."""
        (R, b, T), device = tokens.shape, self.device
        numbers, answer = problems[..., 0].flatten().tolist(), mask.sum(-1).flatten()
        prompts = {i: torch.tensor(self.prompts(i)) for i in numbers}
        prompt = torch.tensor([len(prompts[i]) for i in numbers], device=device)
        table = nn.utils.rnn.pad_sequence([prompts[i] for i in numbers], batch_first=True).to(device)
        size = torch.where(answer > 0, prompt + answer - 1, 0)  # the last token is not read
        bounds = F.pad(size.cumsum(0), (1, 0))
        total, longest = torch.stack([bounds[-1], size.max()]).tolist()
        row = torch.repeat_interleave(size, output_size=total)
        place = torch.arange(total, device=device) - bounds[row]
        later = (place - prompt[row]).clamp_min(0)
        ids = torch.where(
            place < prompt[row], table[row, place.clamp_max(table.shape[1] - 1)], tokens.flatten(0, 1)[row, later]
        )
        self.rows.count(size.view(R, b).sum(1), total)
        starts = bounds[F.pad(size > 0, (1, 0), value=True)].int()
        attention = (self.base.model.config.get_text_config(), "_attn_implementation_internal", PACKED)
        with replaced([*self.parts, attention]):
            hidden = self.base.model.base_model(
                input_ids=ids[None], position_ids=place[None], use_cache=False,
                cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=longest, max_length_k=longest,
            ).last_hidden_state[0]  # fmt: skip
        read = place >= prompt[row] - 1
        where = (row * T + place - prompt[row] + 1)[read]
        head, target = self.base.head, tokens.flatten()[where]
        how: dict[str, Any] = {"bias": head.bias, "temperature": head.temperature, "softcap": head.softcap}
        found = linear_logprob_entropy(hidden[read], head.weight, target, **how)
        logp, entropy = (x.new_zeros(R * b * T).index_copy(0, where, x).view(R, b, T) for x in found)
        return logp, entropy

    @torch.no_grad()
    def score_start(self, problems: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """(R, b, T) log π₀ of the tokens: those of the model without adapters, which all runs start from."""
        with replaced([(some, "scale", 0.0) for some in self.joined]):
            return self.score(problems, tokens, mask)[0]

    def backward(self, loss: Tensor) -> None:
        with deterministic():
            loss.backward()

    def step(self) -> Tensor:
        """Take an optimizer step; return (R,) gradient norms before clipping."""
        norm = self.adam.step()
        self.refresh()
        return norm

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the adapters to what kernels read."""
        own = [x for some in self.joined for x in (*some.a, *some.b)]
        torch._foreach_copy_([x for some in self.joined for x in some.parts], own)

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load(state["adam"])
        self.refresh()

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
