"""Forward and backward over a whole batch, for either backend, with as few matrix products as possible.

recompute   compute the scores again, one slice of the vocabulary at a time; the weight's gradient is written once
kept        E was stored by the forward pass: ∂logp/∂(h Wᵀ) = −c ∘ E, only two products
slopes      frozen head: the forward pass computes u = ∂logp/∂h = −c ∘ (E W); the backward pass is g ∘ u

A backend is a module: `dew.kernels.chunked` or `dew.kernels.triton`.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from dew.kernels.chunked import CHUNK, TILE, Statistics, allowed, product, round_up, spans, wide
from dew.kernels.reference import Head

ALIGN = 16
"""Rows of stored weights start at multiples of this many entries, as the GPU's copy engine requires."""
BLOCK = 128
"""Chunks and slices are multiples of this, so that matrix units run full tiles."""


Gradients = list[Tensor | None]
"""∂L/∂hidden, ∂L/∂weight, ∂L/∂bias; None where not wanted."""


def empty_weights(rows: int, head: Head, dtype: torch.dtype) -> Tensor:
    """An uninitialised buffer for E: (rows, V), each row aligned."""
    v = head.weight.shape[0]
    return torch.empty(rows, round_up(v, ALIGN), dtype=dtype, device=head.weight.device)[:, :v]


def recompute(
    backend: ModuleType, hidden: Tensor, head: Head, targets: Tensor, stats: Statistics, g: Tensor, ge: Tensor | None,
    want: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Backward with the scores computed again."""
    (n, d), v = hidden.shape, head.weight.shape[0]
    if n == 0:
        return _empty(hidden, head, want)
    _, dw, db = _empty(hidden, head, (False, *want[1:]))
    each = n * (hidden.dtype.itemsize + backend.WIDE_COPIES * wide(hidden.dtype).itemsize)
    slices = list(spans(v, each, allowed(TILE, hidden.device), 2 * BLOCK))
    tile = torch.empty(n, round_up(slices[0][1], ALIGN), dtype=hidden.dtype, device=hidden.device)
    dh = torch.empty(n, d, dtype=wide(hidden.dtype), device=hidden.device) if want[0] else None
    for low, high in slices:
        dz = tile[:, : high - low]
        backend.gradient_tile(hidden, head, targets, stats, g, ge, low, dz)
        if dh is not None:
            product(dz, head.weight[low:high], out=dh, add=low > 0)
        if dw is not None:
            product(dz.t(), hidden, out=dw[low:high])
        if db is not None:
            db[low:high] = dz.sum(0, dtype=wide(dz.dtype))
    return [None if dh is None else dh.to(hidden.dtype), dw, db]


def slopes(backend: ModuleType, hidden: Tensor, head: Head, targets: Tensor, sum_sq: bool) -> tuple[Statistics, Tensor]:
    """Forward for a frozen head: the statistics, and u = ∂logp/∂h (N, D)."""
    each = head.weight.shape[0] * hidden.dtype.itemsize
    chunks = list(spans(hidden.shape[0], each, allowed(CHUNK, hidden.device), BLOCK)) or [(0, 0)]
    buffer = empty_weights(chunks[0][1], head, hidden.dtype)
    u, parts = torch.empty_like(hidden), []
    for low, high in chunks:
        store = buffer[: high - low]
        parts.append(backend.statistics(hidden[low:high], head, targets[low:high], store, sum_sq))
        _gradient_of_hidden(store, head, -parts[-1].scale, out=u[low:high])
    columns = zip(*(part if sum_sq else part[:-1] for part in parts), strict=True)
    return Statistics(*(torch.cat(column) for column in columns)), u


def kept(store: Tensor, hidden: Tensor, head: Head, r: Tensor, want: Sequence[bool]) -> Gradients:
    """Backward from the stored E: with r = −g ∘ c,   dh = r ∘ (E W)   dW = Eᵀ (r ∘ h)   db = Eᵀ r."""
    dh, dw, db = _empty(hidden, head, want)
    if dh is not None:
        _gradient_of_hidden(store, head, r, out=dh)
    if dw is not None:
        scaled = torch.mul(hidden, r[:, None], out=torch.empty_like(hidden))  # rounded once, and no float32 copy
        product(store.t(), scaled, out=dw)
    if db is not None:
        product(store.t(), r[:, None].to(store.dtype), out=db[:, None])
    return [dh, dw, db]


def _gradient_of_hidden(store: Tensor, head: Head, r: Tensor, *, out: Tensor) -> None:
    """out = r ∘ (E W), summed in float32 and rounded once."""
    dh = torch.empty(out.shape, dtype=wide(out.dtype), device=out.device)
    product(store, head.weight, out=dh)
    torch.mul(dh, r[:, None], out=out)


def _empty(hidden: Tensor, head: Head, want: Sequence[bool]) -> Gradients:
    """Uninitialised tensors for the wanted gradients; zeros if there are no rows to write them."""
    make = hidden.new_zeros if hidden.shape[0] == 0 else hidden.new_empty
    shapes = (hidden.shape, head.weight.shape, head.weight.shape[:1])
    return [make(shape) if wanted else None for shape, wanted in zip(shapes, want, strict=True)]
