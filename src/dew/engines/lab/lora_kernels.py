"""Triton kernels for adapters of many replicas on one base model: rows are sorted by replica and not padded.

With M a matrix (R, W, r) of each replica, U wide rows (N, W), and h narrow rows (N, r):

    shrink   h = U M              every row with the matrix of its replica
    expand   U += h Mᵀ            in place, so that the base product is read and written once
    outer    (R, W, r) = Uᵀ h     summed over the rows of each replica, in a fixed order

Forward and backward of a LoRA layer are these three. `SwiGLU` and `Rotary` are what is left of a layer.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dew.decoding.fused import rotary as rotate

TILE, WIDE = 64, 128
"""Rows and columns of a program."""


@triton.jit
def _shrink_kernel(u, m, out, tiles, width, r, scale, TILE: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr):
    at = tiles + tl.program_id(0) * 3
    replica, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if first < end:
        rows, j = first + tl.arange(0, TILE), tl.arange(0, RANK)
        own, matrix = u + rows.to(tl.int64)[:, None] * width, m + replica.to(tl.int64) * width * r
        found = tl.zeros([TILE, RANK], tl.float32)
        for start in range(0, width, WIDE):
            i = start + tl.arange(0, WIDE)
            wide = tl.load(own + i[None], mask=(rows[:, None] < end) & (i[None] < width), other=0.0)
            part = tl.load(matrix + i[:, None] * r + j[None], mask=(i[:, None] < width) & (j[None] < r), other=0.0)
            found += tl.dot(wide, part, input_precision="ieee")
        to = out + rows.to(tl.int64)[:, None] * r + j[None]
        tl.store(to, found * scale, mask=(rows[:, None] < end) & (j[None] < r))


@triton.jit
def _expand_kernel(u, h, m, tiles, width, r, TILE: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr):
    at = tiles + tl.program_id(0) * 3
    replica, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if first < end:
        rows, j, i = first + tl.arange(0, TILE), tl.arange(0, RANK), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        live = rows[:, None] < end
        narrow = tl.load(h + rows.to(tl.int64)[:, None] * r + j[None], mask=live & (j[None] < r), other=0.0)
        matrix = m + replica.to(tl.int64) * width * r
        part = tl.load(matrix + i[None] * r + j[:, None], mask=(i[None] < width) & (j[:, None] < r), other=0.0)
        place, here = u + rows.to(tl.int64)[:, None] * width + i[None], live & (i[None] < width)
        tl.store(place, tl.load(place, mask=here, other=0.0) + tl.dot(narrow, part, input_precision="ieee"), mask=here)


@triton.jit
def _outer_kernel(u, h, out, starts, width, r, TILE: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr):
    replica, i, j = tl.program_id(0), tl.program_id(1) * WIDE + tl.arange(0, WIDE), tl.arange(0, RANK)
    first, end = tl.load(starts + replica), tl.load(starts + replica + 1)
    found = tl.zeros([WIDE, RANK], tl.float32)
    for start in range(first, end, TILE):
        rows = (start + tl.arange(0, TILE)).to(tl.int64)
        wide = tl.load(u + rows[None] * width + i[:, None], mask=(rows[None] < end) & (i[:, None] < width), other=0.0)
        narrow = tl.load(h + rows[:, None] * r + j[None], mask=(rows[:, None] < end) & (j[None] < r), other=0.0)
        found += tl.dot(wide, narrow, input_precision="ieee")
    to = out + (replica.to(tl.int64) * width + i[:, None]) * r + j[None]
    tl.store(to, found, mask=(i[:, None] < width) & (j[None] < r))


def _rank(r: int) -> int:
    return max(16, triton.next_power_of_2(r))


def shrink(u: Tensor, m: Tensor, tiles: Tensor, scale: float) -> Tensor:
    """(N, W) rows and (R, W, r) matrices -> (N, r). `tiles`: replica, first row and end of each tile of rows."""
    out = u.new_empty(len(u), m.shape[2])
    _shrink_kernel[(len(tiles),)](u, m, out, tiles, *m.shape[1:], scale, TILE, WIDE, _rank(m.shape[2]), num_stages=4)
    return out


def expand(u: Tensor, h: Tensor, m: Tensor, tiles: Tensor) -> None:
    """Add (N, r) rows times the transposed (R, W, r) matrices to u, (N, W)."""
    grid = (len(tiles), triton.cdiv(m.shape[1], WIDE))
    _expand_kernel[grid](u, h, m, tiles, *m.shape[1:], TILE, WIDE, _rank(m.shape[2]))


def outer(u: Tensor, h: Tensor, starts: Tensor) -> Tensor:
    """(R, W, r) sums over the rows of each replica, in float32. `starts`: the first row of each, and the end."""
    replicas, width, r = len(starts) - 1, u.shape[1], h.shape[1]
    out = torch.empty(replicas, width, r, device=u.device)
    _outer_kernel[(replicas, triton.cdiv(width, WIDE))](u, h, out, starts, width, r, TILE, WIDE, _rank(r), num_stages=4)
    return out


class AdaptedLinear(torch.autograd.Function):
    """x Wᵀ + b + scale · x A Bᵀ, with A (R, in, r) and B (R, out, r) of each row's replica; W and b are frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, low: tuple[Tensor, Tensor],
        tiles: Tensor, starts: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        """`low` are a and b in the dtype of x."""
        y, h = torch.nn.functional.linear(x, weight, bias), shrink(x, low[0], tiles, scale)
        expand(y, h, low[1], tiles)
        ctx.save_for_backward(x, h, weight, *low, tiles, starts)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, h, weight, low_a, low_b, tiles, starts = ctx.saved_tensors
        dy = gradients[0].contiguous()
        dh, dx = shrink(dy, low_b, tiles, ctx.scale), None
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
            expand(dx, dh, low_a, tiles)
        return dx, None, None, outer(x, dh, starts), outer(dy, h, starts), *[None] * 4


@triton.jit
def _swiglu_kernel(gate, up, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, u = tl.load(gate + i, mask=i < n).to(tl.float32), tl.load(up + i, mask=i < n).to(tl.float32)
    tl.store(out + i, g * tl.sigmoid(g) * u, mask=i < n)


@triton.jit
def _swiglu_backward_kernel(gate, up, grad, d_gate, d_up, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, u = tl.load(gate + i, mask=i < n).to(tl.float32), tl.load(up + i, mask=i < n).to(tl.float32)
    d, s = tl.load(grad + i, mask=i < n).to(tl.float32), tl.sigmoid(g)
    tl.store(d_gate + i, d * u * s * (1 + g * (1 - s)), mask=i < n)
    tl.store(d_up + i, d * g * s, mask=i < n)


class SwiGLU(torch.autograd.Function):
    """silu(gate) · up in one pass, and its gradient in another."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _swiglu_kernel[(triton.cdiv(gate.numel(), 2048),)](gate, up, out, gate.numel(), 2048)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate, d_up, n = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        _swiglu_backward_kernel[(triton.cdiv(n, 2048),)](gate, up, gradients[0].contiguous(), d_gate, d_up, n, 2048)
        return d_gate, d_up


class Rotary(torch.autograd.Function):
    """`apply_rotary_pos_emb` of packed queries and keys, (1, heads, N, D), with (1, N, D) angles."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_rotate(gradients[0], gradients[1], cos, -sin), None, None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Positions are rows: (1, heads, N, D) -> (N, heads, 1, D) and back."""
    q, k = rotate(q.transpose(0, 2), k.transpose(0, 2), cos.transpose(0, 1), sin.transpose(0, 1))
    return q.transpose(0, 2), k.transpose(0, 2)
