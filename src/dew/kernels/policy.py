"""`linear_policy_loss`: the clipped token loss that forms its own gradient, in three matrix products, not four.

L = −Σ_i min(w_i A_i, clip(w_i, 1 − ε_low, 1 + ε_high) A_i) / divisor        w = e^{logp − old_logp}

∂L/∂logp_i = −w_i A_i / divisor, and 0 where the clip holds: w > 1 + ε_high with A > 0, w < 1 − ε_low with A < 0
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dew.errors import ConfigError, ShapeError
from dew.kernels import passes
from dew.kernels.chunked import wide
from dew.kernels.head import Head
from dew.kernels.linear import (
    Impl,
    all_given,
    as_written,
    backend_for,
    check,
    follow_autocast,
    live_rows,
    pick,
    spread,
)
from dew.kernels.passes import Want
from dew.kernels.reference import IGNORE, logprob_entropy
from dew.kernels.reference import policy_loss as surrogate


class PolicyLoss(NamedTuple):
    """The loss, and what statistics need: both detached."""

    loss: Float[Tensor, ""]
    logp: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"]


def linear_policy_loss(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    old_logp: Float[Tensor, " N"],
    advantages: Float[Tensor, " N"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    divisor: float | Tensor | None = None,
    bias: Float[Tensor, " V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    impl: Impl = "auto",
) -> PolicyLoss:
    """The clipped policy loss of N tokens straight from the hidden states.

    The gradient is formed in the forward pass, while a chunk's weights exist; tokens with advantage 0 take no part
    in it. `divisor` is by default the number of tokens whose target is not −100; entries of `old_logp` and
    `advantages` beside a target of −100 are never read.
    """
    hidden, weight, bias = follow_autocast(hidden, weight, bias)
    check(hidden, weight, targets, bias, temperature, softcap, impl)
    _check(targets, old_logp, advantages, clip_low, clip_high)
    live = targets != IGNORE
    if divisor is None:
        divisor = live.sum().clamp_min(1)
    kind = wide(hidden.dtype)
    old, a = (torch.where(live, t.detach().to(kind), 0) for t in (old_logp, advantages))
    if impl == "reference":
        with as_written(hidden):
            logp, entropy = logprob_entropy(hidden, Head(weight, bias, temperature, softcap), targets)
        loss = surrogate(logp, old, a, live, clip_low, clip_high, divisor)
        return PolicyLoss(loss, logp.detach(), entropy)
    want = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    total, logp, entropy, *_ = _policy(
        hidden, weight, bias, targets, old, a, clip_low, clip_high, temperature, softcap, impl, want
    )
    return PolicyLoss(total / divisor, logp.detach(), entropy.detach())


def _check(targets: Tensor, old_logp: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> None:
    for name, t in (("old_logp", old_logp), ("advantages", advantages)):
        if t.shape != targets.shape:
            raise ShapeError(
                f"{name} {tuple(t.shape)}: expected one number per target, {tuple(targets.shape)}."
            )
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ConfigError(
            f"clip_low={clip_low}, clip_high={clip_high}: the ratio is kept in 1 − clip_low … 1 + clip_high, so "
            "clip_low lies in 0 … 1 and clip_high is not negative. DAPO uses 0.2 and 0.28."
        )


def slope(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """divisor · ∂L/∂logp of each token."""
    w = (logp - old_logp).exp()
    held = torch.where(advantages > 0, w > 1 + clip_high, w < 1 - clip_low)
    return torch.where(held | (advantages == 0), 0, -w * advantages)


@torch.library.custom_op("dew::policy_loss", mutates_args=())
def _policy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    temperature: float,
    softcap: float | None,
    impl: str,
    want: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """divisor · L, logp, entropy, and the gradients of divisor · L (empty where not wanted)."""
    head, wanted = Head(weight, bias, temperature, softcap), Want(*want)
    n, v = hidden.shape[0], weight.shape[0]
    backend = backend_for(impl, hidden, weight)
    moves = advantages != 0 if any(want) else torch.zeros_like(targets, dtype=torch.bool)
    rows = live_rows(targets, v, moves)
    x, y, old, a = pick(rows, hidden, targets, old_logp, advantages)

    def slopes_of(low: int, high: int, part: Tensor) -> Tensor:
        return slope(part, old[low:high], a[low:high], clip_low, clip_high)

    with as_written(hidden):
        stats, grads = passes.policy(backend, x, head, y, slopes_of, wanted)
        logp, entropy = spread(rows, stats.logp, n), spread(rows, stats.entropy, n)
        if rows is not None:  # rows that only statistics ask for
            still = (~moves & (targets != IGNORE)).nonzero().squeeze(-1)
            rest = backend.statistics(hidden[still], head, targets[still])
            logp[still], entropy[still] = rest.logp, rest.entropy
    total = surrogate(logp, old_logp, advantages, targets != IGNORE, clip_low, clip_high, 1.0)
    return total, logp, entropy, *all_given(grads, rows, n, hidden)


@_policy.register_fake
def _(hidden, weight, bias, targets, old_logp, advantages, low, high, temperature, softcap, impl, want):  # type: ignore[no-untyped-def]
    kind = wide(hidden.dtype)
    inputs = (hidden, weight, bias)
    grads = (torch.empty_like(t) if w else hidden.new_empty(0) for t, w in zip(inputs, want, strict=True))
    vectors = (hidden.new_empty(hidden.shape[0], dtype=kind) for _ in range(2))
    return hidden.new_empty((), dtype=kind), *vectors, *grads


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[3:])


def _gradient(ctx: Any, g: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 12
    wanted = ctx.needs_input_grad[:3]
    grads = (t * g if w else None for t, w in zip(ctx.saved_tensors, wanted, strict=True))
    return *grads, *(None,) * 9


_policy.register_autograd(_gradient, setup_context=_setup)
