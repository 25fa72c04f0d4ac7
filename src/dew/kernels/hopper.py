"""The forward pass on Hopper, in Gluon: the statistics of `dew.kernels.triton_kernels`, with each warp told what to do.

The products are those of `dew.kernels.hopper_ring`; a group folds its scores while the other multiplies. It takes heads
without a bias or a soft cap and stores no weights.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dew.kernels.head import Head
from dew.kernels.hopper_ring import (
    BK,
    BM,
    BN,
    COLUMNS,
    GROUP_REGISTERS,
    HALF,
    LOADER_REGISTERS,
    ROWS,
    SCORES,
    begin,
    block_of,
    load,
    multiply,
    ring,
    tiles_of,
)
from dew.kernels.triton_kernels import CLEAR, LOG2E, LOWEST


@gluon.jit
def _load_either(x, together, w, xs0, xs1, ws, ready, empty, n, count, row_blocks, items, turns, steps,
    TILES: gl.constexpr,
):  # fmt: skip
    """Read the rows where they are if all count, else where those that do were copied."""
    if count == n:
        load(x, w, xs0, xs1, ws, ready, empty, row_blocks, items, turns, steps, TILES, False)
    else:
        load(together, w, xs0, xs1, ws, ready, empty, row_blocks, items, turns, steps, TILES, False)


@gluon.jit
def _fold(z, s):
    """(m, r, t) of a tile's rows."""
    top = gl.max(z, axis=1)
    centre = gl.where(top > LOWEST, top * s, 0.0)
    zero = gl.full((HALF, BN), 0.0, gl.float32, layout=SCORES)
    q = gl.fma(z, zero + s, zero - gl.expand_dims(centre, 1))
    e = gl.exp2(q)
    total = gl.sum(e, axis=1)
    off = gl.fma(top, gl.full((HALF,), 0.0, gl.float32, layout=ROWS) + s, -centre)  # what rounding left at the maximum
    t = gl.sum(e * q, axis=1) - off * total
    r = total - 1.0
    if gl.min(total, axis=0) < CLEAR:  # rare: the maximum's own term would round the others away
        rest = gl.sum(gl.where(e < 0.5, e, 0.0), axis=1)
        r = gl.where(total >= CLEAR, r, gl.where(total > 0.5, rest, -1.0))
    return top, r, t


@gluon.jit
def _merge(m, r, t, m2, r2, t2, s):
    """Two sets of statistics as one."""
    top = gl.maximum(m, m2)
    d = (m - top) * s
    d2 = (m2 - top) * s
    a = gl.exp2(d)
    b = gl.exp2(d2)
    return top, a * r + b * r2 + gl.minimum(a, b), a * (t + d * (1.0 + r)) + b * (t2 + d2 * (1.0 + r2))


@gluon.jit
def _statistics(xs, ws, ready, empty, lag, part, n, v, count, s, row_blocks, items, turns, steps,
    SECOND: gl.constexpr, TILES: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """One group's half of every block: products, fold, and after an item's last tile its (m, r, t)."""
    m = gl.full((HALF,), LOWEST, gl.float32, layout=ROWS)
    r = gl.full((HALF,), -1.0, gl.float32, layout=ROWS)
    t = gl.full((HALF,), 0.0, gl.float32, layout=ROWS)
    stage = 0
    phase = 0
    signal = begin(lag, turns, steps, SECOND)
    for turn in range(turns):
        work = gl.program_id(0) + (turn // TILES) * gl.num_programs(0)
        tile = turn % TILES
        row_block, item = block_of(work, row_blocks, items)
        at = gl.where(turn == 0, signal, 0)
        z, stage, phase = multiply(xs, ws, ready, empty, lag, at, stage, phase, steps, False)
        if RAGGED:
            columns = (item * TILES + tile) * BN + gl.arange(0, BN, layout=COLUMNS)
            z = gl.where(gl.expand_dims(columns < v, 0), z, LOWEST)
        top, r2, t2 = _fold(z, s)
        fresh = tile == 0
        m = gl.where(fresh, LOWEST, m)
        r = gl.where(fresh, -1.0, r)
        t = gl.where(fresh, 0.0, t)
        m, r, t = _merge(m, r, t, top, r2, t2, s)
        if tile == TILES - 1:
            rows = row_block * BM + SECOND * HALF + gl.arange(0, HALF, layout=ROWS)
            to = part + item.to(gl.int64) * n + rows
            stride = items.to(gl.int64) * n
            gl.store(to, m, mask=rows < count)
            gl.store(to + stride, r, mask=rows < count)
            gl.store(to + 2 * stride, t, mask=rows < count)


@gluon.jit(do_not_specialize=["n", "v", "width"])
def _statistics_kernel(x, together, w, place, part, n, v, width, s, TILES: gl.constexpr, RAGGED: gl.constexpr):
    """A work item is BM rows times TILES tiles of BN columns; its (m, r, t) go to part[:, item, rows]."""
    count = gl.load(place + n - 1)
    row_blocks = gl.cdiv(count, BM)
    items = gl.cdiv(v, BN * TILES)
    steps = gl.cdiv(width, BK)
    turns = gl.cdiv(row_blocks * items - gl.program_id(0), gl.num_programs(0)) * TILES
    xs0, xs1, ws, ready, empty, lag = ring(x, w)
    gl.warp_specialize([
        (_statistics, (xs0, ws, ready, empty, lag, part, n, v, count, s, row_blocks, items, turns, steps,
                       0, TILES, RAGGED)),
        (_statistics, (xs1, ws, ready, empty, lag, part, n, v, count, s, row_blocks, items, turns, steps,
                       1, TILES, RAGGED)),
        (_load_either, (x, together, w, xs0, xs1, ws, ready, empty, n, count, row_blocks, items, turns, steps,
                        TILES)),
    ], [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS])  # fmt: skip


def parts(hidden: Tensor, together: Tensor, head: Head, place: Tensor, processors: int) -> Tensor:
    """(m, r, t) of every work item and row that counts: part[:, item, i] is of the i-th of them.

    `place` numbers them from 1; `together` holds them in this order, where not all rows count.
    """
    (n, width), v = hidden.shape, head.weight.shape[0]
    row_blocks, column_blocks = triton.cdiv(n, BM.value), triton.cdiv(v, BN.value)
    tiles = _tiles(row_blocks, column_blocks, processors)
    part = torch.empty(3, column_blocks // tiles, n, dtype=torch.float32, device=hidden.device)
    _statistics_kernel[(min(processors, row_blocks * part.shape[1]),)](
        *(tiles_of(t, HALF.value, BK.value) for t in (hidden, together)), tiles_of(head.weight, BN.value, BK.value),
        place, part, n, v, width, LOG2E / head.temperature,
        TILES=tiles, RAGGED=v % BN.value != 0, num_warps=4,
    )  # fmt: skip
    return part


def _tiles(row_blocks: int, column_blocks: int, processors: int) -> int:
    """How many tiles a work item has: they divide the vocabulary evenly, and leave every processor some items."""
    enough = row_blocks * column_blocks // (4 * processors)
    return next(k for k in (6, 2, 3, 5, 1) if column_blocks % k == 0 and k <= max(1, enough))
