"""The Triton backend for NVIDIA GPUs: persistent matrix products whose epilogue reduces the scores in registers.

Without stored weights nothing synchronises with the host: if there are targets of −100, the other rows are compacted
on the device.

Scores are centred as in `dew.kernels.chunked`, one tile of the vocabulary at a time. Each tile yields (m, r, t) of
its rows, with z the score before the temperature, q = s (z − m) and s = log2(e) / T:

    m = max z      r = Σ_{v ≠ argmax} 2^q_v      t = Σ_v 2^q_v q_v

Two triples merge, with M = max(m, m'), d = s (m − M), d' = s (m' − M), one of which is 0:

    r ← 2^d r + 2^d' r' + min(2^d, 2^d')        t ← 2^d (t + d (1 + r)) + 2^d' (t' + d' (1 + r'))

An empty tile is m = −1e30, r = −1, t = 0.

Stored weights are relative to the target's score, E_v = 2^{s (z_v − z_y)} = p_v / p_y, so that they can be written
before the row's sum is known; bfloat16 has the exponent range of float32. ∂logp/∂(h Wᵀ) = −(p_y / T) E
with E_y = 1 − 1/p_y. A row whose target is less likely than 2^−100 is redone relative to its sum: E_v = p_v and
E_y = p_y − 1, which rounds to −1.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dew.kernels import chunked, reference
from dew.kernels.chunked import Statistics
from dew.kernels.reference import Head

LOG2E = 1.4426950408889634
IGNORE = tl.constexpr(reference.IGNORE)
LOWEST = tl.constexpr(-1e30)
CLEAR = tl.constexpr(1.015625)
"""Above this Σ 2^q, r = Σ 2^q − 1 has at least four correct digits in float32."""
FARTHEST = tl.constexpr(100.0)
"""Largest exponent of a stored weight: 2^100 keeps the products below float32's 2^127."""


@triton.jit
def _place(work, row_blocks, column_blocks, GROUP: tl.constexpr):
    """Row block and column block of a work item; GROUP row blocks share a column of the weight in the cache."""
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
    if tl.min(total, axis=0) < CLEAR:  # rare: next to the maximum's term the others would be lost to rounding
        rest = tl.sum(tl.where(e < 0.5, e, 0.0), axis=1)
        r = tl.where(total >= CLEAR, r, tl.where(total > 0.5, rest, -1.0))
    return top, r, t, e


@triton.jit
def _merge(m, r, t, m2, r2, t2, s):
    """Merge two sets of statistics."""
    top = tl.maximum(m, m2)
    d = (m - top) * s
    d2 = (m2 - top) * s
    a = tl.exp2(d)
    b = tl.exp2(d2)
    return top, a * r + b * r2 + tl.minimum(a, b), a * (t + d * (1.0 + r)) + b * (t2 + d2 * (1.0 + r2))


@triton.jit
def _target_scores(x, x_stride, w, w_stride, rows, y, live, width, BM: tl.constexpr, BK: tl.constexpr):
    """z_y of some rows: cheaper to gather than to search in every tile."""
    acc = tl.zeros((BM, BK), tl.float32)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride
    w_at = w + y.to(tl.int64)[:, None] * w_stride
    for start in range(0, width, BK):
        k = start + tl.arange(0, BK)
        inside = live[:, None] & (k < width)[None, :]
        a = tl.load(x_at + k[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(w_at + k[None, :], mask=inside, other=0.0).to(tl.float32)
        acc += a * b
    return tl.sum(acc, axis=1)


@triton.jit(do_not_specialize=["n"])
def target_kernel(x, x_stride, w, w_stride, y, out, n, width, BM: tl.constexpr, BK: tl.constexpr):
    """out = z_y."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    live = rows < n
    target = tl.load(y + rows, mask=live, other=0)
    z = _target_scores(x, x_stride, w, w_stride, rows, target, live, width, BM, BK)
    tl.store(out + rows, z, mask=live)


@triton.jit(do_not_specialize=["n"])
def compact_kernel(x, x_stride, place, out, n, width, BM: tl.constexpr, BK: tl.constexpr):
    """Copy the live rows to the front of `out`, unless all are live; `place` numbers them from 1."""
    if tl.load(place + n - 1) < n:
        rows = tl.program_id(0) * BM + tl.arange(0, BM)
        to = tl.load(place + rows, mask=rows < n, other=0)
        before = tl.load(place + rows - 1, mask=(rows < n) & (rows > 0), other=0)
        for start in range(0, width, BK):
            k = start + tl.arange(0, BK)
            inside = (to > before)[:, None] & (k < width)[None, :]
            values = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + k[None, :], mask=inside)
            tl.store(out + (to.to(tl.int64) - 1)[:, None] * width + k[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["n"])
def statistics_kernel(
    x, w, store, zy, place, part, n, v, width, s, RAGGED: tl.constexpr, STORE: tl.constexpr, WHOLE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A work item is BM rows times TILES tiles of BN columns; its (m, r, t) go to part[:, item, rows].

    Without STORE the number of rows is on the device: WHOLE runs only if all are live, its twin only if some are not.
    """
    count = n
    if not STORE:
        count = tl.load(place + n - 1)
        count = tl.where((count == n) == WHOLE, count, 0)
    row_blocks = tl.cdiv(count, BM)
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
        live = rows < count
        if STORE:
            away = (top - tl.load(zy + rows, mask=live, other=0.0)) * s
            e = e * tl.exp2(tl.minimum(away, FARTHEST))[:, None]
            left, right = tl.split(tl.permute(tl.reshape(e.to(store.dtype), (BM, 2, BN // 2)), (0, 2, 1)))
            store.store([row, column], left)
            store.store([row, column + BN // 2], right)
        to = part + item.to(tl.int64) * n + rows  # every tile writes; the last one of the item stays
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
def join_kernel(
    x, x_stride, w, w_stride, y, zy, place, part, logp, entropy, lse, scale, n, v, width, items, s, inverse_t,
    STORE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Merge the work items' (m, r, t) of BM rows into their statistics. With STORE every row is live."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    given = rows < n
    target = tl.load(y + rows, mask=given, other=0)
    live = given & (target >= 0) & (target < v)
    if STORE:
        at = rows
        z_y = tl.load(zy + rows, mask=live, other=0.0)
    else:
        at = tl.load(place + rows, mask=live, other=1) - 1
        z_y = _target_scores(x, x_stride, w, w_stride, rows, target, live, width, BM, BK)
    stride = tl.cast(items, tl.int64) * n
    m = tl.full((BM,), LOWEST, tl.float32)
    r = tl.full((BM,), -1.0, tl.float32)
    t = tl.zeros((BM,), tl.float32)
    for start in range(0, items, BI):
        item = start + tl.arange(0, BI)
        inside = (item < items)[:, None] & live[None, :]
        some = part + item.to(tl.int64)[:, None] * n + at[None, :]
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
    log_y = tl.minimum((z_y - m) * inverse_t - rest, 0.0)
    none = tl.where(target == IGNORE, 0.0, float("nan"))  # NaN for other targets outside the vocabulary
    tl.store(logp + rows, tl.where(live, log_y, none), mask=given)
    h = tl.maximum(rest - t * 0.6931471805599453 / (1.0 + r), 0.0)
    tl.store(entropy + rows, tl.where(live, h, none), mask=given)
    tl.store(lse + rows, tl.where(live, m * inverse_t + rest, none), mask=given)
    tl.store(scale + rows, tl.where(live, tl.exp(log_y) * inverse_t, none), mask=given)


@triton.jit(do_not_specialize=["n", "tiles"])
def redo_kernel(
    x, w, store, store_stride, y, logp, lse, scale, n, v, width, tiles, s, inverse_t,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows whose p_v / p_y overflows get p_v and its scale; blocks without any such row do nothing."""
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    far = tl.load(logp + rows, mask=rows < n, other=0.0) * 1.4426950408889634 < -FARTHEST
    if tl.max(far.to(tl.int32), axis=0) > 0:
        centre = tl.load(lse + rows, mask=far, other=0.0) * 1.4426950408889634
        target = tl.load(y + rows, mask=far, other=0)
        to = store + rows.to(tl.int64)[:, None] * store_stride
        for tile in range(tiles):
            column = (tl.program_id(1) * tiles + tile) * BN
            columns = column + tl.arange(0, BN)
            z = _scores(x, w, row, column, tl.cdiv(width, BK), BM, BN, BK)
            p = tl.where(columns[None, :] == target[:, None], -1.0, tl.exp2(z * s - centre[:, None]))
            inside = far[:, None] & (columns < v)[None, :]
            tl.store(to + columns[None, :], p.to(store.dtype.element_ty), mask=inside)
        if tl.program_id(1) == 0:
            tl.store(scale + rows, tl.where(far, inverse_t, 0.0), mask=far)


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
GRADIENT: dict[str, Any] = {**STATISTICS, "num_stages": 4}
REDO: dict[str, Any] = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
REDO_COLUMNS = 8
"""Programs per row block: few, because most have nothing to do."""

SKIPS_IGNORED = True
"""`statistics` without a store gives 0 for targets of −100, and NaN for others outside the vocabulary."""
WIDE_COPIES = 0
"""`gradient_tile` allocates nothing beside its result."""


def statistics(
    hidden: Tensor, head: Head, targets: Tensor, store: Tensor | None = None, sum_sq: bool = False
) -> Statistics:
    """Statistics of every row; fills `store` (N, V), if given, with weights: ∂logp/∂(h Wᵀ) = −scale · store."""
    if hidden.shape[0] == 0 or sum_sq or (store is not None and hidden.dtype == torch.float16):
        return chunked.statistics(hidden, head, targets, store, sum_sq)  # p_v / p_y does not fit float16
    if store is None:
        place = (targets != reference.IGNORE).cumsum(0, dtype=torch.int32)
        return _join(hidden, head, targets, _parts_of_live(hidden, head, place), place, None)
    zy = _scores_of(hidden, head, targets)
    part = _empty_parts(hidden, head)
    _launch_statistics(hidden, head, part, zy, zy, store, True)
    stats = _join(hidden, head, targets, part, None, zy)
    own = -(-stats.logp).expm1()  # the target's weight
    store.scatter_(1, targets[:, None], own[:, None].to(store.dtype))
    _redo_far_rows(hidden, head, targets, stats, store)
    return stats


def _parts_of_live(hidden: Tensor, head: Head, place: Tensor) -> Tensor:
    """(m, r, t) of every work item and compacted row."""
    n, width = hidden.shape
    compact = torch.empty_like(hidden)
    compact_kernel[(triton.cdiv(n, 8),)](
        hidden, hidden.stride(0), place, compact, n, width, BM=8, BK=_columns(width), num_warps=4
    )
    part = _empty_parts(hidden, head)
    for x, whole in ((hidden, True), (compact, False)):
        _launch_statistics(x, head, part, place, place, None, whole)
    return part


def _empty_parts(hidden: Tensor, head: Head) -> Tensor:
    items = triton.cdiv(triton.cdiv(head.weight.shape[0], STATISTICS["BN"]), _tiles(head))
    return torch.empty(3, items, hidden.shape[0], dtype=torch.float32, device=hidden.device)


def _tiles(head: Head) -> int:
    """Tiles per work item: a divisor of the number of tiles."""
    blocks = triton.cdiv(head.weight.shape[0], STATISTICS["BN"])
    return next(k for k in (2, 3, 5, 1) if blocks % k == 0)


def _launch_statistics(
    x: Tensor, head: Head, part: Tensor, zy: Tensor, place: Tensor, store: Tensor | None, whole: bool
) -> None:
    (n, width), v, c = x.shape, head.weight.shape[0], STATISTICS
    programs = min(_multiprocessors(x.device), triton.cdiv(n, c["BM"]) * part.shape[1])
    rows = _tiles_of(x, c["BM"], c["BK"])
    out = rows if store is None else _tiles_of(store, c["BM"], c["BN"] // 2)
    statistics_kernel[(programs,)](
        rows, _tiles_of(head.weight, c["BN"], c["BK"]), out, zy, place, part, n, v, width, LOG2E / head.temperature,
        RAGGED=v % c["BN"] != 0, STORE=store is not None, WHOLE=whole, TILES=_tiles(head), **c,
    )  # fmt: skip


def _scores_of(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    n, width = hidden.shape
    out = torch.empty(n, dtype=torch.float32, device=hidden.device)
    target_kernel[(triton.cdiv(n, 8),)](
        hidden, hidden.stride(0), head.weight, head.weight.stride(0), targets, out, n, width, BM=8,
        BK=_columns(width), num_warps=4,
    )  # fmt: skip
    return out


def _join(
    hidden: Tensor, head: Head, targets: Tensor, part: Tensor, place: Tensor | None, zy: Tensor | None
) -> Statistics:
    """Merge the parts; `place` if rows were compacted, `zy` if it is known."""
    (n, width), inverse_t = hidden.shape, 1 / head.temperature
    stats = Statistics(*(torch.empty(n, dtype=torch.float32, device=hidden.device) for _ in range(4)))
    join_kernel[(triton.cdiv(n, 8),)](
        hidden, hidden.stride(0), head.weight, head.weight.stride(0), targets, part if zy is None else zy,
        targets if place is None else place, part, *stats[:4], n, head.weight.shape[0], width, part.shape[1],
        LOG2E * inverse_t, inverse_t, STORE=zy is not None, BM=8, BK=_columns(width), BI=32, num_warps=4,
    )  # fmt: skip
    return stats


def _columns(width: int) -> int:
    """Columns that a gathering program reads per step."""
    return min(512, triton.next_power_of_2(width))


def _redo_far_rows(hidden: Tensor, head: Head, targets: Tensor, stats: Statistics, store: Tensor) -> None:
    """Store p_v instead of p_v / p_y in rows where the ratio overflows; only the device knows which."""
    (n, width), v, c = hidden.shape, head.weight.shape[0], REDO
    tiles = triton.cdiv(triton.cdiv(v, c["BN"]), REDO_COLUMNS)
    redo_kernel[(triton.cdiv(n, c["BM"]), triton.cdiv(v, c["BN"] * tiles))](
        _tiles_of(hidden, c["BM"], c["BK"]), _tiles_of(head.weight, c["BN"], c["BK"]), store, store.stride(0),
        targets, stats.logp, stats.lse, stats.scale, n, v, width, tiles, LOG2E / head.temperature,
        1 / head.temperature, **c,
    )  # fmt: skip


def gradient_tile(
    hidden: Tensor, head: Head, targets: Tensor, stats: Statistics, g: Tensor, ge: Tensor | None, low: int, out: Tensor
) -> None:
    """out = ∂L/∂(h Wᵀ) of columns low, low+1, …, as in `chunked.gradient_tile`."""
    (n, width), v, c = hidden.shape, out.shape[1], GRADIENT
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
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
