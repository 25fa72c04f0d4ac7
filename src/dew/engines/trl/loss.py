"""What the loss reads: log-probabilities by dew's operator, the rows of a micro-batch, the divisor of the batch."""

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from trl.trainer import utils

from dew.algorithms import Algorithm
from dew.algorithms.base import Part
from dew.engines.credit import Credit, Rows
from dew.engines.recorder import Columns
from dew.engines.trl.batch import Batch, local_rows, loss_mask
from dew.engines.trl.compat import FUSED_HEAD, HEAD_OUTPUTS
from dew.engines.trl.guide import GUIDED_UNSCORED, OWN
from dew.errors import ConfigError, Problem
from dew.kernels import linear_logprob_entropy, plain_head

logger = logging.getLogger("dew")

UNSCORED_GUIDE = 0.1
"""x / (x + 0.1): the ratio of a guide's token whose probability was not recorded, with x the policy's own."""

# ── log-probabilities and entropies ─────────────────────────────────────────────────────────────────────────
#
# TRL's patched forward runs the backbone, gathers a sharded head (FSDP2, ZeRO-3), and passes hidden states and head to
# one autograd function. Only that function is replaced, for the duration of a pass.


class _LogprobEntropy:
    """Called as TRL calls its own: (hidden, weight, bias, labels, temperature, chunk, softcap, scale, outputs)."""

    def __init__(self, entropy_grad: bool, sum_sq: bool) -> None:
        self._settings: dict[str, Any] = {"entropy_grad": entropy_grad, "sum_sq": sum_sq}

    def apply(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: Any) -> tuple[Any, ...]:
        temperature, _, softcap, scale, _ = rest
        if scale != 1.0 and softcap is None and bias is None:
            temperature = temperature / scale
        elif scale != 1.0:  # applied before the cap, so it cannot go into the temperature
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        with _gather_again(weight, bias):
            logp, entropy, *squares = linear_logprob_entropy(
                hidden, weight, labels, bias=bias, temperature=temperature, softcap=softcap, **self._settings
            )
        found: dict[str, Tensor | None] = {"log_probs": logp, "entropy": entropy}
        found["log_sum_sq_probs"] = squares[0].log() if squares else None
        return tuple(found.get(name) for name in HEAD_OUTPUTS)


def _gather_again(*head: Tensor | None) -> AbstractContextManager[Any]:
    """ZeRO-3 partitions the head again after the forward pass: gather it once more when the backward pass reads it."""
    sharded = {p.data_ptr(): p for p in head if p is not None and p.requires_grad and hasattr(p, "ds_status")}
    if not sharded:
        return nullcontext()

    def unpack(saved: Tensor) -> Tensor:
        if not hasattr(saved, "ds_status"):
            return saved
        with utils.maybe_gather_lm_head_ctx(saved):
            return saved.detach()

    return torch.autograd.graph.saved_tensors_hooks(lambda saved: sharded.get(saved.data_ptr(), saved), unpack)


@contextmanager
def exact_head(entropy_grad: bool = False, sum_sq: bool = False) -> Iterator[None]:
    """While open, TRL's fused head is dew's operator: float32-exact entropy without the logits.

    `entropy_grad`: whether a gradient flows through the entropy, which only a bonus on it needs.
    """
    ours, theirs = _LogprobEntropy(entropy_grad, sum_sq), getattr(utils, FUSED_HEAD)
    setattr(utils, FUSED_HEAD, ours)
    try:
        yield
    finally:
        setattr(utils, FUSED_HEAD, theirs)


@contextmanager
def head_with_sum_sq(found: list[Tensor], model: Any, keep: int) -> Iterator[None]:
    """The same, without a gradient. Adds Σπ² of the last `keep` tokens of each forward pass to `found`, because TRL's
    scoring pass does not return it."""

    def watch(module: Any, inputs: Any, output: Any) -> None:
        found.append(output.log_sum_sq_probs.exp()[:, -keep:])

    with exact_head(sum_sq=True), model.register_forward_hook(watch):
        yield


def exact_head_supported(model: Any) -> bool:
    """Whether dew's operator can compute this model's head; if not, the log says why. TRL gathers a sharded head."""
    head = plain_head(model)
    if not isinstance(head, str) or "shard" in head:
        return True
    logger.warning("Log-probabilities are computed by TRL's head instead of dew's operator: %s.", head)
    return False


def uses_exact_head(wanted: bool, model: Any, algorithm: Algorithm) -> bool:
    """Whether dew's operator computes the head. An algorithm that reads Σπ² cannot do without it."""
    exact = wanted and exact_head_supported(model)
    if algorithm.needs_sum_sq and not exact:
        what = f"{algorithm.label} needs the sum of squared probabilities, which only dew's operator computes."
        remedy = "Leave out exact_head=False; if the model's output head is not supported, choose another algorithm."
        raise ConfigError(Problem(what, remedy=remedy))
    return exact


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────


def micro_batches(inputs: Columns, logp: Tensor, entropy: Tensor, clip_high: float) -> dict[str, tuple[Tensor, Part]]:
    """Log-probabilities and rows of the policy's answers ("") and, apart from them, of the guide's ("guide/").

    Where TRL kept no old log-probabilities, the policy that trains is the one that sampled and the ratio is exactly
    1: it is taken against the same numbers, detached, because a second pass would differ by rounding.

    A guide's ratio may be far above 1, and PPO does not clip it if A < 0: it is at most 1 + `clip_high` there.
    """
    old = inputs.get("old_per_token_logps")
    own = Part(
        mask=loss_mask(inputs),
        old_logp=logp.detach() if old is None else old,
        ref_logp=inputs.get("ref_per_token_logps"),
        weight=inputs.get("importance_sampling_ratio"),
        entropy=entropy.detach(),
        penalty=inputs.get("penalty"),
    )
    if inputs.get("author") is None:
        return {"": (logp, own)}
    guided, weight = (inputs["author"] != OWN)[:, None], inputs["row_weight"][:, None]
    unscored = (inputs["author"] == GUIDED_UNSCORED)[:, None]
    guide_logp = torch.where(unscored, logp - (logp.exp() + UNSCORED_GUIDE).log(), logp)
    most = torch.where(inputs["advantages"] < 0, inputs["guide_logps"] + math.log1p(clip_high), torch.inf)
    guide_logp = torch.minimum(guide_logp, most)
    guides = replace(own, mask=own.mask & guided, old_logp=inputs["guide_logps"], weight=weight, penalty=None)
    own = replace(own, mask=own.mask & ~guided, weight=weight if own.weight is None else own.weight * weight)
    return {"": (logp, own), "guide/": (guide_logp, guides)}


def loss_inputs(algorithm: Algorithm, batch: Batch, credit: Credit, accelerator: Any, args: Any) -> Columns:
    """TRL's inputs with our advantages, and what else the loss needs."""
    verdict = local_rows(accelerator, torch.where(credit.scored, credit.correct.long(), -1))
    if algorithm.engine_loss:
        return {**batch.inputs, "verdict": verdict}
    count = divisor(algorithm, batch, credit, batch.filler)
    added = {
        "advantages": local_rows(accelerator, credit.advantages, batch.inputs["completion_ids"].size(1)),
        "verdict": verdict,
        "num_items_in_batch": batch.mask.sum(),
        "divisor": torch.tensor(count, device=batch.mask.device),
    }
    if credit.penalty is not None:
        added["penalty"] = local_rows(accelerator, credit.penalty, batch.inputs["completion_ids"].size(1))
    if "author" in batch.inputs:
        added["row_weight"] = local_rows(accelerator, row_weights(algorithm, batch, credit, count, args))
    return {**batch.inputs, **added}


def divisor(algorithm: Algorithm, rows: Rows, credit: Credit, filler: Tensor) -> float:
    """What the loss of the whole generation is divided by: its live tokens, or its answers.

    As in TRL, an answer counts even if it is masked or has no reward. Groups that only a guide solved are a batch of
    their own and do not count, unless there is nothing else.
    """
    main = ~credit.failed & ~filler
    return _divisor(algorithm, rows, main) or _divisor(algorithm, rows, credit.failed) or 1.0


def row_weights(algorithm: Algorithm, rows: Rows, credit: Credit, count: float, args: Any) -> Tensor:
    """(N,) λ on the guide's answers; on groups that only the guide solved λ₀, over their own divisor, not `count`."""
    apart = _divisor(algorithm, rows, credit.failed) or 1.0
    weights = torch.where(rows.guided, args.guide_weight, torch.ones_like(rows.extra))
    return torch.where(credit.failed, args.guide_failed_weight * count / apart, weights)


def _divisor(algorithm: Algorithm, rows: Rows, which: Tensor) -> float:
    return algorithm.divisor(int(rows.mask[which].sum()), int(which.sum()))
