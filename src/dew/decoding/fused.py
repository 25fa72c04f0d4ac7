"""Kernels for steps of one token: norms, rotary embeddings, adapters, attention, and the draw of the token.

As written in transformers, norms and embeddings take 8 and 10 kernels, which at this size is half of a step's time, and
PyTorch's attention cannot read pages. A part is replaced only if it is found to compute the same.

A token is drawn from each row of logits, with its log-probability and the row's entropy, in one pass. The vocabulary
is cut into blocks. A first uniform number chooses the block and a second the token within it, each by the cumulative
sum of e^{z/T}: the block of the chosen token is the only one that is read twice. Statistics are those of
`dew.kernels.chunked`, in base 2 and merged over blocks, with q = (z − m) log2(e) / T of a block:

    m = max z      n = Σ 2^q      r = n without the maximum's own term      t = Σ 2^q q      w = Σ 2^{2q}
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

from dew.decoding.buffers import LONG, PAGE, gather, gathered_attention, hidden

Part = tuple[Any, str, Callable[..., Any]]
"""An object, the name of one of its attributes, and what to call instead."""
ATTENTION = "dew_fused"
"""The name under which transformers finds `attention`."""
TOLERANCE = 0.02
"""Relative; bfloat16 rounds at other places."""
LOG2E = 1.4426950408889634
BLOCK = 2048
WARPS, STAGES = 4, 3
"""Of a program of `attention`."""
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _rotary_kernel(
    x, x_row, x_head, cos, sin, c_row, out, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    row, head, i = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None]
    at, angle, to = x + row * x_row + head * x_head + i, row * c_row + i, (row * heads + head) * 2 * half + i
    here = i < half
    live = here & (head < heads)
    a, b = tl.load(at, mask=live).to(tl.float32), tl.load(at + half, mask=live).to(tl.float32)
    c, d = tl.load(cos + angle, mask=here).to(tl.float32), tl.load(cos + angle + half, mask=here).to(tl.float32)
    s, t = tl.load(sin + angle, mask=here).to(tl.float32), tl.load(sin + angle + half, mask=here).to(tl.float32)
    tl.store(out + to, a * c - b * s, mask=live)
    tl.store(out + to + half, b * d + a * t, mask=live)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of (B, heads, 1, D) queries and keys with (B or 1, 1, D) angles."""
    found = []
    for x in (q, k):
        rows, heads, _, width = x.shape
        out, shared = torch.empty(x.shape, dtype=x.dtype, device=x.device), cos.shape[0] == 1
        _rotary_kernel[(rows,)](
            x, x.stride(0), x.stride(1), cos, sin, 0 if shared else cos.stride(0), out, heads, width // 2,
            triton.next_power_of_2(heads), triton.next_power_of_2(width // 2), num_warps=2,
        )  # fmt: skip
        found.append(out)
    return found[0], found[1]


@triton.jit
def _attention_kernel(
    query, q_row, q_head, keys, values, page_size, head_size, table, out, heads, group, width, scale,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The query heads that share a key head. A row whose table is 0 reads nothing and gets 0. With several parts, each
    reads some of the pages, and `_join_kernel` joins what they store: sums, maximum and divisor."""
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
    """Attention of (B, heads, 1, D) queries to what the table, (B, 1, 1, 4), says of the pages of keys and values.

    With several `parts`, a power of two, so many programs share the pages of a row.
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
    """A linear layer with an adapter of PEFT: scaling and both sums in one kernel, rounded once."""
    found: Tensor = base(x)
    return torch.addmm(found.flatten(0, -2), (x @ a.T).flatten(0, -2), b.T, alpha=scale).view_as(found)


def lora_parts(model: Any) -> list[Part]:
    """Layers with one plain adapter that is in use."""
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


def fused_parts(model: Any) -> list[Part]:
    like = model.get_input_embeddings().weight
    norms = [m for m in model.modules() if hasattr(m, "variance_epsilon") and type(m).__name__.endswith("RMSNorm")]
    parts: list[Part] = [(norm, "forward", partial(rms_norm, norm)) for norm in norms if _same_norm(norm, like)]
    parts += lora_parts(model)
    home, name = sys.modules[type(model).__module__], "apply_rotary_pos_emb"
    if hasattr(home, name) and _same_rotary(getattr(home, name), model.config.get_text_config(), like):
        parts.append((home, name, rotary))
    return parts


def same_attention(model: Any) -> bool:
    """Whether `attention` does with pages what PyTorch's does with them side by side, with this model's heads."""
    config, like = model.config.get_text_config(), model.get_input_embeddings().weight
    heads, width = config.num_attention_heads, _width(config)
    shared = getattr(config, "num_key_value_heads", None) or heads
    size = 6 * shared * PAGE * width
    given = torch.linspace(-3, 2, 2 * heads * width + 2 * size, dtype=like.dtype, device=like.device).sin()
    query, *both = given.split([2 * heads * width, size, size])
    query, (keys, values) = query.view(2, heads, 1, width), (x.view(6, shared, PAGE, width) for x in both)
    table = torch.tensor([[1, PAGE + 3, 3, 5], [1, 7, 4, PAGE + 1]], dtype=torch.int32, device=like.device)
    inputs = gather(keys, table, (2, 2)), gather(values, table, (2, 2)), hidden(table, (2, 2), like.dtype)
    try:
        expected = gathered_attention(None, query, *inputs)[0]
        found = (attention(None, query, keys, values, table[:, None, None], parts=n)[0] for n in (1, 8))
        return all(_near(x, expected) for x in found)
    except TritonError:  # a GPU with too little shared memory
        return False


def _same_norm(norm: Any, like: Tensor) -> bool:
    x = torch.linspace(-3, 2, norm.weight.numel(), dtype=like.dtype, device=like.device)[None]
    plain = "forward" not in vars(norm) and norm.weight.dtype == like.dtype
    return plain and _near(norm(x), rms_norm(norm, x))


def _same_rotary(own: Callable[..., Any], config: Any, like: Tensor) -> bool:
    width = _width(config)
    q = torch.linspace(-3, 2, 4 * width, dtype=like.dtype, device=like.device).view(2, 2, 1, width)
    angle = torch.linspace(0, 3, 2 * width, dtype=like.dtype, device=like.device).view(2, 1, width)
    given = (q, q.flip(0), angle.cos(), angle.sin())
    return all(map(_near, own(*given), rotary(*given)))


def _width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).norm() <= TOLERANCE * expected.norm())


# ── drawing a token ─────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _ln1p(r):
    """log(1 + r), r ≥ 0, accurate for small r."""
    return tl.where(r < 1e-3, r * (1 - r * (0.5 - r / 3)), tl.log(1 + r))


@triton.jit
def _add(a, b, c, a2, b2, c2):
    return a + a2, b + b2, c + c2


@triton.jit
def _pick(weights, places, u):
    """The place at which the cumulative sum passes the share u of the total; never one of weight 0."""
    total = tl.cumsum(weights, axis=0)
    chosen = tl.sum((total <= u * tl.max(total, axis=0)).to(tl.int32), axis=0)
    return tl.minimum(chosen, tl.max(tl.where(weights > 0, places, 0), axis=0))


@triton.jit
def draw_kernel(
    z, stride, u, token, logp, entropy, sum_sq, v, s, SUM_SQ: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    row = tl.program_id(0)
    at = z + row.to(tl.int64) * stride
    places = tl.arange(0, BLOCKS)
    inner = tl.arange(0, BLOCK)
    m = tl.full((BLOCKS,), LOWEST, tl.float32)
    n = tl.zeros((BLOCKS,), tl.float32)
    r = tl.zeros((BLOCKS,), tl.float32)
    t = tl.zeros((BLOCKS,), tl.float32)
    w = tl.zeros((BLOCKS,), tl.float32)
    for block in tl.range(tl.cdiv(v, BLOCK), num_stages=3):
        k = block * BLOCK + inner
        x = tl.maximum(tl.load(at + k, mask=k < v, other=LOWEST).to(tl.float32) * s, LOWEST)
        top = tl.max(x, axis=0)
        q = x - top
        e = tl.where(x > LOWEST, tl.exp2(q), 0.0)
        rest, ties, weighted = tl.reduce((tl.where(q < 0, e, 0.0), tl.where(q < 0, 0.0, e), e * q), 0, _add)
        here = places == block
        m = tl.where(here, top, m)
        n = tl.where(here, rest + ties, n)
        r = tl.where(here, rest + (ties - 1), r)  # in this order: it keeps the digits of a small rest
        t = tl.where(here, weighted, t)
        if SUM_SQ:
            w = tl.where(here, tl.sum(e * e, axis=0), w)
    most = tl.max(m, axis=0)
    first = tl.min(tl.where(m == most, places, BLOCKS), axis=0)
    d = m - most
    share = tl.exp2(d)
    weights = share * n
    others = tl.sum(tl.where(places == first, r, weights), axis=0)
    spread = tl.sum(share * (t + n * d), axis=0)
    ln = _ln1p(others)
    h = ln - spread / (1 + others) * 0.6931471805599453

    block = _pick(weights, places, tl.load(u + 2 * row))
    k = block * BLOCK + inner
    x = tl.maximum(tl.load(at + k, mask=k < v, other=LOWEST).to(tl.float32) * s, LOWEST)
    top = tl.sum(tl.where(places == block, m, 0.0), axis=0)
    e = tl.where(x > LOWEST, tl.exp2(x - top), 0.0)
    chosen = _pick(e, inner, tl.load(u + 2 * row + 1))
    own = tl.sum(tl.where(inner == chosen, x, 0.0), axis=0)
    tl.store(token + row, (block * BLOCK + chosen).to(tl.int64))
    tl.store(logp + row, (own - most) * 0.6931471805599453 - ln)
    tl.store(entropy + row, tl.maximum(h, 0.0))
    if SUM_SQ:
        tl.store(sum_sq + row, tl.sum(share * share * w, axis=0) / ((1 + others) * (1 + others)))


def draw(logits: Tensor, temperature: float, uniforms: Tensor, sum_sq: bool = False) -> tuple[Tensor, ...]:
    """Logits (B, V) and uniform numbers (B, 2) -> token, log-probability, entropy and, if asked for, Σπ² (B,)."""
    rows, v = logits.shape
    token = torch.empty(rows, dtype=torch.long, device=logits.device)
    logp, entropy, squares = torch.empty(3, rows, device=logits.device)
    blocks = triton.next_power_of_2(triton.cdiv(v, BLOCK))
    draw_kernel[(rows,)](
        logits, logits.stride(0), uniforms.contiguous(), token, logp, entropy, squares, v, LOG2E / temperature,
        SUM_SQ=sum_sq, BLOCK=BLOCK, BLOCKS=blocks, num_warps=4,
    )  # fmt: skip
    return (token, logp, entropy, squares) if sum_sq else (token, logp, entropy)
