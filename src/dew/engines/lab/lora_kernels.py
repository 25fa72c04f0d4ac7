"""Triton kernels for LoRA adapters of many replicas on one base model. Rows are sorted by replica and not padded.

Linear layers that read the same input (q, k, v; gate and up) are computed as one product. U has wide rows (N, W), h has
narrow rows, and M (R, W, r) has a matrix per replica, whose W columns belong to one or several layers:

    shrink   h = U M              each row with the matrix of its replica, separately for each layer's columns
    expand   U += h Mᵀ            in place, so that the base product is read and written once
    outer    (R, W, r) = Uᵀ h     summed over the rows of each replica, in a fixed order

Forward and backward of a LoRA layer consist of these three. The kernel of a gated MLP adds the adapters of gate and up
while it multiplies them. `Rotary` applies rotary embeddings to packed sequences.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dew.decoding.fused import rotary as rotate

TILE = 64
"""Rows per program."""
WIDE = 64
"""Columns per program: layers whose widths are not multiples of it are not joined."""


@triton.jit
def _shrink_kernel(
    u, m, out, tiles, cuts, width, r, scale, PARTS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    at, part = tiles + tl.program_id(0) * 3, tl.program_id(1)
    replica, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if first < end:
        rows, j = first + tl.arange(0, TILE), tl.arange(0, RANK)
        own, matrix = u + rows.to(tl.int64)[:, None] * width, m + replica.to(tl.int64) * width * r
        found = tl.zeros([TILE, RANK], tl.float32)
        begin, last = 0, width
        if PARTS > 1:  # a separate case: loads are vectorised only if addresses are known to be multiples
            begin = tl.multiple_of(tl.load(cuts + part), 64)
            last = tl.multiple_of(tl.load(cuts + part + 1), 64)
        for start in range(begin, last, WIDE):
            i = tl.multiple_of(start, 64) + tl.arange(0, WIDE)
            wide = tl.load(own + i[None], mask=(rows[:, None] < end) & (i[None] < last), other=0.0)
            some = tl.load(matrix + i[:, None] * r + j[None], mask=(i[:, None] < last) & (j[None] < r), other=0.0)
            found += tl.dot(wide, some, input_precision="ieee")
        to = out + rows.to(tl.int64)[:, None] * (PARTS * r) + part * r + j[None]
        tl.store(to, found * scale, mask=(rows[:, None] < end) & (j[None] < r))


@triton.jit
def _adapted(
    u, h, m, replica, rows, live, i, part, parts, width, r, RANK: tl.constexpr
):  # fmt: skip
    """A tile of u with the adapters added, in float32."""
    j = tl.arange(0, RANK)
    narrow = tl.load(
        h + rows.to(tl.int64)[:, None] * (parts * r) + part * r + j[None], mask=live & (j[None] < r), other=0.0
    )
    matrix = m + replica.to(tl.int64) * width * r
    some = tl.load(matrix + i[None] * r + j[:, None], mask=(i[None] < width) & (j[:, None] < r), other=0.0)
    wide = tl.load(u + rows.to(tl.int64)[:, None] * width + i[None], mask=live & (i[None] < width), other=0.0)
    return wide.to(tl.float32) + tl.dot(narrow, some, input_precision="ieee")


@triton.jit
def _expand_kernel(
    u, h, m, tiles, part_of, parts, width, r, TILE: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    at, block = tiles + tl.program_id(0) * 3, tl.program_id(1)
    replica, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if first < end:
        rows, i = first + tl.arange(0, TILE), block * WIDE + tl.arange(0, WIDE)
        live = rows[:, None] < end
        found = _adapted(u, h, m, replica, rows, live, i, tl.load(part_of + block), parts, width, r, RANK)
        tl.store(u + rows.to(tl.int64)[:, None] * width + i[None], found, mask=live & (i[None] < width))


@triton.jit
def _outer_kernel(
    u, h, out, starts, cuts, part_of, parts, width, h_width, r, pieces,
    TILE: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Write the sums of each layer in turn, (R, columns, r). A single layer's h may have several pieces of width r."""
    replica, block, j = tl.program_id(0), tl.program_id(1), tl.arange(0, RANK)
    i, part, replicas = block * WIDE + tl.arange(0, WIDE), tl.load(part_of + block), tl.num_programs(0)
    first, end = tl.load(starts + replica), tl.load(starts + replica + 1)
    found = tl.zeros([WIDE, RANK], tl.float32)
    inside = j[None] < pieces * r
    for start in range(first, end, TILE):
        rows = (start + tl.arange(0, TILE)).to(tl.int64)
        wide = tl.load(u + rows[None] * width + i[:, None], mask=(rows[None] < end) & (i[:, None] < width), other=0.0)
        narrow = tl.load(
            h + rows[:, None] * h_width + part * r + j[None], mask=(rows[:, None] < end) & inside, other=0.0
        )
        found += tl.dot(wide, narrow, input_precision="ieee")
    low, high = tl.load(cuts + part), tl.load(cuts + part + 1)
    column = (replica.to(tl.int64) * (high - low) + i - low)[:, None] * r
    piece = (j // r).to(tl.int64)[None] * replicas * width * r
    to = out + low.to(tl.int64) * replicas * r + piece + column + (j % r)[None]
    tl.store(to, found, mask=(i[:, None] < high) & inside)


@triton.jit
def _gated_kernel(
    y, h, m, out, grad, tiles, half, r, BACKWARD: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """silu(gate) · up, from products without their adapters. BACKWARD: write the gradients of both to `out`."""
    at = tiles + tl.program_id(0) * 3
    replica, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if first < end:
        rows, i = first + tl.arange(0, TILE), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        live = rows[:, None] < end
        g = _adapted(y, h, m, replica, rows, live, i, 0, 2, 2 * half, r, RANK)
        u = _adapted(y, h, m, replica, rows, live, i + half, 1, 2, 2 * half, r, RANK)
        s, place = tl.sigmoid(g), rows.to(tl.int64)[:, None] * half + i[None]
        if BACKWARD:
            d = tl.load(grad + place, mask=live, other=0.0).to(tl.float32)
            to = out + rows.to(tl.int64)[:, None] * (2 * half) + i[None]
            tl.store(to, d * u * s * (1 + g * (1 - s)), mask=live)
            tl.store(to + half, d * g * s, mask=live)
        else:
            tl.store(out + place, g * s * u, mask=live)


def _rank(r: int) -> int:
    return max(16, triton.next_power_of_2(r))


@dataclass
class Layout:
    """Column widths of layers that are computed as one product, and the rank r; launches the kernels."""

    sizes: list[int]
    r: int
    device: torch.device

    def __post_init__(self) -> None:
        bounds = [0, *accumulate(self.sizes)]
        self.width, self.parts = bounds[-1], len(self.sizes)
        self.cuts = torch.tensor(bounds, dtype=torch.int32, device=self.device)
        self.wide = WIDE if any(n % (2 * WIDE) for n in self.sizes[:-1]) else 2 * WIDE
        blocks = [sum(start >= x for x in bounds[1:]) for start in range(0, self.width, self.wide)]
        self.part_of = torch.tensor(blocks, dtype=torch.int32, device=self.device)

    def shrink(self, u: Tensor, m: Tensor, tiles: Tensor, scale: float) -> Tensor:
        """(N, W) rows and (R, W, r) matrices -> (N, parts · r). `tiles`: replica, first row and end of each tile."""
        out, r = u.new_empty(len(u), self.parts * self.r), self.r
        sizes = self.cuts, self.width, r, scale, self.parts, TILE, 2 * WIDE, _rank(r)
        _shrink_kernel[(len(tiles), self.parts)](u, m, out, tiles, *sizes, num_stages=4)
        return out

    def expand(self, u: Tensor, h: Tensor, m: Tensor, tiles: Tensor) -> None:
        """Add (N, parts · r) rows times the transposed (R, W, r) matrices to u, (N, W)."""
        grid, r = (len(tiles), len(self.part_of)), self.r
        _expand_kernel[grid](u, h, m, tiles, self.part_of, self.parts, self.width, r, TILE, self.wide, _rank(r))

    def outer(self, u: Tensor, h: Tensor, starts: Tensor, pieces: int = 1) -> list[Tensor]:
        """(R, columns, r / pieces) float32 sums over the rows of each replica: one tensor per layer or, for a single
        layer with several pieces of h, per piece. `starts` (R + 1,): the first row of each replica, and the end."""
        replicas, r = len(starts) - 1, self.r // pieces
        out, grid = torch.empty(replicas * self.width * self.r, device=u.device), (replicas, len(self.part_of))
        _outer_kernel[grid](
            u, h, out, starts, self.cuts, self.part_of, self.parts, self.width, h.shape[1], r, pieces, TILE, self.wide,
            _rank(self.r), num_stages=4,
        )  # fmt: skip
        sizes = [self.width] * pieces if pieces > 1 else self.sizes
        return [
            x.view(replicas, n, r) for x, n in zip(out.split([replicas * n * r for n in sizes]), sizes, strict=True)
        ]

    def gated(self, y: Tensor, h: Tensor, m: Tensor, tiles: Tensor, gradient: Tensor | None = None) -> Tensor:
        """silu(gate) · up, (N, F), from (N, 2 F) products without adapters; given a gradient, that of the products."""
        half = self.width // 2
        out = torch.empty_like(y) if gradient is not None else y.new_empty(len(y), half)
        grid = (len(tiles), half // WIDE)
        _gated_kernel[grid](
            y, h, m, out, gradient, tiles, half, self.r, gradient is not None, TILE, WIDE, _rank(self.r)
        )  # fmt: skip
        return out


class AdaptedLinear(torch.autograd.Function):
    """x Wᵀ + b + scale · x A Bᵀ for layers that read the same x, with A (R, in, r) and B (R, out, r) of the row's
    replica. W and b are frozen. If `gated`, the result is silu of the first layer times the second."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: tuple[Tensor, Tensor],
        layouts: tuple[Layout, Layout], rows: tuple[Tensor, Tensor], scale: float, gated: bool, *_: Tensor,
    ) -> Any:  # fmt: skip
        """`low`: all A and all B, concatenated, in the dtype of x. Their gradients go to the last arguments."""
        (a, b), (tiles, starts), (inner, outer) = low, rows, layouts
        y, h = torch.nn.functional.linear(x, weight, bias), inner.shrink(x, a, tiles, scale)
        ctx.save_for_backward(x, h, weight, a, b, tiles, starts, *[y] * gated)
        ctx.layouts, ctx.scale = layouts, scale
        if gated:
            return outer.gated(y, h, b, tiles)
        outer.expand(y, h, b, tiles)
        return y.split(outer.sizes, 1) if outer.parts > 1 else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, h, weight, a, b, tiles, starts, *y = ctx.saved_tensors
        inner, outer = ctx.layouts
        dy = gradients[0].contiguous() if len(gradients) == 1 else torch.cat(gradients, 1)
        if y:
            dy = outer.gated(y[0], h, b, tiles, dy)
        dh, dx = outer.shrink(dy, b, tiles, ctx.scale), None
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
            inner.expand(dx, dh, a, tiles)
        return dx, *[None] * 7, *inner.outer(x, dh, starts, outer.parts), *outer.outer(dy, h, starts)


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
    """Rotate with positions as rows: (1, heads, N, D) -> (N, heads, 1, D), and back."""
    q, k = rotate(q.transpose(0, 2), k.transpose(0, 2), cos.transpose(0, 1), sin.transpose(0, 1))
    return q.transpose(0, 2), k.transpose(0, 2)
