"""Matrix products on Hopper, in Gluon: what its kernels share is all but the epilogue.

One warp loads. Two groups of four warps multiply, 64 rows each, by the same tile of the right factor, a few steps
apart: one does its epilogue while the other keeps the matrix units busy.

    loads      a ring of STAGES tiles; `ready` counts their bytes, `empty` the groups that are done with them
    group 0    products · epilogue · products · epilogue · …
    group 1      products · epilogue · products · epilogue · …

The left factor is (M, K). The right one is (N, K), or with K_FIRST (K, N). Gluon is an experimental part of Triton:
3.6 and 3.9 compile these kernels; `dew.kernels.triton` does without wherever they cannot be had.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HALF = gl.constexpr(64)
"""Rows of a group: two of them make a block."""
BM = gl.constexpr(128)
BN = gl.constexpr(256)
BK = gl.constexpr(64)
STAGES = gl.constexpr(4)
GROUP = gl.constexpr(16)
"""Row blocks that share a tile of the right factor in the cache."""
LAG = gl.constexpr(2)
"""Steps that the second group starts after the first; below STAGES, or both would wait for one another."""
GROUP_REGISTERS = gl.constexpr(232)
LOADER_REGISTERS = gl.constexpr(24)

_ACCUMULATOR = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
SCORES = gl.constexpr(_ACCUMULATOR)
ROWS = gl.constexpr(gl.SliceLayout(1, _ACCUMULATOR))
COLUMNS = gl.constexpr(gl.SliceLayout(0, _ACCUMULATOR))

_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # 3.9, 3.6


def tiles_of(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine needs to know of a matrix; entries beyond it are read as 0 and never written."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns], layout)


@gluon.jit
def block_of(work, row_blocks, items):
    """Row block and item of a piece of work."""
    per_group = GROUP * items
    first = (work // per_group) * GROUP
    size = gl.minimum(row_blocks - first, GROUP)
    within = work % per_group
    return first + within % size, within // size


@gluon.jit
def ring(x, w):
    """The stages' room, both groups' left tiles and the shared right one, and the barriers."""
    xs0 = gl.allocate_shared_memory(x.dtype, [STAGES, HALF, BK], x.layout)
    xs1 = gl.allocate_shared_memory(x.dtype, [STAGES, HALF, BK], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES, w.block_shape[0], w.block_shape[1]], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lag = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(lag, count=1)
    fence_async_shared()
    return xs0, xs1, ws, ready, empty, lag


@gluon.jit
def _next(stage, phase):
    """The stage after this one; the phase turns with the ring."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def load(x, w, xs0, xs1, ws, ready, empty, row_blocks, items, turns, steps, TILES: gl.constexpr, K_FIRST: gl.constexpr):
    """Keep the ring full. An item is TILES tiles side by side."""
    stage = 0
    phase = 1
    for turn in range(turns):
        work = gl.program_id(0) + (turn // TILES) * gl.num_programs(0)
        row_block, item = block_of(work, row_blocks, items)
        row = row_block * BM
        column = (item * TILES + turn % TILES) * BN
        for k in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, (BM + BN) * BK * 2)
            _copy(x, [row, k * BK], bar, xs0.index(stage))
            if K_FIRST:
                _copy(w, [k * BK, column], bar, ws.index(stage))
            else:
                _copy(w, [column, k * BK], bar, ws.index(stage))
            _copy(x, [row + HALF, k * BK], bar, xs1.index(stage))
            stage, phase = _next(stage, phase)


@gluon.jit
def _right(ws, stage, K_FIRST: gl.constexpr):
    """A stage's tile of the right factor as (BK, BN)."""
    w = ws.index(stage)
    if not K_FIRST:
        w = w.permute((1, 0))
    return w


@gluon.jit
def begin(lag, turns, steps, SECOND: gl.constexpr):
    """The step of the first product at which the first group lets the second begin; 0 for none."""
    start = gl.minimum(LAG, steps - 1)
    if SECOND:
        mbarrier.wait(lag, 0, pred=(start > 0) & (turns > 0))  # nobody signals where there is nothing to do
        start = 0
    return start


@gluon.jit
def multiply(xs, ws, ready, empty, lag, signal, stage, phase, steps, K_FIRST: gl.constexpr):
    """A (HALF, BN) tile of the product. A stage is given back one step after its products were asked for."""
    acc = gl.full((HALF, BN), 0.0, gl.float32, layout=SCORES)
    mbarrier.wait(ready.index(stage), phase)
    acc = warpgroup_mma(xs.index(stage), _right(ws, stage, K_FIRST), acc, use_acc=False, is_async=True)
    last = stage
    stage, phase = _next(stage, phase)
    for k in range(1, steps):
        mbarrier.wait(ready.index(stage), phase)
        acc = warpgroup_mma(xs.index(stage), _right(ws, stage, K_FIRST), acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        mbarrier.arrive(empty.index(last), count=1)
        if k == signal:
            mbarrier.arrive(lag, count=1)
        last = stage
        stage, phase = _next(stage, phase)
    z = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(last), count=1)
    return z, stage, phase
