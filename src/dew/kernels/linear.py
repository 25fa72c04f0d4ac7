"""`linear_logprob_entropy`: its checks, the choice of implementation, and its place in autograd.

Two custom operators (`dew::logprob_entropy` and its backward), so that torch.compile passes over them without
breaking the graph.
"""

import importlib
import importlib.util
import os
from functools import cache
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dew.errors import ConfigError, ShapeError
from dew.kernels import passes, reference
from dew.kernels.budget import KEPT, allowed
from dew.kernels.chunked import Statistics, wide
from dew.kernels.head import Head
from dew.kernels.passes import Backend, Gradients, Want
from dew.kernels.reference import IGNORE

Impl = Literal["auto", "triton", "chunked", "reference"]
IMPLS = ("auto", "triton", "chunked", "reference")
SHARED_MEMORY = 224 * 1024
"""What a Triton program's tiles take of a multiprocessor: Hopper and later data-centre GPUs have it."""
KEEP_FROM = 2 / 3
"""Two products over all rows cost less than three over the live ones from this share of live rows on."""


def linear_logprob_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy_grad: bool = False,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target and entropy of its distribution, without the (N, V) logits.

        z = softcap · tanh((h Wᵀ + b) / softcap) / T        logp = z_y − log Σ_v e^{z_v}        H = −Σ_v p_v log p_v

    Both come in float32 (float64 for float64 inputs), also for bfloat16 and float16 inputs. A target of −100 gives
    0 and 0 and no gradient. Gradients flow from the log-probability, and with `entropy_grad` from the entropy too;
    rows whose upstream gradient is 0 cost nothing in the backward pass.

    `impl`: "triton" (NVIDIA GPUs from Hopper on), "chunked" (PyTorch, any device), "reference" (the definition,
    which holds all logits), or "auto".
    """
    hidden, weight, bias = follow_autocast(hidden, weight, bias)
    check(hidden, weight, targets, bias, temperature, softcap, impl)
    if impl == "reference":
        head = Head(weight, bias, temperature, softcap)
        with as_written(hidden):
            return reference.logprob_entropy(hidden, head, targets, entropy_grad=entropy_grad)
    save = _what_to_save(hidden, weight, bias, entropy_grad, impl)
    logp, entropy, _, _, _ = _forward(hidden, weight, bias, targets, temperature, softcap, save, impl)
    return logp, entropy if entropy_grad else entropy.detach()


def follow_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast does to the inputs of a linear layer."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def as_written(t: Tensor) -> torch.autocast:
    """Inside, autocast does not touch the types again."""
    return torch.autocast(t.device.type, enabled=False)


def check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    impl: str,
) -> None:
    """Refuse what cannot be meant."""
    h, w, y = tuple(hidden.shape), tuple(weight.shape), tuple(targets.shape)
    if len(h) != 2 or len(w) != 2 or h[1] != w[1] or y != h[:1]:
        raise ShapeError(
            f"hidden {h}, weight {w}, targets {y}: expected (N, D), (V, D) and (N,). "
            "Batches go in flat: hidden.flatten(0, 1), targets.flatten()."
        )
    if bias is not None and tuple(bias.shape) != w[:1]:
        raise ShapeError(f"bias {tuple(bias.shape)}: expected one entry for each of weight's {w[0]} rows.")
    if w[0] == 0:
        raise ShapeError("weight has no rows: a distribution needs at least one entry.")
    kinds = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if len(kinds) != 1 or not hidden.dtype.is_floating_point:
        raise ShapeError(f"types {sorted(map(str, kinds))}: hidden, weight and bias need one floating type; cast them.")
    if targets.dtype != torch.int64:
        raise ShapeError(f"targets are {targets.dtype}: expected torch.int64 token numbers; write targets.long().")
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature}: scores are divided by it, so it must be above 0.")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap={softcap}: must be above 0; None leaves the scores as they are.")
    if impl not in IMPLS:
        raise ConfigError(f"impl={impl!r}: choose one of {', '.join(IMPLS)}.")


def _what_to_save(hidden: Tensor, weight: Tensor, bias: Tensor | None, entropy_grad: bool, impl: str) -> str:
    """nothing | scores (recompute them) | slopes (frozen head) | weights (they fit, keep them)."""
    if not torch.is_grad_enabled():
        return "nothing"
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    if not trains:
        return "nothing" if not hidden.requires_grad else "scores" if entropy_grad else "slopes"
    if entropy_grad or torch.compiler.is_compiling() or not hidden.is_cuda:
        return "scores"
    size = hidden.shape[0] * weight.shape[0] * hidden.dtype.itemsize
    return "weights" if size <= allowed(KEPT, hidden.device) else "scores"


def backend_for(impl: str, hidden: Tensor, weight: Tensor) -> Backend:
    """The module that does the work."""
    obstacle = _obstacle(hidden, weight) if impl != "chunked" else ""
    if impl == "triton" and obstacle:
        raise ConfigError(f'impl="triton": {obstacle}. Write impl="auto" to use PyTorch where Triton cannot run.')
    name = "chunked" if impl == "chunked" or obstacle else "triton"
    return cast(Backend, importlib.import_module(f"dew.kernels.{name}"))


def _obstacle(hidden: Tensor, weight: Tensor) -> str:
    """Why the Triton kernels cannot run on these tensors; empty if they can."""
    starts = (hidden.data_ptr(), weight.data_ptr(), *(t.stride(0) * t.dtype.itemsize for t in (hidden, weight)))
    if hidden.stride(-1) != 1 or weight.stride(-1) != 1 or any(start % 16 for start in starts):
        return f"rows of {hidden.shape[1]} x {hidden.dtype} do not all start at multiples of 16 bytes"
    return _machine_obstacle(hidden.device, hidden.dtype)


@cache
def _machine_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why they cannot run here at all."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install dew-rl[kernels])"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"tensor cores round {dtype} products; they are exact for bfloat16 and float16 only"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the tensors are on {device}, not on an NVIDIA GPU"
    properties: Any = torch.cuda.get_device_properties(device)
    if properties.shared_memory_per_block_optin < SHARED_MEMORY:
        return f"{properties.name} has too little shared memory for the tiles"
    return ""


def live_rows(targets: Tensor, v: int, also: Tensor | None = None) -> Tensor | None:
    """The rows that count (and pass `also`), or None where all do."""
    if targets.numel() == 0:
        return None
    bounds = torch.stack(torch.aminmax(targets))
    every = bounds if also is None else torch.cat([bounds, also.all()[None]])
    low, high, *rest = every.tolist()  # the one wait for the device
    if low >= 0 and high < v and all(rest):
        return None
    live = targets != IGNORE
    wrong = live & ((targets < 0) | (targets >= v))
    if wrong.any():
        raise ShapeError(
            f"targets lie outside 0 … {v - 1}, for example {int(targets[wrong][0])}. "
            f"Rows without a token are marked {IGNORE}."
        )
    return (live if also is None else live & also).nonzero().squeeze(-1)


def pick(rows: Tensor | None, *tensors: Any) -> list[Any]:
    """The chosen rows of each tensor."""
    return [t if t is None or rows is None else t[rows] for t in tensors]


def spread(rows: Tensor | None, values: Tensor, n: int) -> Tensor:
    """The inverse of `pick`: all n rows, 0 where none was chosen."""
    if rows is None:
        return values
    return values.new_zeros(n, *values.shape[1:]).index_copy_(0, rows, values)


def all_given(grads: Gradients, rows: Tensor | None, n: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Operators return tensors only: empty ones stand for gradients that nobody wants."""
    dh, dw, db = (like.new_empty(0) if t is None else t for t in grads)
    return dh if grads.hidden is None else spread(rows, dh, n), dw, db


@torch.library.custom_op("dew::logprob_entropy", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    save: str,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logp, entropy, lse, scale, and what the backward pass asked to be saved."""
    head = Head(weight, bias, temperature, softcap)
    n, hidden = hidden.shape[0], hidden.contiguous()
    backend = backend_for(impl, hidden, weight)
    direct = backend.SKIPS_IGNORED and save in ("nothing", "scores")
    rows = None if direct else live_rows(targets, weight.shape[0])
    x, y = pick(rows, hidden, targets)
    saved = hidden.new_empty(0)
    with as_written(hidden):
        if save == "slopes":
            stats, u = passes.slopes(backend, x, head, y)
            saved = spread(rows, u, n)
        elif save == "weights":
            saved = passes.empty_weights(n, head, hidden.dtype)
            stats = backend.statistics(x, head, y, saved[: x.shape[0]])
        else:
            stats = backend.statistics(x, head, y)
    logp, entropy, lse, scale = (spread(rows, s, n) for s in stats)
    return logp, entropy, lse, scale, saved


@_forward.register_fake
def _(hidden, weight, bias, targets, temperature, softcap, save, impl):  # type: ignore[no-untyped-def]
    vectors = [hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype)) for _ in range(4)]
    saved = torch.empty_like(hidden) if save == "slopes" else hidden.new_empty(0)
    return (*vectors, saved)


@torch.library.custom_op("dew::logprob_entropy_backward", mutates_args=())
def _backward(
    g: Tensor,
    ge: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    stats: list[Tensor],
    saved: Tensor,
    temperature: float,
    softcap: float | None,
    save: str,
    impl: str,
    want: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; empty tensors where not wanted."""
    n, wanted, hidden = hidden.shape[0], Want(*want), hidden.contiguous()
    backend = backend_for(impl, hidden, weight)
    g = g.to(wide(hidden.dtype))
    if save == "slopes":
        return (saved * g[:, None]).to(hidden.dtype), hidden.new_empty(0), hidden.new_empty(0)
    head = Head(weight, bias, temperature, softcap)
    rows = live_rows(targets, weight.shape[0], g != 0 if ge is None else (g != 0) | (ge != 0))
    valid = live_rows(targets, weight.shape[0]) if save == "weights" and rows is not None else rows
    count = n if valid is None else len(valid)
    with as_written(hidden):
        if save == "weights" and (rows is None or len(rows) >= KEEP_FROM * count):
            x, g, scale = pick(valid, hidden, g, stats[3])
            grads, rows = passes.kept(saved[:count], x, head, -g * scale, wanted), valid
        else:
            x, y, g, ge, *some = pick(rows, hidden, targets, g, ge, *stats)
            grads = passes.recompute(backend, x, head, y, Statistics(*some), g, ge, wanted)
    return all_given(grads, rows, n, hidden)


@_backward.register_fake
def _(g, ge, hidden, weight, bias, targets, stats, saved, temperature, softcap, save, impl, want):  # type: ignore[no-untyped-def]
    inputs = (hidden, weight, bias)
    return tuple(torch.empty_like(t) if w else hidden.new_empty(0) for t, w in zip(inputs, want, strict=True))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, ctx.temperature, ctx.softcap, ctx.save, ctx.impl = inputs
    logp, entropy, lse, scale, saved = output
    ctx.has_bias = bias is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, targets, logp, entropy, lse, scale, saved)


def _gradient(ctx: Any, g: Tensor | None, ge: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, targets, logp, entropy, lse, scale, saved = ctx.saved_tensors
    want = list(ctx.needs_input_grad[:3])
    g = torch.zeros_like(logp) if g is None else g
    stats = [logp, entropy, lse, scale]
    grads = _backward(
        g,
        ge,
        hidden,
        weight,
        bias,
        targets,
        stats,
        saved,
        ctx.temperature,
        ctx.softcap,
        ctx.save,
        ctx.impl,
        want,
    )
    return *(t if w else None for t, w in zip(grads, want, strict=True)), None, None, None, None, None


_forward.register_autograd(_gradient, setup_context=_setup)
