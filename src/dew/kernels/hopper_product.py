"""out = r ∘ (a b) on Hopper, in Gluon: the hidden gradient's product, scaled while in registers and rounded once.

The products are those of `dew.kernels.hopper_ring`; a group scales and writes its tile while the other multiplies.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from dew.kernels.hopper_ring import (
    BK,
    BM,
    BN,
    GROUP_REGISTERS,
    HALF,
    LOADER_REGISTERS,
    ROWS,
    begin,
    block_of,
    load,
    multiply,
    ring,
    tiles_of,
)

_write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # 3.9, 3.6


@gluon.jit
def _put(out, room, values, row, column):
    """A (HALF, BN) tile to out[row:, column:], one half of its columns after the other through the same room."""
    left, right = gl.split(gl.permute(gl.reshape(values, (HALF, 2, BN // 2)), (0, 2, 1)))
    tma.store_wait(pendings=0)
    room.store(left)
    fence_async_shared()
    _write(out, [row, column], room)
    tma.store_wait(pendings=0)
    room.store(right)
    fence_async_shared()
    _write(out, [row, column + BN // 2], room)


@gluon.jit
def _scale(xs, ws, room, ready, empty, lag, out, r, m, row_blocks, column_blocks, turns, steps, SECOND: gl.constexpr):
    """One group's half of every block: products, times r, and away."""
    stage = 0
    phase = 0
    signal = begin(lag, turns, steps, SECOND)
    for turn in range(turns):
        row_block, column_block = block_of(gl.program_id(0) + turn * gl.num_programs(0), row_blocks, column_blocks)
        row = row_block * BM + SECOND * HALF
        at = gl.where(turn == 0, signal, 0)
        z, stage, phase = multiply(xs, ws, ready, empty, lag, at, stage, phase, steps, True)
        rows = row + gl.arange(0, HALF, layout=ROWS)
        z = z * gl.expand_dims(gl.load(r + rows, mask=rows < m, other=0.0), 1)
        _put(out, room, z.to(out.dtype), row, column_block * BN)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["m", "n", "width"])
def _product_kernel(a, b, out, r, m, n, width):
    """Blocks of BM rows and BN columns, dealt out in turn."""
    row_blocks = gl.cdiv(m, BM)
    column_blocks = gl.cdiv(n, BN)
    steps = gl.cdiv(width, BK)
    turns = gl.cdiv(row_blocks * column_blocks - gl.program_id(0), gl.num_programs(0))
    xs0, xs1, ws, ready, empty, lag = ring(a, b)
    room0 = gl.allocate_shared_memory(out.dtype, [HALF, BN // 2], out.layout)
    room1 = gl.allocate_shared_memory(out.dtype, [HALF, BN // 2], out.layout)
    gl.warp_specialize([
        (_scale, (xs0, ws, room0, ready, empty, lag, out, r, m, row_blocks, column_blocks, turns, steps, 0)),
        (_scale, (xs1, ws, room1, ready, empty, lag, out, r, m, row_blocks, column_blocks, turns, steps, 1)),
        (load, (a, b, xs0, xs1, ws, ready, empty, row_blocks, column_blocks, turns, steps, 1, True)),
    ], [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS])  # fmt: skip


def product(a: Tensor, b: Tensor, r: Tensor, out: Tensor, processors: int) -> Tensor:
    """out (M, N) = r ∘ (a b), a (M, K), b (K, N), r (M,) float32; rows of the others aligned to 16 bytes."""
    (m, n), width = out.shape, a.shape[1]
    blocks = triton.cdiv(m, BM.value) * triton.cdiv(n, BN.value)
    if blocks > 0:
        _product_kernel[(min(processors, blocks),)](
            tiles_of(a, HALF.value, BK.value), tiles_of(b, BK.value, BN.value),
            tiles_of(out, HALF.value, BN.value // 2), r.contiguous(), m, n, width, num_warps=4,
        )  # fmt: skip
    return out
