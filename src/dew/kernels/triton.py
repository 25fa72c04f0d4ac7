"""The operator for NVIDIA GPUs: persistent matrix products whose epilogue folds the scores while in registers.

Scores are those of `dew.kernels.chunked`, centred likewise, one tile of the vocabulary at a time. Each tile leaves
(m, r, t) of its rows, with s = log2(e) / T and z the score before the temperature:

    m = max z      r = Σ_{v ≠ argmax} 2^{s (z_v − m)}      t = Σ_v 2^{s (z_v − m)} (z_v − m)

Two of them merge, with M = max(m, m'), a = 2^{s (m − M)}, a' = 2^{s (m' − M)}, one of which is 1:

    r ← a r + a' r' + min(a, a')        t ← a (t + (m − M)(1 + r)) + a' (t' + (m' − M)(1 + r'))

Stored weights are relative to the target's score, E_v = 2^{s (z_v − z_y)} = p_v / p_y, so that they can be written
before the row's sum is known: bfloat16 has float32's exponents, and nothing is lost. ∂logp/∂(h Wᵀ) = −(p_y / T) E
with E_y = 1 − 1/p_y. A row whose target is less likely than 2^−100 is done again, relative to its sum.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dew.kernels import chunked
from dew.kernels.chunked import Statistics
from dew.kernels.head import Head

LOG2E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)
FARTHEST = tl.constexpr(100.0)
"""Largest exponent of a stored weight: 2^100 leaves the products room below float32's 2^127."""
FAR_LOGP = -100.0 / LOG2E
FAR_ROWS = 256
"""Rows done again at a time."""


def interpreted() -> bool:
    """Whether kernels run on the CPU under Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def bytes_per_score(dtype: torch.dtype) -> int:
    """What `gradient_tile` holds for each score: the result alone."""
    return dtype.itemsize


@triton.jit
def _place(work, row_blocks, column_blocks, GROUP: tl.constexpr):
    """Row block and column block of a work item; GROUP row blocks share a column of the weight in the cache."""
    per_group = GROUP * column_blocks
    first = (work // per_group) * GROUP
    size = min(row_blocks - first, GROUP)
    within = work % per_group
    return first + within % size, within // size


@triton.jit
def _scores(
    x, w, row, column, steps, IEEE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """A (BM, BN) tile of h Wᵀ, summed in float32."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(steps):
        a = x.load([row, k * BK])
        b = w.load([column, k * BK])
        if IEEE:
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b.T, acc)
    return acc


@triton.jit
def _transform(z, bias, columns, v, cap, BIAS: tl.constexpr, CAP: tl.constexpr):
    """Bias and soft cap; also tanh, of which the gradient needs the square."""
    if BIAS:
        z += tl.load(bias + columns, mask=columns < v, other=0.0).to(tl.float32)[None, :]
        z = tl.maximum(z, LOWEST)
    th = z
    if CAP:
        th = 2.0 * tl.sigmoid(2.0 * z / cap) - 1.0
        z = cap * th
    return z, th


@triton.jit
def _merge(m, r, t, m2, r2, t2, s):
    """Two sets of statistics as one."""
    top = tl.maximum(m, m2)
    a = tl.exp2((m - top) * s)
    b = tl.exp2((m2 - top) * s)
    t = a * (t + (m - top) * (1.0 + r)) + b * (t2 + (m2 - top) * (1.0 + r2))
    return top, a * r + b * r2 + tl.minimum(a, b), t


@triton.jit
def _target_kernel(
    x,
    x_stride,
    w,
    w_stride,
    bias,
    y,
    out,
    width,
    cap,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = z_y of one row: cheaper to gather than to look for in every tile."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(y + row)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(x + row * x_stride + k, mask=k < width, other=0.0).to(tl.float32)
        b = tl.load(w + target * w_stride + k, mask=k < width, other=0.0).to(tl.float32)
        acc += a * b
    z = tl.sum(acc, axis=0)
    if BIAS:
        z += tl.load(bias + target).to(tl.float32)
    if CAP:
        z = cap * (2.0 * tl.sigmoid(2.0 * z / cap) - 1.0)
    tl.store(out + row, z)


@triton.jit
def _statistics_kernel(
    x, w, store, bias, zy, part, n, v, width, s, cap,
    BIAS: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr, STORE: tl.constexpr, IEEE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A work item is BM rows times TILES tiles of BN columns; its (m, r, t) go to part[:, item, rows]."""
    row_blocks = tl.cdiv(n, BM)
    items = tl.cdiv(v, BN * TILES)
    steps = tl.cdiv(width, BK)
    turns = tl.cdiv(row_blocks * items - tl.program_id(0), PROGRAMS) * TILES
    m = tl.full((BM,), LOWEST, tl.float32)
    r = tl.full((BM,), -1.0, tl.float32)
    t = tl.zeros((BM,), tl.float32)
    for turn in tl.range(0, turns, flatten=True):
        work = tl.program_id(0) + (turn // TILES) * PROGRAMS
        tile = turn % TILES
        row_block, item = _place(work, row_blocks, items, GROUP)
        row = row_block * BM
        column = (item * TILES + tile) * BN
        z = _scores(x, w, row, column, steps, IEEE, BM, BN, BK)
        columns = column + tl.arange(0, BN)
        z, th = _transform(z, bias, columns, v, cap, BIAS, CAP)
        if RAGGED:
            z = tl.where((columns < v)[None, :], z, LOWEST)
        top = tl.max(z, axis=1)
        d = z - top[:, None]
        e = tl.exp2(d * s)
        below = tl.sum(tl.where(e < 1.0, e, 0.0), axis=1)
        ties = tl.floor(tl.sum(e, axis=1) - below + 0.5)
        fresh = tile == 0
        m = tl.where(fresh, LOWEST, m)
        r = tl.where(fresh, -1.0, r)
        t = tl.where(fresh, 0.0, t)
        m, r, t = _merge(m, r, t, top, below + (ties - 1.0), tl.sum(e * d, axis=1), s)
        rows = row + tl.arange(0, BM)
        live = rows < n
        if STORE:
            away = (top - tl.load(zy + rows, mask=live, other=0.0)) * s
            e = e * tl.exp2(tl.minimum(away, FARTHEST))[:, None]
            if CAP:
                e = e * (1.0 - th * th)
            left, right = tl.split(tl.permute(tl.reshape(e.to(store.dtype), (BM, 2, BN // 2)), (0, 2, 1)))
            store.store([row, column], left)
            store.store([row, column + BN // 2], right)
        to = part + item.to(tl.int64) * n + rows  # every tile writes; the item's last one stands
        stride = items.to(tl.int64) * n
        tl.store(to, m, mask=live)
        tl.store(to + stride, r, mask=live)
        tl.store(to + 2 * stride, t, mask=live)


@triton.jit
def _join_kernel(part, out, n, items, s, BLOCK: tl.constexpr):
    """Merge the work items' (m, r, t) of BLOCK rows."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = rows < n
    stride = tl.cast(items, tl.int64) * n
    m = tl.full((BLOCK,), LOWEST, tl.float32)
    r = tl.full((BLOCK,), -1.0, tl.float32)
    t = tl.zeros((BLOCK,), tl.float32)
    for item in range(items):
        at = part + tl.cast(item, tl.int64) * n + rows
        m2 = tl.load(at, mask=live, other=0.0)
        r2 = tl.load(at + stride, mask=live, other=0.0)
        t2 = tl.load(at + 2 * stride, mask=live, other=0.0)
        m, r, t = _merge(m, r, t, m2, r2, t2, s)
    tl.store(out + rows, m, mask=live)
    tl.store(out + n + rows, r, mask=live)
    tl.store(out + 2 * n + rows, t, mask=live)


@triton.jit
def _gradient_kernel(
    x, w, out, bias, y, lse, logp, entropy, g, ge, n, v, width, low, s, cap, inverse_t,
    BIAS: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr, IEEE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out = ∂L/∂(h Wᵀ) of columns [low, low + v), as in `chunked.gradient_tile`."""
    row_blocks = tl.cdiv(n, BM)
    column_blocks = tl.cdiv(v, BN)
    steps = tl.cdiv(width, BK)
    for work in tl.range(tl.program_id(0), row_blocks * column_blocks, PROGRAMS, flatten=True):
        row_block, column_block = _place(work, row_blocks, column_blocks, GROUP)
        row = row_block * BM
        column = column_block * BN
        z = _scores(x, w, row, low + column, steps, IEEE, BM, BN, BK)
        columns = tl.arange(0, BN)
        z, th = _transform(z, bias + low, column + columns, v, cap, BIAS, CAP)
        rows = row + tl.arange(0, BM)
        live = rows < n
        target = tl.load(y + rows, mask=live, other=-1).to(tl.int32) - low - column
        up = tl.load(g + rows, mask=live, other=0.0) * inverse_t
        exact = tl.load(logp + rows, mask=live, other=0.0) * up
        log2p = z * s - (tl.load(lse + rows, mask=live, other=0.0) * 1.4426950408889634)[:, None]
        p = tl.exp2(log2p)
        dz = tl.where(columns[None, :] == target[:, None], exact[:, None], -up[:, None] * p)
        if ENTROPY:
            up_h = tl.load(ge + rows, mask=live, other=0.0) * inverse_t
            h = tl.load(entropy + rows, mask=live, other=0.0)
            dz -= up_h[:, None] * p * (log2p * 0.6931471805599453 + h[:, None])
        if CAP:
            dz = dz * (1.0 - th * th)
        left, right = tl.split(tl.permute(tl.reshape(dz.to(out.dtype), (BM, 2, BN // 2)), (0, 2, 1)))
        out.store([row, column], left)
        out.store([row, column + BN // 2], right)


STATISTICS: dict[str, Any] = {"BM": 128, "BN": 256, "BK": 64, "GROUP": 16, "num_warps": 8, "num_stages": 4}
STORING: dict[str, Any] = {**STATISTICS, "num_stages": 3}
GRADIENT: dict[str, Any] = {**STATISTICS, "num_stages": 3}


def statistics(hidden: Tensor, head: Head, targets: Tensor, store: Tensor | None = None) -> Statistics:
    """Both numbers of every row; with `store` (N, V) also the weights, ∂logp/∂(h Wᵀ) = −scale · store."""
    if store is not None and hidden.dtype == torch.float16:
        return chunked.statistics(hidden, head, targets, store)  # p_v / p_y does not fit float16
    n, v = hidden.shape[0], head.weight.shape[0]
    if n == 0:
        return chunked.statistics(hidden, head, targets, store)
    zy = _target_scores(hidden, head, targets)
    m, r, t = _fold(hidden, head, zy, store)
    inverse_t, rest = 1 / head.temperature, r.log1p()
    logp = ((zy - m) * inverse_t - rest).clamp_max_(0)
    entropy = (rest - t * inverse_t / (1 + r)).clamp_min_(0)
    stats = Statistics(logp, entropy, m * inverse_t + rest, logp.exp().mul_(inverse_t))
    if store is not None:
        _set_targets(store, targets, -(-logp).expm1(), zy, head)
        _redo_far_rows(hidden, head, targets, stats, store)
    return stats


def _target_scores(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    n, width = hidden.shape
    out = torch.empty(n, dtype=torch.float32, device=hidden.device)
    block = min(1024, triton.next_power_of_2(width))
    _target_kernel[(n,)](
        hidden, hidden.stride(0), head.weight, head.weight.stride(0), _bias(head), targets, out, width, head.softcap or 1.0,
        BIAS=head.bias is not None, CAP=head.softcap is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _fold(hidden: Tensor, head: Head, zy: Tensor, store: Tensor | None) -> tuple[Tensor, ...]:
    """(m, r, t) of every row."""
    (n, width), v = hidden.shape, head.weight.shape[0]
    c = STATISTICS if store is None else STORING
    blocks = triton.cdiv(v, c["BN"])
    tiles = next(k for k in (4, 3, 2, 5, 1) if blocks % k == 0)
    items = blocks // tiles
    part = torch.empty(3, items, n, dtype=torch.float32, device=hidden.device)
    out = torch.empty(3, n, dtype=torch.float32, device=hidden.device)
    s = LOG2E / head.temperature
    programs = min(_multiprocessors(hidden), triton.cdiv(n, c["BM"]) * items)
    x = _tiles_of(hidden, c["BM"], c["BK"])
    _statistics_kernel[(programs,)](
        x, _tiles_of(head.weight, c["BN"], c["BK"]), x if store is None else _tiles_of(store, c["BM"], c["BN"] // 2),
        _bias(head), zy, part, n, v, width, s, head.softcap or 1.0,
        BIAS=head.bias is not None, CAP=head.softcap is not None, RAGGED=v % c["BN"] != 0, STORE=store is not None,
        IEEE=hidden.dtype == torch.float32, TILES=tiles, PROGRAMS=programs, **c,
    )  # fmt: skip
    _join_kernel[(triton.cdiv(n, 128),)](part, out, n, items, s, BLOCK=128, num_warps=4)
    return out.unbind()


def _set_targets(store: Tensor, targets: Tensor, value: Tensor, zy: Tensor, head: Head) -> None:
    """The target's own weight, times the slope of the cap there."""
    if head.softcap is not None:
        value = value * (1 - (zy / head.softcap).square())
    store.scatter_(1, targets[:, None], value[:, None].to(store.dtype))


def _redo_far_rows(hidden: Tensor, head: Head, targets: Tensor, stats: Statistics, store: Tensor) -> None:
    """Weights of rows whose p_v / p_y overflows: p_v itself."""
    far = (stats.logp < FAR_LOGP).nonzero().squeeze(-1)
    for rows in far.split(FAR_ROWS) if len(far) else ():
        some = Statistics(*(column[rows] for column in stats))
        stats.scale[rows] = 1 / head.temperature
        g = torch.full_like(some.logp, -head.temperature)
        tile = torch.empty(len(rows), store.stride(0), dtype=store.dtype, device=store.device)[
            :, : store.shape[1]
        ]
        gradient_tile(hidden[rows], head, targets[rows], some, g, None, 0, tile)
        store[rows] = tile


def gradient_tile(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    stats: Statistics,
    g: Tensor,
    ge: Tensor | None,
    low: int,
    out: Tensor,
) -> None:
    """out = ∂L/∂(h Wᵀ) of columns low, low+1, …, as in `chunked.gradient_tile`."""
    (n, width), v = hidden.shape, out.shape[1]
    c = GRADIENT
    programs = min(_multiprocessors(hidden), triton.cdiv(n, c["BM"]) * triton.cdiv(v, c["BN"]))
    _gradient_kernel[(programs,)](
        _tiles_of(hidden, c["BM"], c["BK"]), _tiles_of(head.weight, c["BN"], c["BK"]),
        _tiles_of(out, c["BM"], c["BN"] // 2), _bias(head), targets, stats.lse, -stats.logp.expm1(), stats.entropy,
        g, g if ge is None else ge, n, v, width, low, LOG2E / head.temperature, head.softcap or 1.0,
        1 / head.temperature, BIAS=head.bias is not None, CAP=head.softcap is not None, ENTROPY=ge is not None,
        IEEE=hidden.dtype == torch.float32, PROGRAMS=programs, **c,
    )  # fmt: skip


def _bias(head: Head) -> Tensor:
    return head.weight if head.bias is None else head.bias


def _tiles_of(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])


def _multiprocessors(t: Tensor) -> int:
    return torch.cuda.get_device_properties(t.device).multi_processor_count if t.is_cuda else 4
