"""A vocabulary that is split over processes: rank k of the group holds consecutive rows of the head.

Each rank computes lse_k, H_k and its target's log-probability within its own rows. With P_k the share of the
probability that lies on rank k, and Q_k = Σπ² there:

    lse = log Σ_k e^{lse_k}      log P_k = lse_k − lse      logp = logp_k + log P_k
    H = Σ_k P_k (H_k − log P_k)      Σπ² = Σ_k P_k² Q_k

No term of H is negative, so nothing cancels. Rank 0's rows come first; ranks may hold different numbers of rows.
"""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dew.kernels import passes
from dew.kernels.chunked import LOWEST, Statistics
from dew.kernels.head import Head


def place(rows: int, device: torch.device, group: Any) -> tuple[int, int]:
    """Where this rank's rows start, and the size of the whole vocabulary."""
    sizes = _gather(torch.tensor(rows, device=device), group)
    first = int(sizes[: dist.get_rank(group)].sum())
    return first, int(sizes.sum())


def merge(lse: Tensor, entropy: Tensor, logp: Tensor, sum_sq: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(K, N) of the ranks -> (N,) of the whole vocabulary; logp is −inf on ranks that do not hold the target."""
    m, top = lse.max(0, keepdim=True)
    others = (lse - m).exp().scatter(0, top, 0).sum(0).log1p()
    share = lse - m - others
    mixed = (share.exp() * (entropy - share.clamp_min(LOWEST))).sum(0)
    return m.squeeze(0) + others, mixed, (logp + share).amax(0), (share.mul(2).exp() * sum_sq).sum(0)


class LogprobEntropy(torch.autograd.Function):
    """Rows with a target, which may lie on another rank. The loss must be the same on all ranks of the group."""

    @staticmethod
    def forward(
        ctx: Any, backend: ModuleType, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        temperature: float, softcap: float | None, group: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        head = Head(weight, bias, temperature, softcap)
        mine = (targets >= 0) & (targets < weight.shape[0])
        local = backend.statistics(hidden, head, torch.where(mine, targets, 0), sum_sq=True)
        logp = torch.where(mine, local.logp, -torch.inf)
        parts = _gather(torch.stack([local.lse, local.entropy, logp, local.sum_sq]), group)
        lse, entropy, logp, sum_sq = merge(*parts.unbind(1))
        ctx.backend, ctx.group, ctx.settings = backend, group, (temperature, softcap)
        targets = torch.where(mine, targets, -1)
        ctx.save_for_backward(hidden, weight, bias, targets, logp, entropy, lse)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sum_sq)
        return logp, entropy, sum_sq

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, ge: Tensor | None, _: None) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, logp, entropy, lse = ctx.saved_tensors
        g = torch.zeros_like(logp) if g is None else g
        stats, want = Statistics(logp, entropy, lse, torch.empty_like(lse)), list(ctx.needs_input_grad[1:4])
        head = Head(weight, bias, *ctx.settings)
        dh, dw, db = passes.recompute(ctx.backend, hidden, head, targets, stats, g, ge, want)
        if dh is not None:
            total = dh.to(logp.dtype)
            dist.all_reduce(total, group=ctx.group)
            dh = total.to(hidden.dtype)
        return None, dh, dw, db, None, None, None, None


def _gather(x: Tensor, group: Any) -> Tensor:
    """(K, ...) the tensor of every rank."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts)
