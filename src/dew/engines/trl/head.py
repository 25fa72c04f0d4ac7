"""dew's operator in the place of TRL's: log-probability and float32-exact entropy without the logits.

TRL's patched forward runs the backbone, gathers a sharded head (FSDP2, ZeRO-3), and hands hidden states and head to
one autograd function. Here that one function is exchanged while a pass is made; all of TRL's care around it stays.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from trl.trainer import utils

from dew.kernels import linear_logprob_entropy, plain_head

logger = logging.getLogger("dew")

OPERATOR = "_ChunkedLogProbFunction"
"""The name under which TRL's forward finds its autograd function (the contract test holds it)."""


class _LogprobEntropy:
    """Called as TRL calls its own: (hidden, weight, bias, labels, temperature, chunk, softcap, scale, outputs)."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        _chunk: int,
        softcap: float | None,
        scale: float,
        _outputs: Any,
    ) -> tuple[Tensor | None, ...]:
        if scale != 1.0 and softcap is None and bias is None:
            temperature = temperature / scale
        elif scale != 1.0:  # before the cap, so it cannot go into the temperature
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        logp, entropy = linear_logprob_entropy(
            hidden, weight, labels, bias=bias, temperature=temperature, softcap=softcap
        )
        return logp, entropy, None, None, None


@contextmanager
def exact_head() -> Iterator[None]:
    """While open, TRL's fused head is dew's."""
    theirs = getattr(utils, OPERATOR)
    setattr(utils, OPERATOR, _LogprobEntropy)
    try:
        yield
    finally:
        setattr(utils, OPERATOR, theirs)


def obstacle(model: Any) -> str | None:
    """Why dew's operator cannot compute this model's head, or None. A sharded head is gathered by TRL, so it can."""
    head = plain_head(model)
    if not isinstance(head, str) or "shard" in head:
        return None
    return head


def usable(model: Any) -> bool:
    """Whether to use dew's operator; where not, the log says why and TRL's is used."""
    reason = obstacle(model)
    if reason is not None:
        logger.warning("log-probabilities come from TRL's head, not from dew's: %s.", reason)
    return reason is None
