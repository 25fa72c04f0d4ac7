"""The operator for NVIDIA GPUs: which kernels are launched, on what, and what is done around them.

Without stored weights nothing waits for the host: rows with a target of −100 are left out by copying the others
together on the device, where there are any. On Hopper that pass has a kernel of its own, `dew.kernels.hopper`.
"""

import logging
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dew.kernels import chunked, reference
from dew.kernels import triton_kernels as kernels
from dew.kernels.chunked import Statistics
from dew.kernels.head import Head
from dew.kernels.triton_kernels import LOG2E

logger = logging.getLogger("dew")

STATISTICS: dict[str, Any] = {"BM": 128, "BN": 256, "BK": 64, "GROUP": 16, "num_warps": 8, "num_stages": 3}
STORING: dict[str, Any] = {**STATISTICS}
GRADIENT: dict[str, Any] = {**STATISTICS, "num_stages": 4}
REDO: dict[str, Any] = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
REDO_COLUMNS = 8
"""Programs that share a row block: few, since most find nothing to do."""

SKIPS_IGNORED = True
"""`statistics` without a store takes targets of −100 and gives 0; other targets outside the vocabulary give NaN."""
hopper_failed: list[str] = []
"""Why Hopper's kernel is not used although the device is one, once that is known."""


def bytes_per_score(dtype: torch.dtype) -> int:
    """What `gradient_tile` holds for each score: the result alone."""
    return dtype.itemsize


def statistics(hidden: Tensor, head: Head, targets: Tensor, store: Tensor | None = None) -> Statistics:
    """Both numbers of every row; with `store` (N, V) also the weights, ∂logp/∂(h Wᵀ) = −scale · store."""
    if store is not None and hidden.dtype == torch.float16:
        return chunked.statistics(hidden, head, targets, store)  # p_v / p_y does not fit float16
    if hidden.shape[0] == 0:
        return chunked.statistics(hidden, head, targets, store)
    if store is None:
        place = (targets != reference.IGNORE).cumsum(0, dtype=torch.int32)
        return _join(hidden, head, targets, _parts_of_live(hidden, head, place), place, None)
    zy = _scores_of(hidden, head, targets)
    stats = _join(hidden, head, targets, _parts_and_weights(hidden, head, zy, store), None, zy)
    _set_targets(store, targets, -(-stats.logp).expm1(), zy, head)
    _redo_far_rows(hidden, head, targets, stats, store)
    return stats


def _parts_of_live(hidden: Tensor, head: Head, place: Tensor) -> Tensor:
    """(m, r, t) of every work item and row that counts, those rows first."""
    n, width = hidden.shape
    together = torch.empty_like(hidden)
    kernels.together_kernel[(triton.cdiv(n, 8),)](
        hidden, hidden.stride(0), place, together, n, width, BM=8, BK=_columns(width), num_warps=4
    )
    part = _parts_by_hopper(hidden, together, head, place) if _fits_hopper(head, hidden.device) else None
    if part is None:
        part = _room(hidden, head, STATISTICS)
        for x, whole in ((hidden, True), (together, False)):
            _launch_statistics(x, head, part, place, place, None, whole)
    return part


def _fits_hopper(head: Head, device: torch.device) -> bool:
    """Whether Hopper's kernel takes this head here."""
    return head.bias is None and head.softcap is None and _is_hopper(device) and not hopper_failed


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _parts_by_hopper(hidden: Tensor, together: Tensor, head: Head, place: Tensor) -> Tensor | None:
    """The same by Hopper's kernel. Its language is experimental: where this Triton has another, None."""
    try:
        from dew.kernels import hopper

        return hopper.parts(hidden, together, head, place, _multiprocessors(hidden.device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        hopper_failed.append(f"{type(error).__name__}: {error}")
        logger.info("Triton %s cannot compile the Hopper kernel, another is used: %s", triton.__version__, error)
        return None


def _parts_and_weights(hidden: Tensor, head: Head, zy: Tensor, store: Tensor) -> Tensor:
    """(m, r, t) of every work item and row; the weights go to `store`."""
    part = _room(hidden, head, STORING)
    _launch_statistics(hidden, head, part, zy, zy, store, True)
    return part


def _room(hidden: Tensor, head: Head, c: dict[str, Any]) -> Tensor:
    items = triton.cdiv(triton.cdiv(head.weight.shape[0], c["BN"]), _tiles(head, c))
    return torch.empty(3, items, hidden.shape[0], dtype=torch.float32, device=hidden.device)


def _tiles(head: Head, c: dict[str, Any]) -> int:
    """How many tiles a work item has: they divide the vocabulary evenly."""
    blocks = triton.cdiv(head.weight.shape[0], c["BN"])
    return next(k for k in (2, 3, 5, 1) if blocks % k == 0)


def _launch_statistics(
    x: Tensor, head: Head, part: Tensor, zy: Tensor, place: Tensor, store: Tensor | None, whole: bool
) -> None:
    (n, width), v = x.shape, head.weight.shape[0]
    c = STATISTICS if store is None else STORING
    programs = min(_multiprocessors(x.device), triton.cdiv(n, c["BM"]) * part.shape[1])
    rows = _tiles_of(x, c["BM"], c["BK"])
    out = rows if store is None else _tiles_of(store, c["BM"], c["BN"] // 2)
    kernels.statistics_kernel[(programs,)](
        rows, _tiles_of(head.weight, c["BN"], c["BK"]), out,
        _bias(head), zy, place, part, n, v, width, LOG2E / head.temperature, head.softcap or 1.0,
        BIAS=head.bias is not None, CAP=head.softcap is not None, RAGGED=v % c["BN"] != 0, STORE=store is not None,
        WHOLE=whole, TILES=_tiles(head, c), **c,
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
    """The final numbers; `place` where rows were left out, `zy` where it is known."""
    (n, width), inverse_t = hidden.shape, 1 / head.temperature
    stats = Statistics(*(torch.empty(n, dtype=torch.float32, device=hidden.device) for _ in range(4)))
    kernels.join_kernel[(triton.cdiv(n, 8),)](
        hidden, hidden.stride(0), head.weight, head.weight.stride(0), _bias(head), targets,
        part if zy is None else zy, targets if place is None else place, part, *stats,
        n, head.weight.shape[0], width, part.shape[1], LOG2E * inverse_t, inverse_t, head.softcap or 1.0,
        BIAS=head.bias is not None, CAP=head.softcap is not None, STORE=zy is not None,
        BM=8, BK=_columns(width), BI=32, num_warps=4,
    )  # fmt: skip
    return stats


def _columns(width: int) -> int:
    """Columns that a gathering program reads at once."""
    return min(512, triton.next_power_of_2(width))


def _set_targets(store: Tensor, targets: Tensor, value: Tensor, zy: Tensor, head: Head) -> None:
    """The target's own weight, times the slope of the cap there."""
    if head.softcap is not None:
        value = value * (1 - (zy / head.softcap).square())
    store.scatter_(1, targets[:, None], value[:, None].to(store.dtype))


def _redo_far_rows(hidden: Tensor, head: Head, targets: Tensor, stats: Statistics, store: Tensor) -> None:
    """Weights of rows whose p_v / p_y overflows: p_v itself. Which rows these are the device alone knows."""
    (n, width), v, c = hidden.shape, head.weight.shape[0], REDO
    tiles = triton.cdiv(triton.cdiv(v, c["BN"]), REDO_COLUMNS)
    kernels.redo_kernel[(triton.cdiv(n, c["BM"]), triton.cdiv(v, c["BN"] * tiles))](
        _tiles_of(hidden, c["BM"], c["BK"]), _tiles_of(head.weight, c["BN"], c["BK"]), store, store.stride(0),
        _bias(head), targets, stats.logp, stats.lse, stats.scale, n, v, width, tiles,
        LOG2E / head.temperature, head.softcap or 1.0, 1 / head.temperature,
        BIAS=head.bias is not None, CAP=head.softcap is not None, **c,
    )  # fmt: skip


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
