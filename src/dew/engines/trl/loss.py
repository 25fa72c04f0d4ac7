"""The rows of a micro-batch as `Algorithm.loss` wants them, and what the whole batch is divided by."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.engines.trl.credit import Credit, Rows
from dew.engines.trl.scoring import loss_mask

UNSCORED_GUIDE = 0.1
"""x / (x + 0.1): the ratio of a guide's token whose probability was not recorded, with x the policy's own."""

OWN, GUIDED, GUIDED_UNSCORED = 0, 1, 2
"""Who wrote a row: the policy; a guide with recorded log-probabilities; a guide without."""


@dataclass(frozen=True)
class MicroBatch:
    """`dew.algorithms.base.Part`."""

    mask: Tensor
    old_logp: Tensor
    ref_logp: Tensor | None
    weight: Tensor | None
    entropy: Tensor | None


def micro_batches(inputs: dict[str, Any], logp: Tensor, entropy: Tensor) -> dict[str, tuple[Tensor, MicroBatch]]:
    """The log-probabilities to train with and the rows, the policy's own ("") and the guide's ("guide/") apart.

    Where TRL kept no old log-probabilities the policy that samples is the one that trains, and the ratio is exactly
    1: it is taken against the very same numbers, detached, not against a second pass that would differ by rounding.
    """
    old = inputs.get("old_per_token_logps")
    own = MicroBatch(
        mask=loss_mask(inputs),
        old_logp=logp.detach() if old is None else old,
        ref_logp=inputs.get("ref_per_token_logps"),
        weight=inputs.get("importance_sampling_ratio"),
        entropy=entropy.detach(),
    )
    if inputs.get("author") is None:
        return {"": (logp, own)}
    guided, weight = (inputs["author"] != OWN)[:, None], inputs["row_weight"][:, None]
    unscored = (inputs["author"] == GUIDED_UNSCORED)[:, None]
    others_logp = torch.where(unscored, logp - (logp.exp() + UNSCORED_GUIDE).log(), logp)
    others = replace(own, mask=own.mask & guided, old_logp=inputs["guide_logps"], weight=weight)
    own = replace(own, mask=own.mask & ~guided, weight=weight if own.weight is None else own.weight * weight)
    return {"": (logp, own), "guide/": (others_logp, others)}


def divisor(algorithm: Algorithm, rows: Rows, credit: Credit, filler: Tensor) -> float:
    """What the loss of the whole generation is divided by: its live tokens, or its answers.

    As in TRL an answer counts even if it is masked or could not be judged. Groups that only a guide solved are a
    batch of their own and do not count, unless there is nothing else.
    """
    main = ~credit.failed & ~filler
    return _divisor(algorithm, rows, main) or _divisor(algorithm, rows, credit.failed) or 1.0


def row_weights(
    algorithm: Algorithm, rows: Rows, credit: Credit, filler: Tensor, *, guided: float, failed: float
) -> Tensor:
    """(N,) λ on the guide's answers; on groups that only the guide solved λ₀, over their own divisor."""
    apart = _divisor(algorithm, rows, credit.failed) or 1.0
    scale = divisor(algorithm, rows, credit, filler) / apart
    weights = torch.where(rows.guided, guided, torch.ones_like(rows.extra))
    return torch.where(credit.failed, failed * scale, weights)


def _divisor(algorithm: Algorithm, rows: Rows, which: Tensor) -> float:
    return algorithm.divisor(int(rows.mask[which].sum()), int(which.sum()))
