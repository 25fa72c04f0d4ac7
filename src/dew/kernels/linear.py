"""`linear_logprob_entropy`: input checks, choice of implementation, autograd.

It is registered as two custom operators (`dew::logprob_entropy` and its backward), so torch.compile does not break
the graph at them.
"""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dew.errors import ConfigError, Problem, ShapeError
from dew.kernels import reference
from dew.kernels.chunked import CHUNK, KEPT, TILE, Statistics, allowed, product, round_up, spans, wide
from dew.kernels.reference import IGNORE, Head

Impl = Literal["auto", "triton", "chunked", "reference"]
IMPLS = get_args(Impl)
SHARED_MEMORY = 224 * 1024
"""Bytes of shared memory that the Triton tiles need: Hopper and later data-centre GPUs have them."""
BLACKWELL = 10
"""Major compute capability of Blackwell GPUs."""
ALIGN = 16
"""Rows of stored weights start at multiples of this many entries, as the GPU's copy engine requires."""
BLOCK = 128
"""Chunks and slices are multiples of this, so that matrix units run full tiles."""
Gradients = list[Tensor | None]
"""∂L/∂hidden, ∂L/∂weight, ∂L/∂bias; None if not requested."""


def linear_logprob_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy_grad: bool = False,
    sum_sq: bool = False,
    all_live: bool = False,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, " N"], ...]:
    """Log-probability of each target and entropy of its distribution, without materialising the (N, V) logits.

        z = softcap · tanh((h Wᵀ + b) / softcap) / T        logp = z_y − log Σ_v e^{z_v}        H = −Σ_v p_v log p_v

    With `sum_sq`, also returns the sum of squares Σ_v p_v², without a gradient.

    Results are float32 (float64 for float64 inputs), also for bfloat16 and float16 inputs. A target of −100 gives 0 and
    no gradient. Gradients flow through the log-probability and, with `entropy_grad`, through the entropy. If the
    backward pass recomputes the scores, it skips rows whose upstream gradient is 0.

    `all_live`: no target is −100 or outside the vocabulary. Otherwise they are checked, which waits for the GPU.

    `impl`: "triton" (NVIDIA GPUs, Hopper or later), "chunked" (PyTorch, any device), "reference" (the definition,
    with all logits in memory), or "auto".
    """
    hidden, weight, bias = _autocast(hidden, weight, bias)
    _check(hidden, weight, targets, bias, temperature, softcap, impl)
    given = (hidden, weight, bias, targets, temperature, softcap)
    if impl == "reference":
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head(weight, bias, temperature, softcap)
            logp, entropy, squares = reference.logprob_entropy(hidden, head, targets)
    else:
        save = _what_to_save(hidden, weight, bias, entropy_grad)
        logp, entropy, _, _, _, squares = _forward(*given, save, impl, sum_sq, all_live)
    entropy = entropy if entropy_grad else entropy.detach()
    return (logp, entropy, squares.detach()) if sum_sq else (logp, entropy)


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the inputs as autocast casts those of a linear layer."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, softcap: float | None,
    impl: str,
) -> None:  # fmt: skip
    h, w, y = tuple(hidden.shape), tuple(weight.shape), tuple(targets.shape)
    b = w[:1] if bias is None else tuple(bias.shape)
    if len(h) != 2 or len(w) != 2 or h[1] != w[1] or w[0] == 0 or y != h[:1] or b != w[:1]:
        what = f"hidden {h}, weight {w}, targets {y}, bias {b}: expected (N, D), (V, D), (N,) and (V,), with V > 0."
        raise ShapeError(Problem(what, remedy="Flatten batches: hidden.flatten(0, 1), targets.flatten()."))
    dtypes = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if len(dtypes) != 1 or not hidden.dtype.is_floating_point:
        raise ShapeError(f"hidden, weight and bias must share one floating dtype, not {sorted(map(str, dtypes))}.")
    if targets.dtype != torch.int64:
        raise ShapeError(Problem(f"targets are {targets.dtype}, not torch.int64.", remedy="Write targets.long()."))
    if not temperature > 0 or not (softcap is None or softcap > 0):
        raise ConfigError(f"temperature={temperature}, softcap={softcap}: must be above 0, or None for no softcap.")
    if impl not in IMPLS:
        raise ConfigError(Problem(f"impl={impl!r} is unknown.", remedy=f"Choose one of {', '.join(IMPLS)}."))


def _what_to_save(hidden: Tensor, weight: Tensor, bias: Tensor | None, entropy_grad: bool) -> str:
    """What the backward pass needs: nothing | scores (recompute) | slopes (frozen head) | weights (if they fit)."""
    if not torch.is_grad_enabled():
        return "nothing"
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    if not trains:
        return "nothing" if not hidden.requires_grad else "scores" if entropy_grad else "slopes"
    if entropy_grad or torch.compiler.is_compiling() or not hidden.is_cuda:
        return "scores"
    size = hidden.shape[0] * weight.shape[0] * hidden.dtype.itemsize
    return "weights" if size <= allowed(KEPT, hidden.device) else "scores"


def backend_for(impl: str, hidden: Tensor, head: Head) -> ModuleType:
    obstacle = _obstacle(hidden, head) if impl != "chunked" else ""
    if impl == "triton" and obstacle:
        remedy = 'Write impl="auto" to fall back to PyTorch if Triton cannot run.'
        raise ConfigError(Problem(f'impl="triton": {obstacle}.', remedy=remedy))
    return importlib.import_module(f"dew.kernels.{'chunked' if impl == 'chunked' or obstacle else 'triton'}")


def _obstacle(hidden: Tensor, head: Head) -> str:
    """Why the Triton kernels cannot run on these tensors; empty if they can."""
    if head.bias is not None or head.softcap is not None:
        return "the head has a bias or a soft cap"
    weight = head.weight
    starts = (hidden.data_ptr(), weight.data_ptr(), *(t.stride(0) * t.dtype.itemsize for t in (hidden, weight)))
    if hidden.stride(-1) != 1 or weight.stride(-1) != 1 or any(start % 16 for start in starts):
        return f"rows of {hidden.shape[1]} x {hidden.dtype} do not all start at multiples of 16 bytes"
    return _machine_obstacle(hidden.device, hidden.dtype)


@cache
def _machine_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why the Triton kernels cannot run on this machine with this dtype; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install dew-rl[kernels])"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"tensor cores round {dtype} products; they are exact for bfloat16 and float16 only"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the tensors are on {device}, not on an NVIDIA GPU"
    gpu: Any = torch.cuda.get_device_properties(device)
    if gpu.shared_memory_per_block_optin < SHARED_MEMORY:
        return f"{gpu.name} has too little shared memory for the tiles"
    old = gpu.major >= BLACKWELL and tuple(map(int, version("triton").split(".")[:2])) < (3, 8)
    return f"triton {version('triton')} does not compile them for {gpu.name}; 3.8 does" if old else ""


def _live_rows(targets: Tensor, v: int, also: Tensor | None = None) -> Tensor | None:
    """Indices of the rows whose target is not −100 (and where `also` is True), or None if these are all rows."""
    if targets.numel() == 0:
        return None
    bounds = torch.stack(torch.aminmax(targets))
    every = bounds if also is None else torch.cat([bounds, also.all()[None]])
    low, high, *rest = every.tolist()  # the only synchronisation with the device
    if low >= 0 and high < v and all(rest):
        return None
    live = targets != IGNORE
    wrong = live & ((targets < 0) | (targets >= v))
    if wrong.any():
        what = f"targets lie outside 0 … {v - 1}, for example {int(targets[wrong][0])}."
        raise ShapeError(Problem(what, remedy=f"Rows without a token are marked {IGNORE}."))
    return (live if also is None else live & also).nonzero().squeeze(-1)


def _pick(rows: Tensor | None, *tensors: Any) -> list[Any]:
    return [t if t is None or rows is None else t[rows] for t in tensors]


def _spread(rows: Tensor | None, values: Tensor, n: int) -> Tensor:
    """The inverse of `_pick`: all n rows, with 0 in rows that were not picked."""
    if rows is None:
        return values
    return values.new_zeros(n, *values.shape[1:]).index_copy_(0, rows, values)


# ── passes over a whole batch, for either backend, with as few matrix products as possible ──────────────────
#
# recompute   recompute the scores, one slice of the vocabulary at a time; the weight's gradient is written once
# kept        the forward pass stored E: ∂logp/∂(h Wᵀ) = −c ∘ E takes only two products
# slopes      frozen head: the forward pass computes u = ∂logp/∂h = −c ∘ (E W); the backward pass is g ∘ u


def _empty_weights(rows: int, head: Head, dtype: torch.dtype) -> Tensor:
    """An uninitialised buffer for E: (rows, V), each row aligned."""
    v = head.weight.shape[0]
    return torch.empty(rows, round_up(v, ALIGN), dtype=dtype, device=head.weight.device)[:, :v]


def _recompute(
    backend: ModuleType, hidden: Tensor, head: Head, targets: Tensor, stats: Statistics, g: Tensor, ge: Tensor | None,
    want: Sequence[bool],
) -> Gradients:  # fmt: skip
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


def _slopes(backend: ModuleType, hidden: Tensor, head: Head, y: Tensor, sum_sq: bool) -> tuple[Statistics, Tensor]:
    """Forward for a frozen head: the statistics, and u = ∂logp/∂h (N, D)."""
    each = head.weight.shape[0] * hidden.dtype.itemsize
    chunks = list(spans(hidden.shape[0], each, allowed(CHUNK, hidden.device), BLOCK)) or [(0, 0)]
    buffer = _empty_weights(chunks[0][1], head, hidden.dtype)
    u, parts = torch.empty_like(hidden), []
    for low, high in chunks:
        store = buffer[: high - low]
        parts.append(backend.statistics(hidden[low:high], head, y[low:high], store, sum_sq))
        _gradient_of_hidden(store, head, -parts[-1].scale, out=u[low:high])
    columns = zip(*(part if sum_sq else part[:-1] for part in parts), strict=True)
    return Statistics(*(torch.cat(column) for column in columns)), u


def _kept(store: Tensor, hidden: Tensor, head: Head, r: Tensor, want: Sequence[bool]) -> Gradients:
    """Backward from the stored E: with r = −g ∘ c,   dh = r ∘ (E W)   dW = Eᵀ (r ∘ h)   db = Eᵀ r."""
    dh, dw, db = _empty(hidden, head, want)
    if dh is not None:
        _gradient_of_hidden(store, head, r, out=dh)
    if dw is not None:
        scaled = torch.mul(hidden, r[:, None], out=torch.empty_like(hidden))  # rounds once, without a float32 copy
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
    """Uninitialised tensors for the requested gradients; zeros if there are no rows that would write them."""
    make = hidden.new_zeros if hidden.shape[0] == 0 else hidden.new_empty
    shapes = (hidden.shape, head.weight.shape, head.weight.shape[:1])
    return [make(shape) if wanted else None for shape, wanted in zip(shapes, want, strict=True)]


# ── the operators ───────────────────────────────────────────────────────────────────────────────────────────
@torch.library.custom_op("dew::logprob_entropy", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, softcap: float | None,
    save: str, impl: str, sum_sq: bool, all_live: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logp, entropy, lse, scale, the tensor saved for the backward pass, and Σp² (empty if not requested)."""
    head = Head(weight, bias, temperature, softcap)
    n, hidden = hidden.shape[0], hidden.contiguous()
    backend = backend_for(impl, hidden, head)
    rows = None if all_live else _live_rows(targets, weight.shape[0])
    x, y = _pick(rows, hidden, targets)
    saved = hidden.new_empty(0)
    with torch.autocast(hidden.device.type, enabled=False):
        if save == "slopes":
            stats, u = _slopes(backend, x, head, y, sum_sq)
            saved = _spread(rows, u, n)
        elif save == "weights":
            saved = _empty_weights(n, head, hidden.dtype)
            stats = backend.statistics(x, head, y, saved[: x.shape[0]], sum_sq)
        else:
            stats = backend.statistics(x, head, y, None, sum_sq)
    logp, entropy, lse, scale = (_spread(rows, s, n) for s in stats[:4])
    squares = hidden.new_empty(0) if stats.sum_sq is None else _spread(rows, stats.sum_sq, n)
    return logp, entropy, lse, scale, saved, squares


@_forward.register_fake
def _(hidden, weight, bias, targets, temperature, softcap, save, impl, sum_sq, all_live):  # type: ignore[no-untyped-def]
    *vectors, squares = [hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype)) for _ in range(5)]
    saved = torch.empty_like(hidden) if save == "slopes" else hidden.new_empty(0)
    return (*vectors, saved, squares if sum_sq else hidden.new_empty(0))


@torch.library.custom_op("dew::logprob_entropy_backward", mutates_args=())
def _backward(
    g: Tensor, ge: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
    stats: list[Tensor], saved: Tensor, temperature: float, softcap: float | None, save: str, impl: str,
    want: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of hidden, weight and bias. Those not requested are empty: operators cannot return None."""
    n, hidden = hidden.shape[0], hidden.contiguous()
    g = g.to(wide(hidden.dtype))
    if save == "slopes":
        return (saved * g[:, None]).to(hidden.dtype), hidden.new_empty(0), hidden.new_empty(0)
    head = Head(weight, bias, temperature, softcap)
    with torch.autocast(hidden.device.type, enabled=False):
        if save == "weights":
            rows = _live_rows(targets, weight.shape[0])
            x, g, scale = _pick(rows, hidden, g, stats[3])
            grads = _kept(saved[: len(x)], x, head, -g * scale, want)
        else:
            rows = _live_rows(targets, weight.shape[0], g != 0 if ge is None else (g != 0) | (ge != 0))
            x, y, g, ge, *some = _pick(rows, hidden, targets, g, ge, *stats)
            grads = _recompute(backend_for(impl, hidden, head), x, head, y, Statistics(*some), g, ge, want)
    dh, dw, db = (hidden.new_empty(0) if t is None else t for t in grads)
    return _spread(rows, dh, n) if want[0] else dh, dw, db


@_backward.register_fake
def _(g, ge, hidden, weight, bias, targets, stats, saved, temperature, softcap, save, impl, want):  # type: ignore[no-untyped-def]
    inputs = (hidden, weight, bias)
    return tuple(torch.empty_like(t) if w else hidden.new_empty(0) for t, w in zip(inputs, want, strict=True))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, *ctx.settings, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, targets, *output[:5])


def _gradient(ctx: Any, g: Tensor | None, ge: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, logp, entropy, lse, scale, saved = ctx.saved_tensors
    want = list(ctx.needs_input_grad[:3])
    g = torch.zeros_like(logp) if g is None else g
    grads = _backward(g, ge, *inputs, [logp, entropy, lse, scale], saved, *ctx.settings, want)
    return *(t if w else None for t, w in zip(grads, want, strict=True)), *[None] * 7


_forward.register_autograd(_gradient, setup_context=_setup)
