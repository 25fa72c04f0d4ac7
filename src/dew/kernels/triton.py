"""The Triton backend for NVIDIA GPUs: persistent matrix products whose epilogue reduces the scores in registers.

Scores are centred as in `dew.kernels.chunked`, one tile of the vocabulary at a time. Each tile yields (m, r, t) of
its rows, with z the score before the temperature, q = s (z − m) and s = log2(e) / T:

    m = max z      r = Σ_{v ≠ argmax} 2^q_v      t = Σ_v 2^q_v q_v

Two triples merge, with M = max(m, m'), d = s (m − M), d' = s (m' − M), one of which is 0:

    r ← 2^d r + 2^d' r' + min(2^d, 2^d')        t ← 2^d (t + d (1 + r)) + 2^d' (t' + d' (1 + r'))

An empty tile is m = −1e30, r = −1, t = 0.

Stored weights are relative to the target's score, E_v = 2^{s (z_v − z_y)} = p_v / p_y, so that they can be written
before the row's sum is known; bfloat16 has the exponent range of float32. ∂logp/∂(h Wᵀ) = −(p_y / T) E
with E_y = 1 − 1/p_y. Rows whose target is less likely than 2^−100 are recomputed in PyTorch, relative to their sum.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from dew.kernels import chunked
from dew.kernels.chunked import Statistics
from dew.kernels.reference import Head

LOG2E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)
CLEAR = tl.constexpr(1.015625)
"""Above this Σ 2^q, r = Σ 2^q − 1 has at least four correct digits in float32."""
FARTHEST = 100.0
"""Largest exponent of a stored weight: 2^100 keeps the products below float32's 2^127."""
FAR = tl.constexpr(FARTHEST)


@triton.jit
def _place(work, row_blocks, column_blocks, GROUP: tl.constexpr):
    """Row block and column block of a work item. GROUP row blocks share a column block of the weight in the cache."""
    per_group = GROUP * column_blocks
    first = (work // per_group) * GROUP
    size = min(row_blocks - first, GROUP)
    within = work % per_group
    return first + within % size, within // size


@triton.jit
def _scores(x, w, row, column, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A (BM, BN) tile of h Wᵀ, summed in float32."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(steps):
        a = x.load([row, k * BK])
        b = w.load([column, k * BK])
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _fold(z, s, BM: tl.constexpr, BN: tl.constexpr):
    """(m, r, t) of a tile's rows, and 2^q."""
    top = tl.max(z, axis=1)
    centre = tl.where(top > LOWEST, top * s, 0.0)
    q = tl.fma(z, tl.full((BM, BN), 1.0, tl.float32) * s, tl.zeros((BM, BN), tl.float32) - centre[:, None])
    e = tl.exp2(q)
    total = tl.sum(e, axis=1)
    off = tl.fma(top, tl.full((BM,), 1.0, tl.float32) * s, -centre)  # rounding error of q at the maximum
    t = tl.sum(e * q, axis=1) - off * total
    r = total - 1.0
    if tl.min(total, axis=0) < CLEAR:  # rare: added to the maximum's term, the others would be lost to rounding
        rest = tl.sum(tl.where(e < 0.5, e, 0.0), axis=1)
        r = tl.where(total >= CLEAR, r, tl.where(total > 0.5, rest, -1.0))
    return top, r, t, e


@triton.jit
def _merge(m, r, t, m2, r2, t2, s):
    top = tl.maximum(m, m2)
    d = (m - top) * s
    d2 = (m2 - top) * s
    a = tl.exp2(d)
    b = tl.exp2(d2)
    return top, a * r + b * r2 + tl.minimum(a, b), a * (t + d * (1.0 + r)) + b * (t2 + d2 * (1.0 + r2))


@triton.jit(do_not_specialize=["n"])
def target_kernel(x, x_stride, w, w_stride, y, out, n, width, BM: tl.constexpr, BK: tl.constexpr):
    """out = z_y. Computing it separately is cheaper than searching every tile for the target."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    live = rows < n
    target = tl.load(y + rows, mask=live, other=0)
    acc = tl.zeros((BM, BK), tl.float32)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride
    w_at = w + target.to(tl.int64)[:, None] * w_stride
    for start in range(0, width, BK):
        k = start + tl.arange(0, BK)
        inside = live[:, None] & (k < width)[None, :]
        a = tl.load(x_at + k[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(w_at + k[None, :], mask=inside, other=0.0).to(tl.float32)
        acc += a * b
    tl.store(out + rows, tl.sum(acc, axis=1), mask=live)


@triton.jit(do_not_specialize=["n"])
def statistics_kernel(
    x, w, store, zy, part, n, v, width, s, RAGGED: tl.constexpr, STORE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A work item is BM rows times TILES tiles of BN columns; its (m, r, t) go to part[:, item, rows]."""
    row_blocks = tl.cdiv(n, BM)
    items = tl.cdiv(v, BN * TILES)
    steps = tl.cdiv(width, BK)
    works = tl.maximum(row_blocks * items - tl.program_id(0), 0)
    m = tl.full((BM,), LOWEST, tl.float32)
    r = tl.full((BM,), -1.0, tl.float32)
    t = tl.zeros((BM,), tl.float32)
    for turn in tl.range(0, tl.cdiv(works, tl.num_programs(0)) * TILES, flatten=True):
        work = tl.program_id(0) + (turn // TILES) * tl.num_programs(0)
        tile = turn % TILES
        row_block, item = _place(work, row_blocks, items, GROUP)
        row = row_block * BM
        column = (item * TILES + tile) * BN
        z = _scores(x, w, row, column, steps, BM, BN, BK)
        columns = column + tl.arange(0, BN)
        if RAGGED:
            z = tl.where((columns < v)[None, :], z, LOWEST)
        top, r2, t2, e = _fold(z, s, BM, BN)
        fresh = tile == 0
        m = tl.where(fresh, LOWEST, m)
        r = tl.where(fresh, -1.0, r)
        t = tl.where(fresh, 0.0, t)
        m, r, t = _merge(m, r, t, top, r2, t2, s)
        rows = row + tl.arange(0, BM)
        live = rows < n
        if STORE:
            away = (top - tl.load(zy + rows, mask=live, other=0.0)) * s
            e = e * tl.exp2(tl.minimum(away, FAR))[:, None]
            left, right = tl.split(tl.permute(tl.reshape(e.to(store.dtype), (BM, 2, BN // 2)), (0, 2, 1)))
            store.store([row, column], left)
            store.store([row, column + BN // 2], right)
        to = part + item.to(tl.int64) * n + rows  # every tile writes; the last tile of an item has its result
        stride = items.to(tl.int64) * n
        tl.store(to, m, mask=live)
        tl.store(to + stride, r, mask=live)
        tl.store(to + 2 * stride, t, mask=live)


@triton.jit
def _log1p(r):
    """log(1 + r) for r ≥ 0 to full float32 accuracy: 2 artanh(r / (2 + r)) where the sum would round r away."""
    q = r / (2.0 + r)
    w = q * q
    small = q * (2.0 + w * (0.6666666667 + w * (0.4 + w * (0.2857142857 + w * (0.2222222222 + w * 0.1818181818)))))
    return tl.where(r < 0.5, small, tl.log(1.0 + r))


@triton.jit(do_not_specialize=["n"])
def join_kernel(zy, part, logp, entropy, lse, scale, n, items, s, inverse_t, BM: tl.constexpr, BI: tl.constexpr):
    """Merge the work items' (m, r, t) of BM rows into their statistics."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    live = rows < n
    stride = tl.cast(items, tl.int64) * n
    m = tl.full((BM,), LOWEST, tl.float32)
    r = tl.full((BM,), -1.0, tl.float32)
    t = tl.zeros((BM,), tl.float32)
    for start in range(0, items, BI):
        item = start + tl.arange(0, BI)
        inside = (item < items)[:, None] & live[None, :]
        some = part + item.to(tl.int64)[:, None] * n + rows[None, :]
        m2 = tl.load(some, mask=inside, other=LOWEST)
        r2 = tl.load(some + stride, mask=inside, other=-1.0)
        t2 = tl.load(some + 2 * stride, mask=inside, other=0.0)
        top = tl.max(m2, axis=0)
        d = (m2 - top[None, :]) * s
        a = tl.exp2(d)
        highest = (m2 == top[None, :]).to(tl.float32)
        others = tl.sum(a * (1.0 - highest), axis=0) + (tl.sum(highest, axis=0) - 1.0)
        t2 = tl.sum(a * (t2 + d * (1.0 + r2)), axis=0)
        m, r, t = _merge(m, r, t, top, tl.sum(a * r2, axis=0) + others, t2, s)
    rest = _log1p(r)
    log_y = tl.minimum((tl.load(zy + rows, mask=live, other=0.0) - m) * inverse_t - rest, 0.0)
    tl.store(logp + rows, log_y, mask=live)
    tl.store(entropy + rows, tl.maximum(rest - t * 0.6931471805599453 / (1.0 + r), 0.0), mask=live)
    tl.store(lse + rows, m * inverse_t + rest, mask=live)
    tl.store(scale + rows, tl.exp(log_y) * inverse_t, mask=live)


@triton.jit(do_not_specialize=["n", "low"])
def gradient_kernel(
    x, w, out, y, lse, logp, entropy, g, ge, n, v, width, low, s, inverse_t, ENTROPY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = ∂L/∂(h Wᵀ) of columns [low, low + v), as in `chunked.gradient_tile`."""
    row_blocks = tl.cdiv(n, BM)
    column_blocks = tl.cdiv(v, BN)
    steps = tl.cdiv(width, BK)
    for work in tl.range(tl.program_id(0), row_blocks * column_blocks, tl.num_programs(0), flatten=True):
        row_block, column_block = _place(work, row_blocks, column_blocks, GROUP)
        row = row_block * BM
        column = column_block * BN
        z = _scores(x, w, row, low + column, steps, BM, BN, BK)
        columns = tl.arange(0, BN)
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
        left, right = tl.split(tl.permute(tl.reshape(dz.to(out.dtype), (BM, 2, BN // 2)), (0, 2, 1)))
        out.store([row, column], left)
        out.store([row, column + BN // 2], right)


# ── launches ────────────────────────────────────────────────────────────────────────────────────────────────
STATISTICS: dict[str, Any] = {"BM": 128, "BN": 256, "BK": 64, "GROUP": 16, "num_warps": 8, "num_stages": 3}
HOPPER_STAGES = 4
"""Pipeline stages of the gradient kernel. On Blackwell, four exceed the shared memory of a program."""
WIDE_COPIES = 0
"""`gradient_tile` allocates nothing besides its result."""


def statistics(
    hidden: Tensor, head: Head, targets: Tensor, store: Tensor | None = None, sum_sq: bool = False
) -> Statistics:
    """Compute the statistics of every row; fill `store` (N, V), if given, so that ∂logp/∂(h Wᵀ) = −scale · store."""
    if hidden.shape[0] == 0 or sum_sq or (store is not None and hidden.dtype == torch.float16):
        return chunked.statistics(hidden, head, targets, store, sum_sq)  # p_v / p_y does not fit float16
    (n, width), v, c, inverse_t = hidden.shape, head.weight.shape[0], STATISTICS, 1 / head.temperature
    zy, *rows = (torch.empty(n, dtype=torch.float32, device=hidden.device) for _ in range(5))
    target_kernel[(triton.cdiv(n, 8),)](
        hidden, hidden.stride(0), head.weight, head.weight.stride(0), targets, zy, n, width, BM=8,
        BK=min(512, triton.next_power_of_2(width)), num_warps=4,
    )  # fmt: skip
    blocks = triton.cdiv(v, c["BN"])
    tiles = next(k for k in (2, 3, 5, 1) if blocks % k == 0)  # per work item
    part = torch.empty(3, blocks // tiles, n, dtype=torch.float32, device=hidden.device)
    x, programs = _tiles_of(hidden, c["BM"], c["BK"]), triton.cdiv(n, c["BM"]) * part.shape[1]
    statistics_kernel[(min(_multiprocessors(hidden.device), programs),)](
        x, _tiles_of(head.weight, c["BN"], c["BK"]), x if store is None else _tiles_of(store, c["BM"], c["BN"] // 2),
        zy, part, n, v, width, LOG2E * inverse_t, RAGGED=v % c["BN"] != 0, STORE=store is not None, TILES=tiles, **c,
    )  # fmt: skip
    stats = Statistics(*rows)
    join_kernel[(triton.cdiv(n, 8),)](
        zy, part, *rows, n, part.shape[1], LOG2E * inverse_t, inverse_t, BM=8, BI=32, num_warps=4
    )
    if store is not None:
        own = -(-stats.logp).expm1()  # the target's weight
        store.scatter_(1, targets[:, None], own[:, None].to(store.dtype))
        if len(far := (stats.logp < FARTHEST * -0.69).nonzero().squeeze(-1)):
            redone = store.new_empty(len(far), v)
            stats.scale[far] = chunked.statistics(hidden[far], head, targets[far], redone).scale
            store[far] = redone
    return stats


def gradient_tile(
    hidden: Tensor, head: Head, targets: Tensor, stats: Statistics, g: Tensor, ge: Tensor | None, low: int, out: Tensor
) -> None:
    """out = ∂L/∂(h Wᵀ) of columns low, low+1, …, as in `chunked.gradient_tile`."""
    (n, width), v, c = hidden.shape, out.shape[1], {**STATISTICS, "num_stages": _gradient_stages()}
    programs = min(_multiprocessors(hidden.device), triton.cdiv(n, c["BM"]) * triton.cdiv(v, c["BN"]))
    gradient_kernel[(programs,)](
        _tiles_of(hidden, c["BM"], c["BK"]), _tiles_of(head.weight, c["BN"], c["BK"]),
        _tiles_of(out, c["BM"], c["BN"] // 2), targets, stats.lse, -stats.logp.expm1(), stats.entropy, g,
        g if ge is None else ge, n, v, width, low, LOG2E / head.temperature, 1 / head.temperature,
        ENTROPY=ge is not None, **c,
    )  # fmt: skip


def _tiles_of(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])


@cache
def _gradient_stages() -> int:
    try:
        return HOPPER_STAGES if driver.active.get_current_target().arch == 90 else STATISTICS["num_stages"]
    except RuntimeError:  # no GPU: in the interpreter
        return HOPPER_STAGES


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
