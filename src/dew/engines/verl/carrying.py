"""What an estimator needs and verl does not hand over: the old policy's entropy, verdicts, conversations.

verl calls an estimator with rewards, mask and uids. The trainer modes of `dew.engines.verl.trainer` put the rest in a
context variable around that call. Whatever is missing or cannot be what it should be is an error: without it the
advantages would be GRPO's, and nobody would notice.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.engines.credit import Credit, Rows
from dew.engines.verl.conversations import Conversations
from dew.errors import EngineError

SWITCH_ON = (
    "Start with `python -m dew.engines.verl.main` instead of `python -m verl.trainer.main_ppo` and set "
    "trainer.v1.trainer_mode=dew_sync (or dew_colocate_async, dew_separate_async)."
)


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What the trainer knows about the rows of a batch, in the order of the batch."""

    algorithm: Algorithm
    entropy: Tensor | None
    """(B, T) of the old policy, at the sampling temperature."""
    keys: Sequence[str] | None = None
    """"{uid}_{conversation}_{row}" of each row. None: every row is an answer of its own."""
    acc: Tensor | None = None
    """(B,) raw correctness, where the reward manager gives it."""
    score: Tensor | None = None
    """(B,) the raw score that went with it, before penalties."""
    found: list["Found"] = field(default_factory=list)
    """What the estimator found out, for metrics and records."""


@dataclass(frozen=True)
class Found:
    """The answers of a batch, several rows of one conversation joined, and what they earned."""

    rows: Rows
    credit: Credit
    conversations: Conversations
    """How verl's rows make up the answers."""


_CARRIED: ContextVar[Carried | None] = ContextVar("dew_carried", default=None)


@contextmanager
def carrying(carried: Carried) -> Iterator[Carried]:
    token = _CARRIED.set(carried)
    try:
        yield carried
    finally:
        _CARRIED.reset(token)


def carried_for(name: str, mask: Tensor) -> Carried:
    """What the trainer carries, if it can be what `name` needs."""
    carried = _CARRIED.get()
    if carried is None:
        raise EngineError(
            f"algorithm.adv_estimator={name} needs the old policy's entropy, and this trainer does not hand it over: "
            f"the advantages would not be {name}'s. {SWITCH_ON}"
        )
    if carried.algorithm.name != name:
        raise EngineError(f"verl asked for {name}, but the trainer was set up for {carried.algorithm.name}.")
    if carried.algorithm.needs_entropy == "old":
        check_entropy(name, carried.entropy, mask)
    return carried


def check_entropy(name: str, entropy: Tensor | None, mask: Tensor) -> None:
    """Missing, misshapen, not a number, negative or all zero: none of them is an entropy."""
    if entropy is None:
        raise EngineError(
            f"{name}: verl's queue holds no entropy of the old policy. Leave algorithm.rollout_correction.bypass_mode "
            "off: it skips the pass over the sampled tokens that computes it."
        )
    if entropy.shape != mask.shape:
        raise EngineError(
            f"{name}: the old policy's entropy has shape {tuple(entropy.shape)}, the responses {tuple(mask.shape)}. "
            "This verl stores it otherwise than 0.9 does; install a release that dew is tested with."
        )
    live = entropy[mask.bool()]
    if not live.isfinite().all() or (live < -1e-3).any():
        raise EngineError(
            f"{name}: the old policy's entropy holds NaN, infinite or negative values on tokens that train. Look for "
            "a diverged model, and have verl compute it in float32: "
            "actor_rollout_ref.actor.entropy_from_logits_with_chunking=True."
        )
    if live.numel() and not torch.count_nonzero(live):
        raise EngineError(
            f"{name}: the old policy's entropy is exactly 0 on every token. Either this verl no longer computes it "
            "with the old log-probabilities (install a release that dew is tested with), or the policy has collapsed "
            "to one answer (lower the learning rate, sample at temperature 1)."
        )
