"""Forward and backward over a whole batch, by either backend, in as few matrix products as the case allows.

recompute   scores again, one slice of the vocabulary at a time; the weight's gradient is written once
kept        the weights E of the forward pass still exist: ∂logp/∂(h Wᵀ) = −c ∘ E, two products and no more
slopes      a frozen head: u = ∂logp/∂h = −c ∘ (E W) is formed in the forward pass; the backward is g ∘ u
policy      the token loss is known: a chunk's gradient is formed while its E exists
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dew.kernels.budget import CHUNK, TILE, allowed, round_up, spans
from dew.kernels.chunked import Statistics, product, wide
from dew.kernels.head import Head

ALIGN = 16
"""Rows of stored weights start at multiples of this many entries, as the GPU's copy engine asks."""
BLOCK = 128
"""Chunks and slices are multiples of this, so that matrix units run full tiles."""


class Backend(Protocol):
    """A module that reads the vocabulary: `dew.kernels.chunked` or `dew.kernels.triton`."""

    SKIPS_IGNORED: bool
    """Whether `statistics` without a store takes targets of −100 itself."""

    def bytes_per_score(self, dtype: torch.dtype) -> int: ...

    def statistics(self, hidden: Tensor, head: Head, targets: Tensor, store: Tensor | None = None) -> Statistics: ...

    def gradient_tile(
        self,
        hidden: Tensor,
        head: Head,
        targets: Tensor,
        stats: Statistics,
        g: Tensor,
        ge: Tensor | None,
        low: int,
        out: Tensor,
    ) -> None: ...


class Want(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """∂L/∂hidden, ∂L/∂weight, ∂L/∂bias; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def empty_weights(rows: int, head: Head, dtype: torch.dtype) -> Tensor:
    """Room for E: (rows, V), each row aligned."""
    v = head.weight.shape[0]
    return torch.empty(rows, round_up(v, ALIGN), dtype=dtype, device=head.weight.device)[:, :v]


def recompute(
    backend: Backend,
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    stats: Statistics,
    g: Tensor,
    ge: Tensor | None,
    want: Want,
) -> Gradients:
    """Backward with the scores computed again."""
    (n, d), v = hidden.shape, head.weight.shape[0]
    if n == 0:
        return _empty(hidden, head, want, hidden.dtype)
    grads = _empty(hidden, head, want._replace(hidden=False), hidden.dtype)
    each = n * backend.bytes_per_score(hidden.dtype)
    slices = list(spans(v, each, allowed(TILE, hidden.device), 2 * BLOCK))
    tile = torch.empty(n, round_up(slices[0][1], ALIGN), dtype=hidden.dtype, device=hidden.device)
    total = torch.empty(n, d, dtype=wide(hidden.dtype), device=hidden.device) if want.hidden else None
    for low, high in slices:
        dz = tile[:, : high - low]
        backend.gradient_tile(hidden, head, targets, stats, g, ge, low, dz)
        if total is not None:
            product(dz, head.weight[low:high], out=total, add=low > 0)
        if grads.weight is not None:
            product(dz.t(), hidden, out=grads.weight[low:high])
        if grads.bias is not None:
            grads.bias[low:high] = dz.sum(0, dtype=wide(dz.dtype))
    return grads._replace(hidden=None if total is None else total.to(hidden.dtype))


def slopes(backend: Backend, hidden: Tensor, head: Head, targets: Tensor) -> tuple[Statistics, Tensor]:
    """Forward of a frozen head: the statistics, and u = ∂logp/∂h (N, D)."""
    u = torch.empty_like(hidden)
    parts = []
    for low, high, store in _chunks(hidden, head):
        x, y = hidden[low:high], targets[low:high]
        stats = backend.statistics(x, head, y, store)
        parts.append(stats)
        _from_weights(store, x, head, -stats.scale, Gradients(u, None, None), low, add=False)
    return _join(parts, hidden), u


def kept(store: Tensor, hidden: Tensor, head: Head, minus_gc: Tensor, want: Want) -> Gradients:
    """Backward from E: with r = −g ∘ c,   dh = r ∘ (E W)   dW = Eᵀ (r ∘ h)   db = Eᵀ r."""
    grads = _empty(hidden, head, want, hidden.dtype)
    _from_weights(store, hidden, head, minus_gc, grads, 0, add=False)
    return grads


def policy(
    backend: Backend,
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    slope: Callable[[int, int, Tensor], Tensor],
    want: Want,
) -> tuple[Statistics, Gradients]:
    """Forward and gradient at once; `slope(low, high, logp)` is ∂L/∂logp of rows [low, high)."""
    chunks = list(_chunks(hidden, head))
    grads = _empty(hidden, head, want, wide(hidden.dtype) if len(chunks) > 1 else hidden.dtype)
    parts = []
    for low, high, store in chunks:
        x = hidden[low:high]
        stats = backend.statistics(x, head, targets[low:high], store)
        parts.append(stats)
        r = -slope(low, high, stats.logp) * stats.scale
        _from_weights(store, x, head, r, grads, low, add=low > 0)
    dw, db = grads.weight, grads.bias
    dw = None if dw is None else dw.to(hidden.dtype)
    return _join(parts, hidden), Gradients(grads.hidden, dw, None if db is None else db.to(hidden.dtype))


def _from_weights(store: Tensor, x: Tensor, head: Head, r: Tensor, grads: Gradients, low: int, *, add: bool) -> None:
    """Add one chunk's share; `grads.hidden` holds all rows and this chunk's start at `low`."""
    if grads.hidden is not None:
        dh = torch.empty(x.shape, dtype=wide(x.dtype), device=x.device)
        product(store, head.weight, out=dh)
        torch.mul(dh, r[:, None], out=grads.hidden[low : low + x.shape[0]])
    if grads.weight is not None:
        scaled = torch.mul(x, r[:, None], out=torch.empty_like(x))  # rounded once, and no float32 copy
        product(store.t(), scaled, out=grads.weight, add=add)
    if grads.bias is not None:
        column = torch.empty(store.shape[1], 1, dtype=grads.bias.dtype, device=x.device)
        product(store.t(), r[:, None].to(store.dtype), out=column)
        grads.bias.copy_(grads.bias + column[:, 0] if add else column[:, 0])


def _chunks(hidden: Tensor, head: Head) -> list[tuple[int, int, Tensor]]:
    """Spans of tokens and the room for the weights of each, one buffer shared by all."""
    n, v = hidden.shape[0], head.weight.shape[0]
    cuts = list(spans(n, v * hidden.dtype.itemsize, allowed(CHUNK, hidden.device), BLOCK))
    room = empty_weights(cuts[0][1] if cuts else 0, head, hidden.dtype)
    return [(low, high, room[: high - low]) for low, high in cuts]


def _join(parts: list[Statistics], like: Tensor) -> Statistics:
    """The statistics of all chunks as one."""
    if not parts:
        return Statistics(*(torch.empty(0, dtype=wide(like.dtype), device=like.device) for _ in range(4)))
    return Statistics(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _empty(hidden: Tensor, head: Head, want: Want, dtype: torch.dtype) -> Gradients:
    """Room for the wanted gradients; the head's in `dtype`. Zeros where there are no rows to write them."""
    make = torch.zeros if hidden.shape[0] == 0 else torch.empty
    v, d = head.weight.shape
    return Gradients(
        torch.empty_like(hidden) if want.hidden else None,
        make(v, d, dtype=dtype, device=hidden.device) if want.weight else None,
        make(v, dtype=dtype, device=hidden.device) if want.bias else None,
    )
