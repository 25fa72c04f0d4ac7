"""Triton kernels for many short sequences.

PyTorch's attention is designed for long sequences and its layer norm for wide rows; at the lab's sizes they take most
of a generation's time (docs/log.md). Matrix products in attention are as accurate as float32; sums have a fixed order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EPSILON = tl.constexpr(1e-5)
PRECISION = tl.constexpr("tf32x3")
BLOCK, WARPS = 32, 2
"""Positions per block and warps per program, in attention."""


@triton.jit
def _tile(base, at, length, stride, D: tl.constexpr):
    """Load (positions, D) of one head, 0 beyond the end."""
    return tl.load(base + at[:, None] * stride + tl.arange(0, D)[None], mask=at[:, None] < length, other=0.0)


@triton.jit
def _put(base, at, length, stride, x, D: tl.constexpr):
    tl.store(base + at[:, None] * stride + tl.arange(0, D)[None], x, mask=at[:, None] < length)


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _scores(query, key, at, to):
    """Causal scores of queries at positions `at` for keys at `to`: -inf for later keys, also those past the end."""
    return tl.where(to[None] <= at[:, None], _product(query, tl.trans(key)), float("-inf"))


@triton.jit
def _attention_kernel(qkv, out, lse, S, H, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stride, width = 3 * H * D, H * D
    q = qkv + row * S * stride + head * D
    out += row * S * width + head * D
    for first in range(0, S, BLOCK):
        at = first + tl.arange(0, BLOCK)
        query = _tile(q, at, S, stride, D) * scale
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        mixed = tl.zeros([BLOCK, D], tl.float32)
        for other in range(0, first + BLOCK, BLOCK):
            to = other + tl.arange(0, BLOCK)
            s = _scores(query, _tile(q + width, to, S, stride, D), at, to)
            higher = tl.maximum(top, tl.max(s, 1))
            p, shrink = tl.exp(s - higher[:, None]), tl.exp(top - higher)
            total = total * shrink + tl.sum(p, 1)
            mixed = mixed * shrink[:, None] + _product(p, _tile(q + 2 * width, to, S, stride, D))
            top = higher
        _put(out, at, S, width, mixed / total[:, None], D)
        tl.store(lse + (row * H + head) * S + at, top + tl.log(total), mask=at < S)


@triton.jit
def _slopes(q, out, grad, lse, at, key, value, to, S, stride, width, scale, D: tl.constexpr):
    """Queries, output gradients, attention weights and score gradients of one pair of blocks."""
    query, g = _tile(q, at, S, stride, D) * scale, _tile(grad, at, S, width, D)
    p = tl.exp(_scores(query, key, at, to) - tl.load(lse + at, mask=at < S, other=0.0)[:, None])
    inner = tl.sum(g * _tile(out, at, S, width, D), 1)
    return query, g, p, p * (_product(g, tl.trans(value)) - inner[:, None])


@triton.jit
def _attention_backward_kernel(qkv, out, lse, grad, dqkv, S, H, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stride, width = 3 * H * D, H * D
    q, dq = qkv + row * S * stride + head * D, dqkv + row * S * stride + head * D
    out += row * S * width + head * D
    grad += row * S * width + head * D
    lse += (row * H + head) * S
    for first in range(0, S, BLOCK):
        at = first + tl.arange(0, BLOCK)
        slope = tl.zeros([BLOCK, D], tl.float32)
        for other in range(0, first + BLOCK, BLOCK):
            to = other + tl.arange(0, BLOCK)
            key, value = _tile(q + width, to, S, stride, D), _tile(q + 2 * width, to, S, stride, D)
            _, _, _, ds = _slopes(q, out, grad, lse, at, key, value, to, S, stride, width, scale, D)
            slope += _product(ds, key)
        _put(dq, at, S, stride, slope * scale, D)
    for other in range(0, S, BLOCK):
        to = other + tl.arange(0, BLOCK)
        key, value = _tile(q + width, to, S, stride, D), _tile(q + 2 * width, to, S, stride, D)
        dk, dv = tl.zeros([BLOCK, D], tl.float32), tl.zeros([BLOCK, D], tl.float32)
        for first in range(other, S, BLOCK):
            at = first + tl.arange(0, BLOCK)
            query, g, p, ds = _slopes(q, out, grad, lse, at, key, value, to, S, stride, width, scale, D)
            dv += _product(tl.trans(p), g)
            dk += _product(tl.trans(ds), query)
        _put(dq + width, to, S, stride, dk, D)
        _put(dq + 2 * width, to, S, stride, dv, D)


class Attention(torch.autograd.Function):
    """Causal attention: (N, S, 3, H, D) queries, keys and values -> (N, S, H, D)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        N, S, _, H, D = qkv.shape
        out, lse = qkv.new_empty(N, S, H, D), qkv.new_empty(N, H, S)
        _attention_kernel[(N, H)](qkv, out, lse, S, H, D**-0.5, D, BLOCK, num_warps=WARPS, num_stages=1)
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        qkv, out, lse = ctx.saved_tensors
        N, S, _, H, D = qkv.shape
        dqkv = torch.empty_like(qkv)
        _attention_backward_kernel[(N, H)](
            qkv, out, lse, grad.contiguous(), dqkv, S, H, D**-0.5, D, BLOCK, num_warps=WARPS, num_stages=1
        )
        return dqkv


@triton.jit(do_not_specialize=["length"])
def _query_kernel(
    qkv, keys, values, out, length, capacity, H, scale, prompt, G, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query = tl.load(qkv + row * 3 * H * D + head * D + tl.arange(0, D)) * scale
    own, first_of_group = row * H * capacity * D, row // G * G * H * capacity * D
    top, total, mixed = float("-inf"), 0.0, tl.zeros([D], tl.float32)
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        start = (tl.where(at < prompt, first_of_group, own) + (head * capacity + at) * D)[:, None]
        place, live = start + tl.arange(0, D)[None], (at < length)[:, None]
        key = tl.load(keys + place, mask=live, other=0.0)
        s = tl.where(at < length, tl.sum(key * query[None], 1), float("-inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        p, shrink = tl.exp(s - higher), tl.exp(top - higher)
        total = total * shrink + tl.sum(p, 0)
        mixed = mixed * shrink + tl.sum(p[:, None] * tl.load(values + place, mask=live, other=0.0), 0)
        top = higher
    tl.store(out + row * H * D + head * D + tl.arange(0, D), mixed / total)


def query_attention(qkv: Tensor, keys: Tensor, values: Tensor, length: int, prompt: int, group: int) -> Tensor:
    """Attention of one query per row, (N, 1, 3, H, D), to the first `length` of its (N, H, S, D) keys: (N, 1, H, D).

    The first `prompt` keys and values are the same in each `group` of neighbouring rows. All rows read those of the
    group's first row, which stay in the GPU's cache.
    """
    N, _, _, H, D = qkv.shape
    out, S = qkv.new_empty(N, 1, H, D), keys.shape[2]
    _query_kernel[(N, H)](qkv, keys, values, out, length, S, H, D**-0.5, prompt, group, D, BLOCK, num_warps=1)
    return out


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(x, out, mean, rstd, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None]
    values = tl.load(x + row[:, None] * width + column[None], mask=inside, other=0.0)
    m = tl.sum(values, 1) / width
    centred = tl.where(inside, values - m[:, None], 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, 1) / width + EPSILON)
    tl.store(out + row[:, None] * width + column[None], centred * r[:, None], mask=inside)
    tl.store(mean + row, m, mask=row < rows)
    tl.store(rstd + row, r, mask=row < rows)


class Norm(torch.autograd.Function):
    """Layer norm without parameters over the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        width, out = x.shape[-1], torch.empty_like(x)
        mean, rstd = (x.new_empty(*x.shape[:-1], 1) for _ in range(2))
        rows = mean.numel()
        _norm_kernel[(triton.cdiv(rows, 8),)](x, out, mean, rstd, rows, width, 8, triton.next_power_of_2(width))
        ctx.save_for_backward(x, mean, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, mean, rstd = ctx.saved_tensors
        wanted = [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], mean, rstd, None, None, wanted)[0]
