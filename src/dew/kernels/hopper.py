"""The forward pass on Hopper, in Gluon: the statistics of `dew.kernels.triton_kernels`, with specialised warps.

One warp loads. Two groups of four warps multiply 64 rows each by the same tile of the weight, a few steps apart: one
reduces its scores while the other keeps the matrix units busy.

    loads      a ring of STAGES tiles; `ready` counts their bytes, `empty` the groups that have read them
    group 0    products · reduce · products · reduce · …
    group 1      products · reduce · products · reduce · …

It supports heads without bias and soft cap, and stores no weights. Gluon is an experimental part of Triton: 3.6 and 3.9
compile this kernel; otherwise `dew.kernels.triton` uses its generic kernel.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
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

from dew.kernels.head import Head
from dew.kernels.triton_kernels import CLEAR, LOG2E, LOWEST

HALF = gl.constexpr(64)
"""Rows of a group: two of them make a block."""
BM = gl.constexpr(128)
BN = gl.constexpr(256)
BK = gl.constexpr(64)
STAGES = gl.constexpr(4)
GROUP = gl.constexpr(16)
"""Row blocks that share a column of the weight in the cache."""
LAG = gl.constexpr(2)
"""Steps that the second group starts after the first; must be below STAGES, or the groups deadlock."""
GROUP_REGISTERS = gl.constexpr(232)
LOADER_REGISTERS = gl.constexpr(24)

_ACCUMULATOR = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
SCORES = gl.constexpr(_ACCUMULATOR)
ROWS = gl.constexpr(gl.SliceLayout(1, _ACCUMULATOR))
COLUMNS = gl.constexpr(gl.SliceLayout(0, _ACCUMULATOR))

_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # 3.9, 3.6


@gluon.jit
def _place(work, row_blocks, items):
    """Row block and item of a piece of work."""
    per_group = GROUP * items
    first = (work // per_group) * GROUP
    size = gl.minimum(row_blocks - first, GROUP)
    within = work % per_group
    return first + within % size, within // size


@gluon.jit
def _next(stage, phase):
    """The next stage; the phase flips when the ring wraps around."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _load(x, w, xs0, xs1, ws, ready, empty, row_blocks, items, turns, steps, TILES: gl.constexpr):
    """Keep the ring full."""
    stage = 0
    phase = 1
    for turn in range(turns):
        work = gl.program_id(0) + (turn // TILES) * gl.num_programs(0)
        row_block, item = _place(work, row_blocks, items)
        row = row_block * BM
        column = (item * TILES + turn % TILES) * BN
        for k in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, (BM + BN) * BK * 2)
            _copy(x, [row, k * BK], bar, xs0.index(stage))
            _copy(w, [column, k * BK], bar, ws.index(stage))
            _copy(x, [row + HALF, k * BK], bar, xs1.index(stage))
            stage, phase = _next(stage, phase)


@gluon.jit
def _load_either(x, compact, w, xs0, xs1, ws, ready, empty, n, count, row_blocks, items, turns, steps,
    TILES: gl.constexpr,
):  # fmt: skip
    """Load the rows in place if none is ignored, otherwise from the compacted copy."""
    if count == n:
        _load(x, w, xs0, xs1, ws, ready, empty, row_blocks, items, turns, steps, TILES)
    else:
        _load(compact, w, xs0, xs1, ws, ready, empty, row_blocks, items, turns, steps, TILES)


@gluon.jit
def _scores(xs, ws, ready, empty, lag, signal, stage, phase, steps):
    """A (HALF, BN) tile of h Wᵀ. A stage is released one step after its products were issued."""
    acc = gl.full((HALF, BN), 0.0, gl.float32, layout=SCORES)
    mbarrier.wait(ready.index(stage), phase)
    acc = warpgroup_mma(xs.index(stage), ws.index(stage).permute((1, 0)), acc, use_acc=False, is_async=True)
    last = stage
    stage, phase = _next(stage, phase)
    for k in range(1, steps):
        mbarrier.wait(ready.index(stage), phase)
        acc = warpgroup_mma(xs.index(stage), ws.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        mbarrier.arrive(empty.index(last), count=1)
        if k == signal:
            mbarrier.arrive(lag, count=1)
        last = stage
        stage, phase = _next(stage, phase)
    z = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(last), count=1)
    return z, stage, phase


@gluon.jit
def _fold(z, s, SUM_SQ: gl.constexpr):
    """(m, r, t, u) of a tile's rows; u only with SUM_SQ."""
    top = gl.max(z, axis=1)
    centre = gl.where(top > LOWEST, top * s, 0.0)
    zero = gl.full((HALF, BN), 0.0, gl.float32, layout=SCORES)
    q = gl.fma(z, zero + s, zero - gl.expand_dims(centre, 1))
    e = gl.exp2(q)
    total = gl.sum(e, axis=1)
    off = gl.fma(top, gl.full((HALF,), 0.0, gl.float32, layout=ROWS) + s, -centre)  # rounding error at the maximum
    t = gl.sum(e * q, axis=1) - off * total
    r = total - 1.0
    if gl.min(total, axis=0) < CLEAR:  # rare: the others would be lost to rounding
        rest = gl.sum(gl.where(e < 0.5, e, 0.0), axis=1)
        r = gl.where(total >= CLEAR, r, gl.where(total > 0.5, rest, -1.0))
    u = total
    if SUM_SQ:
        u = gl.sum(e * e, axis=1)
    return top, r, t, u


@gluon.jit
def _merge(m, r, t, m2, r2, t2, s):
    """Merge two sets of statistics."""
    top = gl.maximum(m, m2)
    d = (m - top) * s
    d2 = (m2 - top) * s
    a = gl.exp2(d)
    b = gl.exp2(d2)
    return top, a * r + b * r2 + gl.minimum(a, b), a * (t + d * (1.0 + r)) + b * (t2 + d2 * (1.0 + r2))


@gluon.jit
def _multiply(xs, ws, ready, empty, lag, part, n, v, count, s, row_blocks, items, turns, steps,
    SECOND: gl.constexpr, TILES: gl.constexpr, RAGGED: gl.constexpr, SUM_SQ: gl.constexpr,
):  # fmt: skip
    """One group's half of every block: products, reduction, and (m, r, t[, u]) after the last tile of an item."""
    m = gl.full((HALF,), LOWEST, gl.float32, layout=ROWS)
    r = gl.full((HALF,), -1.0, gl.float32, layout=ROWS)
    t = gl.full((HALF,), 0.0, gl.float32, layout=ROWS)
    u = gl.full((HALF,), 0.0, gl.float32, layout=ROWS)
    stage = 0
    phase = 0
    start = gl.minimum(LAG, steps - 1)
    if SECOND:
        mbarrier.wait(lag, 0, pred=(start > 0) & (turns > 0))  # without work there is no signal
    for turn in range(turns):
        work = gl.program_id(0) + (turn // TILES) * gl.num_programs(0)
        tile = turn % TILES
        row_block, item = _place(work, row_blocks, items)
        signal = 0 if SECOND else gl.where(turn == 0, start, 0)
        z, stage, phase = _scores(xs, ws, ready, empty, lag, signal, stage, phase, steps)
        if RAGGED:
            columns = (item * TILES + tile) * BN + gl.arange(0, BN, layout=COLUMNS)
            z = gl.where(gl.expand_dims(columns < v, 0), z, LOWEST)
        top, r2, t2, u2 = _fold(z, s, SUM_SQ)
        fresh = tile == 0
        m = gl.where(fresh, LOWEST, m)
        r = gl.where(fresh, -1.0, r)
        t = gl.where(fresh, 0.0, t)
        before = m
        m, r, t = _merge(m, r, t, top, r2, t2, s)
        if SUM_SQ:
            u = gl.exp2(2.0 * s * (before - m)) * gl.where(fresh, 0.0, u) + gl.exp2(2.0 * s * (top - m)) * u2
        if tile == TILES - 1:
            rows = row_block * BM + SECOND * HALF + gl.arange(0, HALF, layout=ROWS)
            to = part + item.to(gl.int64) * n + rows
            stride = items.to(gl.int64) * n
            gl.store(to, m, mask=rows < count)
            gl.store(to + stride, r, mask=rows < count)
            gl.store(to + 2 * stride, t, mask=rows < count)
            if SUM_SQ:
                gl.store(to + 3 * stride, u, mask=rows < count)


@gluon.jit(do_not_specialize=["n", "v", "width"])
def _statistics_kernel(x, compact, w, place, part, n, v, width, s,
    TILES: gl.constexpr, RAGGED: gl.constexpr, SUM_SQ: gl.constexpr,
):  # fmt: skip
    """A work item is BM rows times TILES tiles of BN columns; its (m, r, t[, u]) go to part[:, item, rows]."""
    count = gl.load(place + n - 1)
    row_blocks = gl.cdiv(count, BM)
    items = gl.cdiv(v, BN * TILES)
    steps = gl.cdiv(width, BK)
    turns = gl.cdiv(row_blocks * items - gl.program_id(0), gl.num_programs(0)) * TILES
    xs0 = gl.allocate_shared_memory(x.dtype, [STAGES, HALF, BK], x.layout)
    xs1 = gl.allocate_shared_memory(x.dtype, [STAGES, HALF, BK], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lag = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(lag, count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (xs0, ws, ready, empty, lag, part, n, v, count, s, row_blocks, items, turns, steps,
                     0, TILES, RAGGED, SUM_SQ)),
        (_multiply, (xs1, ws, ready, empty, lag, part, n, v, count, s, row_blocks, items, turns, steps,
                     1, TILES, RAGGED, SUM_SQ)),
        (_load_either, (x, compact, w, xs0, xs1, ws, ready, empty, n, count, row_blocks, items, turns, steps,
                        TILES)),
    ], [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS])  # fmt: skip


def parts(hidden: Tensor, compact: Tensor, head: Head, place: Tensor, processors: int, sum_sq: bool) -> Tensor:
    """(m, r, t[, u]) of every work item and live row: part[:, item, i] belongs to the i-th live row.

    `place` numbers live rows from 1; `compact` holds them in this order, unless all rows are live.
    """
    (n, width), v = hidden.shape, head.weight.shape[0]
    row_blocks, column_blocks = triton.cdiv(n, BM.value), triton.cdiv(v, BN.value)
    tiles = _tiles(row_blocks, column_blocks, processors)
    part = torch.empty(3 + sum_sq, column_blocks // tiles, n, dtype=torch.float32, device=hidden.device)
    _statistics_kernel[(min(processors, row_blocks * part.shape[1]),)](
        *(_tiles_of(t, HALF.value) for t in (hidden, compact)), _tiles_of(head.weight, BN.value),
        place, part, n, v, width, LOG2E / head.temperature,
        TILES=tiles, RAGGED=v % BN.value != 0, SUM_SQ=sum_sq, num_warps=4,
    )  # fmt: skip
    return part


def _tiles(row_blocks: int, column_blocks: int, processors: int) -> int:
    """Tiles per work item: a divisor of the number of tiles that leaves several items for every processor."""
    enough = row_blocks * column_blocks // (4 * processors)
    return next(k for k in (6, 2, 3, 5, 1) if column_blocks % k == 0 and k <= max(1, enough))


def _tiles_of(t: Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, BK.value], layout)
