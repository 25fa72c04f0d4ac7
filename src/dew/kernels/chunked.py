"""The PyTorch backend, for any device: float32 scores of a few rows or columns at a time.

Scores are centred on their row's maximum m, whose own term is left out of the sum to avoid cancellation:

    r = Σ_{v ≠ argmax} e^{z_v − m}      t = Σ_v e^{z_v − m} (z_v − m)
    lse = m + log1p(r)      logp = (z_y − m) − log1p(r)      H = log1p(r) − t / (1 + r)
    Σp² = u / (1 + r)²      u = Σ_v e^{2 (z_v − m)}
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dew.kernels.reference import Head

LOWEST = -1e30
"""Used instead of −∞ in products with a zero weight: 0 · −1e30 = 0."""
WIDE_COPIES = 3
"""Number of tensors in float32 or wider that `gradient_tile` allocates besides its result: z, p, dz."""

MIB, GIB = 1 << 20, 1 << 30
TILE = (1 / 64, 32 * MIB, 256 * MIB)
"""Share of the free memory, minimum and maximum bytes, for a tile of scores that is overwritten after use."""
KEPT = (1 / 16, 0, 8 * GIB)
"""The same for weights kept from the forward to the backward pass."""
CHUNK = (1 / 8, 64 * MIB, 8 * GIB)
"""The same for a chunk of tokens whose ∂logp/∂h is computed in the forward pass (frozen head)."""


class Statistics(NamedTuple):
    """What one pass over the vocabulary computes for each row."""

    logp: Tensor
    entropy: Tensor
    lse: Tensor
    scale: Tensor
    """c in ∂logp/∂(h Wᵀ) = −c · weights, if weights were stored."""
    sum_sq: Tensor | None = None
    """Σ_v p_v², if requested."""


def allowed(limit: tuple[float, int, int], device: torch.device) -> int:
    """Bytes that this limit currently permits on this device; memory cached by the allocator counts as free."""
    share, least, most = limit
    free = 8 * GIB  # for devices that do not report their free memory
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free -= torch.cuda.memory_allocated(device)
    return max(least, min(most, int(share * free)))


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def spans(length: int, bytes_each: int, nbytes: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Split `length` into about equal spans, multiples of `multiple` that fit into `nbytes` (if one multiple fits)."""
    if length == 0:
        return
    fit = max(1, nbytes // max(1, bytes_each))
    step = length if fit >= length else fit // multiple * multiple or fit
    parts = -(-length // step)
    step = round_up(-(-length // parts), multiple) if step >= multiple else step
    for low in range(0, length, step):
        yield low, min(low + step, length)


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def product(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> None:
    """out = a b, or out += a b: summed in float32 or wider, rounded once, to the dtype of `out`."""
    if out.dtype == a.dtype and (a.is_cuda or out.dtype == wide(a.dtype)):
        torch.addmm(out, a, b, out=out, beta=int(add))
    elif a.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):  # torch 2.8: half in, float32 out
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]
    else:
        _widened(a, b, out=out, add=add)


def _widened(a: Tensor, b: Tensor, *, out: Tensor, add: bool) -> None:
    """`product` without hardware support for half-precision inputs and float32 output: a few columns at a time."""
    kind = wide(a.dtype)
    a = a.to(kind)
    for low, high in spans(b.shape[1], b.shape[0] * 4, allowed(TILE, b.device), 1):
        part = a @ b[:, low:high].to(kind)
        out[:, low:high] = out[:, low:high] + part if add else part


def scores(hidden: Tensor, head: Head, low: int, high: int) -> tuple[Tensor, Tensor | None]:
    """Scores z of columns [low, high) in float32 or wider, and T · ∂z/∂(h Wᵀ), or None if that is 1."""
    z = torch.empty(hidden.shape[0], high - low, dtype=wide(hidden.dtype), device=hidden.device)
    product(hidden, head.weight[low:high].t(), out=z)
    if head.bias is not None:
        z += head.bias[low:high]
    slope = None
    if head.softcap is not None:
        z.div_(head.softcap).tanh_()
        slope = 1 - z.square()
        z.mul_(head.softcap)
    return (z.div_(head.temperature) if head.temperature != 1.0 else z), slope


def logp_entropy(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probability of the targets y (N, 1) and entropy, from scores z (N, V), which are overwritten.

    Also returns m, the argmax, e^{z − m} with 0 at the argmax, and its sum r.
    """
    m, top = z.max(-1, keepdim=True)
    gap = (z.gather(-1, y) - m).squeeze(-1)
    z.sub_(m).clamp_min_(LOWEST)
    e = z.exp().scatter_(-1, top, 0)
    r = e.sum(-1)
    entropy = (r.log1p() - z.mul_(e).sum(-1) / (1 + r)).clamp_min_(0)
    return gap - r.log1p(), entropy, m, top, e, r


def statistics(
    hidden: Tensor, head: Head, targets: Tensor, store: Tensor | None = None, sum_sq: bool = False
) -> Statistics:
    """Compute the statistics of every row; fill `store` (N, V), if given, so that ∂logp/∂(h Wᵀ) = −scale · store."""
    n, v = hidden.shape[0], head.weight.shape[0]
    kind = wide(hidden.dtype)
    logp, entropy, lse, squares = (torch.empty(n, dtype=kind, device=hidden.device) for _ in range(4))
    for low, high in spans(n, v * kind.itemsize * 2, allowed(TILE, hidden.device), 1):
        rows = slice(low, high)
        y = targets[rows, None]
        z, slope = scores(hidden[rows], head, 0, v)
        logp[rows], entropy[rows], m, top, e, r = logp_entropy(z, y)
        lse[rows] = m.squeeze(-1) + r.log1p()
        if sum_sq:
            squares[rows] = (1 + torch.linalg.vector_norm(e, dim=-1).square()) / (1 + r).square()
        if store is not None:
            e.scatter_(-1, top, 1).div_((1 + r)[:, None])
            e.scatter_(-1, y, logp[rows, None].expm1())
            store[rows] = e if slope is None else e.mul_(slope)
    scale = torch.full_like(logp, 1 / head.temperature)
    return Statistics(logp, entropy, lse, scale, squares if sum_sq else None)


def gradient_tile(
    hidden: Tensor, head: Head, targets: Tensor, stats: Statistics, g: Tensor, ge: Tensor | None, low: int, out: Tensor
) -> None:
    """out = ∂L/∂(h Wᵀ) of columns low, low+1, …:   g (1[v = y] − p) − ge p (log p + H), times the slope of z."""
    z, slope = scores(hidden, head, low, low + out.shape[1])
    logq = z.sub_(stats.lse[:, None])
    p = logq.exp()
    dz = p * -g[:, None]
    inside = (targets >= low) & (targets < low + out.shape[1])
    y = torch.where(inside, targets - low, 0)[:, None]
    exact = (-g * stats.logp.expm1())[:, None]  # g (1 − p_y), without the cancellation
    dz.scatter_(-1, y, torch.where(inside[:, None], exact, dz.gather(-1, y)))
    if ge is not None:
        logq.clamp_min_(LOWEST).add_(stats.entropy[:, None]).mul_(p)
        dz.addcmul_(logq, ge[:, None], value=-1)
    if slope is not None:
        dz.mul_(slope)
    out.copy_(dz.div_(head.temperature))
