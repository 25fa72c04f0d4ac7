"""The Triton backend for NVIDIA GPUs: launches the kernels of `dew.kernels.triton_kernels`.

Without stored weights nothing synchronises with the host: if there are targets of −100, the other rows are compacted
on the device.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dew.kernels import chunked, reference
from dew.kernels import triton_kernels as kernels
from dew.kernels.chunked import Statistics
from dew.kernels.reference import Head
from dew.kernels.triton_kernels import LOG2E

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
    if hidden.shape[0] == 0 or (store is not None and hidden.dtype == torch.float16):
        return chunked.statistics(hidden, head, targets, store, sum_sq)  # p_v / p_y does not fit float16
    if store is None:
        place = (targets != reference.IGNORE).cumsum(0, dtype=torch.int32)
        return _join(hidden, head, targets, _parts_of_live(hidden, head, place, sum_sq), place, None)
    zy = _scores_of(hidden, head, targets)
    part = _empty_parts(hidden, head, sum_sq)
    _launch_statistics(hidden, head, part, zy, zy, store, True)
    stats = _join(hidden, head, targets, part, None, zy)
    own = -(-stats.logp).expm1()  # the target's weight, times the slope of the soft cap
    own = own if head.softcap is None else own * (1 - (zy / head.softcap).square())
    store.scatter_(1, targets[:, None], own[:, None].to(store.dtype))
    _redo_far_rows(hidden, head, targets, stats, store)
    return stats


def _parts_of_live(hidden: Tensor, head: Head, place: Tensor, sum_sq: bool) -> Tensor:
    """(m, r, t), with `sum_sq` (m, r, t, u), of every work item and compacted row."""
    n, width = hidden.shape
    compact = torch.empty_like(hidden)
    kernels.compact_kernel[(triton.cdiv(n, 8),)](
        hidden, hidden.stride(0), place, compact, n, width, BM=8, BK=_columns(width), num_warps=4
    )
    part = _empty_parts(hidden, head, sum_sq)
    for x, whole in ((hidden, True), (compact, False)):
        _launch_statistics(x, head, part, place, place, None, whole)
    return part


def _empty_parts(hidden: Tensor, head: Head, sum_sq: bool) -> Tensor:
    items = triton.cdiv(triton.cdiv(head.weight.shape[0], STATISTICS["BN"]), _tiles(head))
    return torch.empty(3 + sum_sq, items, hidden.shape[0], dtype=torch.float32, device=hidden.device)


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
    kernels.statistics_kernel[(programs,)](
        rows, _tiles_of(head.weight, c["BN"], c["BK"]), out,
        _bias(head), zy, place, part, n, v, width, LOG2E / head.temperature, head.softcap or 1.0,
        BIAS=head.bias is not None, CAP=head.softcap is not None, RAGGED=v % c["BN"] != 0, STORE=store is not None,
        WHOLE=whole, SUM_SQ=part.shape[0] == 4, TILES=_tiles(head), **c,
    )  # fmt: skip


def _scores_of(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    n, width = hidden.shape
    out = torch.empty(n, dtype=torch.float32, device=hidden.device)
    kernels.target_kernel[(triton.cdiv(n, 8),)](
        hidden, hidden.stride(0), head.weight, head.weight.stride(0), _bias(head), targets, out, n, width,
        head.softcap or 1.0, BIAS=head.bias is not None, CAP=head.softcap is not None, BM=8, BK=_columns(width),
        num_warps=4,
    )  # fmt: skip
    return out


def _join(
    hidden: Tensor, head: Head, targets: Tensor, part: Tensor, place: Tensor | None, zy: Tensor | None
) -> Statistics:
    """Merge the parts; `place` if rows were compacted, `zy` if it is known."""
    (n, width), inverse_t, sum_sq = hidden.shape, 1 / head.temperature, part.shape[0] == 4
    stats = Statistics(*(torch.empty(n, dtype=torch.float32, device=hidden.device) for _ in range(4 + sum_sq)))
    kernels.join_kernel[(triton.cdiv(n, 8),)](
        hidden, hidden.stride(0), head.weight, head.weight.stride(0), _bias(head), targets,
        part if zy is None else zy, targets if place is None else place, part, *stats[:4],
        stats.logp if stats.sum_sq is None else stats.sum_sq,
        n, head.weight.shape[0], width, part.shape[1], LOG2E * inverse_t, inverse_t, head.softcap or 1.0,
        BIAS=head.bias is not None, CAP=head.softcap is not None, STORE=zy is not None, SUM_SQ=sum_sq,
        BM=8, BK=_columns(width), BI=32, num_warps=4,
    )  # fmt: skip
    return stats


def _columns(width: int) -> int:
    """Columns that a gathering program reads per step."""
    return min(512, triton.next_power_of_2(width))


def _redo_far_rows(hidden: Tensor, head: Head, targets: Tensor, stats: Statistics, store: Tensor) -> None:
    """Store p_v instead of p_v / p_y in rows where the ratio overflows; only the device knows which."""
    (n, width), v, c = hidden.shape, head.weight.shape[0], REDO
    tiles = triton.cdiv(triton.cdiv(v, c["BN"]), REDO_COLUMNS)
    kernels.redo_kernel[(triton.cdiv(n, c["BM"]), triton.cdiv(v, c["BN"] * tiles))](
        _tiles_of(hidden, c["BM"], c["BK"]), _tiles_of(head.weight, c["BN"], c["BK"]), store, store.stride(0),
        _bias(head), targets, stats.logp, stats.lse, stats.scale, n, v, width, tiles,
        LOG2E / head.temperature, head.softcap or 1.0, 1 / head.temperature,
        BIAS=head.bias is not None, CAP=head.softcap is not None, **c,
    )  # fmt: skip


def gradient_tile(
    hidden: Tensor, head: Head, targets: Tensor, stats: Statistics, g: Tensor, ge: Tensor | None, low: int, out: Tensor
) -> None:
    """out = ∂L/∂(h Wᵀ) of columns low, low+1, …, as in `chunked.gradient_tile`."""
    (n, width), v, c = hidden.shape, out.shape[1], GRADIENT
    programs = min(_multiprocessors(hidden.device), triton.cdiv(n, c["BM"]) * triton.cdiv(v, c["BN"]))
    kernels.gradient_kernel[(programs,)](
        _tiles_of(hidden, c["BM"], c["BK"]), _tiles_of(head.weight, c["BN"], c["BK"]),
        _tiles_of(out, c["BM"], c["BN"] // 2), _bias(head), targets, stats.lse, -stats.logp.expm1(), stats.entropy,
        g, g if ge is None else ge, n, v, width, low, LOG2E / head.temperature, head.softcap or 1.0,
        1 / head.temperature, BIAS=head.bias is not None, CAP=head.softcap is not None, ENTROPY=ge is not None,
        **c,
    )  # fmt: skip


def _bias(head: Head) -> Tensor:
    return head.weight if head.bias is None else head.bias


def _tiles_of(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
