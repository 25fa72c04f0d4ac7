"""Fused kernels for one-token steps: norms, rotary embeddings, linear layers, LoRA adapters and attention.

In transformers, norms and rotary embeddings take 8 and 10 kernels, which at this size is half of a step's time, and
PyTorch's attention cannot read pages. A part of the model is replaced only if the kernel gives the same result on a
test input. Frozen linear layers that read the same input (q, k and v; gate and up) are computed as one product.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from triton.runtime.errors import TritonError

from dew.decoding.buffers import LONG, PAGE, cache_shape, gather, gathered_attention, hidden
from dew.decoding.same_input import SAME_INPUT, ComputedTogether, joined

Part = tuple[Any, str, Callable[..., Any]]
"""An object, the name of one of its attributes, and what to call instead."""
ATTENTION = "dew_fused"
"""The name under which `attention` is registered with transformers."""
TOLERANCE = 0.02
"""Relative error up to which results count as the same: bfloat16 is rounded at different places."""
BLOCK = 2048
WARPS, STAGES = 4, 3
"""Launch settings of `attention`."""
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _rotate(x, row, x_row, x_head, cos, sin, c_row, out, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    head, i = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None]
    at, angle, to = x + row * x_row + head * x_head + i, row * c_row + i, (row * heads + head) * 2 * half + i
    here = i < half
    live = here & (head < heads)
    a, b = tl.load(at, mask=live).to(tl.float32), tl.load(at + half, mask=live).to(tl.float32)
    c, d = tl.load(cos + angle, mask=here).to(tl.float32), tl.load(cos + angle + half, mask=here).to(tl.float32)
    s, t = tl.load(sin + angle, mask=here).to(tl.float32), tl.load(sin + angle + half, mask=here).to(tl.float32)
    tl.store(out + to, a * c - b * s, mask=live)
    tl.store(out + to + half, b * d + a * t, mask=live)


@triton.jit
def _rotary_kernel(
    q, q_row, q_head, q_out, q_heads, k, k_row, k_head, k_out, k_heads, cos, sin, c_row, half,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _rotate(q, row, q_row, q_head, cos, sin, c_row, q_out, q_heads, half, Q_HEADS, HALF)
    else:
        _rotate(k, row, k_row, k_head, cos, sin, c_row, k_out, k_heads, half, K_HEADS, HALF)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of (B, heads, 1, D) queries and keys with (B or 1, 1, D) angles."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    both = [(x, *x.stride()[:2], out, x.shape[1]) for x, out in ((q, q_out), (k, k_out))]
    half, angles = q.shape[3] // 2, 0 if cos.shape[0] == 1 else cos.stride(0)
    padded = (triton.next_power_of_2(n) for n in (q.shape[1], k.shape[1], half))
    _rotary_kernel[(len(q), 2)](*both[0], *both[1], cos, sin, angles, half, *padded, num_warps=2)
    return q_out, k_out


@triton.jit
def _attention_kernel(
    query, q_row, q_head, keys, values, page_size, head_size, table, out, heads, group, width, scale,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program computes the query heads that share a key head. A row whose table is 0 reads nothing and gets 0. With
    several parts, each reads some of the pages, and `_join_kernel` merges their sums, maxima and divisors."""
    row, key_head, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)[None]
    prompt, length = tl.load(table + row * 4), tl.load(table + row * 4 + 1)
    answer, written = tl.load(table + row * 4 + 2), tl.load(table + row * 4 + 3)
    head = key_head * group + tl.arange(0, GROUP)[:, None]
    live = (head < (key_head + 1) * group) & (i < width)
    q = tl.load(query + row * q_row + head * q_head + i, mask=live, other=0.0)
    slot, before = tl.arange(0, PAGE), tl.cdiv(length, PAGE)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    mixed = tl.zeros([GROUP, WIDTH], tl.float32)
    begin, end = 0, before + tl.cdiv(written, PAGE)
    if PARTS > 1:
        each = tl.cdiv(end, PARTS)
        begin = tl.program_id(2) * each
        end = tl.minimum(end, begin + each)
    for j in range(begin, end):
        page = tl.where(j < before, prompt + j, answer + j - before).to(tl.int64)
        here = slot < tl.where(j < before, length - j * PAGE, written - (j - before) * PAGE)
        place = page * page_size + key_head * head_size + slot[:, None] * width + i
        seen = here[:, None] & (i < width)
        key, value = tl.load(keys + place, mask=seen, other=0.0), tl.load(values + place, mask=seen, other=0.0)
        s = tl.where(here[None], tl.dot(q, tl.trans(key), input_precision="ieee") * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p, shrink = tl.exp(s - higher[:, None]), tl.exp(top - higher)
        mixed = mixed * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        top = higher
    if PARTS == 1:
        tl.store(out + (row * heads + head) * width + i, mixed / tl.where(total > 0, total, 1.0)[:, None], mask=live)
    else:
        at = out + ((row * PARTS + tl.program_id(2)) * heads + head) * (width + 2)
        tl.store(at + i, mixed, mask=live)
        one = live & (i == 0)
        tl.store(at + width + i, tl.broadcast_to(top[:, None], (GROUP, WIDTH)), mask=one)
        tl.store(at + width + 1 + i, tl.broadcast_to(total[:, None], (GROUP, WIDTH)), mask=one)


@triton.jit
def _join_kernel(parts, out, heads, width, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    row, head, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)[None]
    at = parts + ((row * PARTS + tl.arange(0, PARTS)[:, None]) * heads + head) * (width + 2)
    top, total = tl.load(at + width), tl.load(at + width + 1)
    most = tl.maximum(tl.max(top), LOWEST)
    share = tl.exp(top - most)
    mixed = tl.sum(share * tl.load(at + i, mask=i < width, other=0.0), 0)[None]
    total = tl.sum(share * total)
    tl.store(out + (row * heads + head) * width + i, mixed / tl.where(total > 0, total, 1.0), mask=i < width)


def attention(
    _: Any, query: Tensor, key: Tensor, value: Tensor, table: Tensor, scaling: float | None = None, parts: int = 1,
    **__: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of (B, heads, 1, D) queries over (pages, heads, PAGE, D) keys and values. The table is (B, 1, 1, 4).

    `parts`, a power of two: the number of programs that share the pages of a row.
    """
    rows, heads, _one, width = query.shape
    group, padded = heads // key.shape[1], max(16, triton.next_power_of_2(width))
    out = torch.empty(rows, 1, heads, width, dtype=query.dtype, device=query.device)
    into = out if parts == 1 else torch.empty(rows, parts, heads, width + 2, device=query.device)
    _attention_kernel[(rows, key.shape[1], parts)](
        query, query.stride(0), query.stride(1), key, value, *key.stride()[:2], table, into, heads, group, width,
        scaling or width**-0.5, max(16, triton.next_power_of_2(group)), padded, key.shape[2], parts, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    if parts > 1:
        _join_kernel[(rows, heads)](into, out, heads, width, parts, triton.next_power_of_2(width), num_warps=1)
    return out, None


@triton.jit
def _store_kernel(
    key, k_row, k_head, value, v_row, v_head, keys, values, page_size, head_size, table, heads, width,
    PAGE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, head, i = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None]
    answer, last = tl.load(table + row * 4 + 2), tl.load(table + row * 4 + 3) - 1
    if last >= 0:
        live = (head < heads) & (i < width)
        place = (answer + last // PAGE).to(tl.int64) * page_size + head * head_size + last % PAGE * width + i
        tl.store(keys + place, tl.load(key + row * k_row + head * k_head + i, mask=live), mask=live)
        tl.store(values + place, tl.load(value + row * v_row + head * v_head + i, mask=live), mask=live)


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> None:
    """Write the (B, heads, 1, D) key and value of each row's last token to its page; see `attention`."""
    heads, width = key.shape[1], key.shape[3]
    _store_kernel[(len(key),)](
        key, *key.stride()[:2], value, *value.stride()[:2], keys, values, *keys.stride()[:2], table, heads, width,
        keys.shape[2], triton.next_power_of_2(heads), triton.next_power_of_2(width), num_warps=2,
    )  # fmt: skip


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
ALL_ATTENTION_FUNCTIONS.register(ATTENTION + LONG, partial(attention, parts=8))


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def lora_linear(base: Any, a: Tensor, b: Tensor, scale: float, x: Tensor) -> Tensor:
    """A linear layer with a PEFT LoRA adapter; scaling and addition are one kernel and round once."""
    found: Tensor = base(x)
    return torch.addmm(found.flatten(0, -2), (x @ a.T).flatten(0, -2), b.T, alpha=scale).view_as(found)


def lora_parts(model: Any) -> list[Part]:
    """Replacements for the layers that have exactly one active, plain LoRA adapter."""
    parts: list[Part] = []
    for layer in model.modules():
        active = getattr(layer, "active_adapters", None) if hasattr(layer, "lora_A") else None
        if not active or len(active) > 1 or layer.merged or layer.disable_adapters or not hasattr(layer, "base_layer"):
            continue
        (name,), base = active, layer.base_layer
        if type(base) is not torch.nn.Linear or name not in layer.lora_A or name in layer.lora_variant:
            continue
        a, b = layer.lora_A[name], layer.lora_B[name]
        if a.bias is None and b.bias is None and a.weight.dtype == b.weight.dtype == base.weight.dtype:
            own = partial(lora_linear, base, a.weight, b.weight, layer.scaling[name])
            parts.append((layer, "forward", own))
    return parts


# ── linear layers with the same input ───────────────────────────────────────────────────────────────────────
def product_parts(model: Any) -> list[Part]:
    """Replacements for frozen linear layers that read the same input. They have no gradients."""
    parts: list[Part] = []
    for module in model.modules():
        for names in SAME_INPUT:
            layers: list[Any] = [module._modules.get(name) for name in names]
            if not all(map(_frozen, layers)) or len({x.bias is None for x in layers}) > 1:
                continue
            weight = joined([x.weight for x in layers])
            bias = None if layers[0].bias is None else joined([x.bias for x in layers])
            gate = partial(gated, module, weight, bias)
            if hasattr(module, "act_fn") and "forward" not in vars(module) and _same_gate(module, gate, weight):
                parts.append((module, "forward", gate))
            else:
                together = ComputedTogether(partial(_products, weight, bias, [len(x.weight) for x in layers]))
                parts += [(layer, "forward", partial(together, i)) for i, layer in enumerate(layers)]
    return parts


def _products(weight: Tensor, bias: Tensor | None, sizes: list[int], x: Tensor) -> Any:
    return F.linear(x, weight, bias).split(sizes, -1)


@triton.jit
def _silu_kernel(both, out, width, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, live = both + row * 2 * width + i, i < width
    gate, up = tl.load(at, mask=live).to(tl.float32), tl.load(at + width, mask=live).to(tl.float32)
    tl.store(out + row * width + i, gate * up / (1 + tl.exp(-gate)), mask=live)


def gated(mlp: Any, weight: Tensor, bias: Tensor | None, x: Tensor) -> Any:
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`"""
    both = F.linear(x, weight, bias).flatten(0, -2)
    rows, width = len(both), both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    _silu_kernel[(rows, triton.cdiv(width, BLOCK))](both, out, width, BLOCK, num_warps=4)
    return mlp.down_proj(out.view(*x.shape[:-1], width))


def _frozen(layer: Any) -> bool:
    return type(layer) is torch.nn.Linear and not layer.weight.requires_grad and "forward" not in vars(layer)


def _same_gate(mlp: Any, own: Callable[..., Any], like: Tensor) -> bool:
    x = torch.linspace(-3, 2, like.shape[1], dtype=like.dtype, device=like.device)[None]
    with torch.no_grad():
        return _same(lambda: own(x), mlp(x))


def fused_parts(model: Any) -> list[Part]:
    like = model.get_input_embeddings().weight
    norms = [m for m in model.modules() if hasattr(m, "variance_epsilon") and type(m).__name__.endswith("RMSNorm")]
    parts: list[Part] = [(norm, "forward", partial(rms_norm, norm)) for norm in norms if _same_norm(norm, like)]
    parts += lora_parts(model)
    home, name = sys.modules[type(model).__module__], "apply_rotary_pos_emb"
    if hasattr(home, name) and _same_rotary(getattr(home, name), cache_shape(model, 1)[-1], like):
        parts.append((home, name, rotary))
    return parts


def same_attention(model: Any) -> bool:
    """Whether `attention` gives the same result as PyTorch's on gathered pages, with this model's heads."""
    heads, like = model.config.get_text_config().num_attention_heads, model.get_input_embeddings().weight
    _, _, pages, shared, _, width = cache_shape(model, 6)
    size = pages * shared * PAGE * width
    given = torch.linspace(-3, 2, 2 * heads * width + 2 * size, dtype=like.dtype, device=like.device).sin()
    query, *both = given.split([2 * heads * width, size, size])
    query, (keys, values) = query.view(2, heads, 1, width), (x.view(pages, shared, PAGE, width) for x in both)
    table = torch.tensor([[1, PAGE + 3, 3, 5], [1, 7, 4, PAGE + 1]], dtype=torch.int32, device=like.device)
    inputs = gather(keys, table, (2, 2)), gather(values, table, (2, 2)), hidden(table, (2, 2), like.dtype)
    expected = gathered_attention(None, query, *inputs)[0]

    def own(parts: int) -> Tensor:
        return attention(None, query, keys, values, table[:, None, None], parts=parts)[0]

    return _same(partial(own, 1), expected) and _same(partial(own, 8), expected)


def _same_norm(norm: Any, like: Tensor) -> bool:
    x = torch.linspace(-3, 2, norm.weight.numel(), dtype=like.dtype, device=like.device)[None]
    plain = "forward" not in vars(norm) and norm.weight.dtype == like.dtype
    return plain and _same(lambda: rms_norm(norm, x), norm(x))


def _same_rotary(own: Callable[..., Any], width: int, like: Tensor) -> bool:
    q = torch.linspace(-3, 2, 4 * width, dtype=like.dtype, device=like.device).view(2, 2, 1, width)
    angle = torch.linspace(0, 3, 2 * width, dtype=like.dtype, device=like.device).view(2, 1, width)
    given = (q, q.flip(0), angle.cos(), angle.sin())
    return _same(lambda: torch.cat(rotary(*given)), torch.cat(own(*given)))


def _same(own: Callable[[], Tensor], expected: Tensor) -> bool:
    try:
        found = own()
    except (TritonError, RuntimeError):  # the kernel does not compile for this GPU, or exceeds its resources
        return False
    return found.shape == expected.shape and bool((found - expected).norm() <= TOLERANCE * expected.norm())
