"""What the trainer passes to the estimator beside verl's arguments: the old policy's entropy, correctness, row keys.

verl calls an estimator with rewards, mask and uids. The trainer modes of `dew.engines.verl.trainer` put the rest into a
context variable around that call. Missing or impossible values raise an error: training on without them would silently
be another algorithm.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.engines.credit import Credit, Rows
from dew.engines.verl.settings import SWITCH_ON
from dew.errors import EngineError, Problem

OTHER_RELEASE = "Install a release of verl that dew is tested with."


@dataclass(frozen=True)
class Conversations:
    """B rows of N answers.

    An agent loop may return an answer as several rows (a condensed context, a sub-agent), each with the outcome of the
    whole. Counted one by one, a long conversation would weigh more in its group, and its tokens would be compared with
    the beginnings of other conversations. So the rows of an answer, each up to its last live token, are joined end to
    end, and results are split back into rows.
    """

    answer: Tensor
    """(B,) the answer that a row belongs to."""
    start: Tensor
    """(B,) where in the answer the row begins."""
    length: Tensor
    """(B,) the row's length, up to its last live token."""
    last_row: Tensor
    """(N,) the last row of each answer, from which verl's rewards are read."""

    @classmethod
    def of(cls, mask: Tensor, keys: Sequence[str] | None) -> "Conversations":
        """From keys "{uid}_{conversation}_{row}", in any order; without keys every row is an answer."""
        B, T = mask.shape
        length = torch.where(mask, torch.arange(1, T + 1, device=mask.device), 0).amax(-1) if T else mask.sum(-1)
        names = [key.rsplit("_", 2) for key in keys] if keys is not None else [[str(b), "", "0"] for b in range(B)]
        ids: dict[tuple[str, str], int] = {}
        answer = [ids.setdefault((uid, conversation), len(ids)) for uid, conversation, _ in names]
        lengths, start, end, last = length.tolist(), [0] * B, [0] * len(ids), [0] * len(ids)
        for b in sorted(range(B), key=lambda b: int(names[b][2])):
            i = answer[b]
            start[b], end[i], last[i] = end[i], end[i] + lengths[b], b
        return cls(*(torch.tensor(x, dtype=torch.long, device=mask.device) for x in (answer, start, lengths, last)))

    @property
    def single(self) -> bool:
        """Every row is an answer: nothing to join."""
        return len(self.last_row) == len(self.answer)

    def join(self, x: Tensor) -> Tensor:
        """(B, T) -> (N, T′)"""
        if self.single:
            return x
        here, column = self._places(x.shape[1])
        out = x.new_zeros(len(self.last_row), int((self.start + self.length).amax()))
        out[self.answer[:, None].expand_as(here)[here], column[here]] = x[here]
        return out

    def split(self, x: Tensor, width: int) -> Tensor:
        """(N, T′) -> (B, width), 0 after a row's end."""
        if self.single:
            return x
        here, column = self._places(width)
        out = x.new_zeros(here.shape)
        out[here] = x[self.answer[:, None].expand_as(here)[here], column[here]]
        return out

    def _places(self, width: int) -> tuple[Tensor, Tensor]:
        t = torch.arange(width, device=self.start.device)
        return t < self.length[:, None], self.start[:, None] + t


@dataclass(frozen=True)
class CreditedBatch:
    """The answers of a batch, the rows of a conversation joined, and their credit."""

    rows: Rows
    credit: Credit
    conversations: Conversations
    """How verl's rows make up the answers."""


@dataclass(frozen=True, kw_only=True)
class BatchContext:
    """What the trainer knows about the rows of a batch, in the batch's order."""

    algorithm: Algorithm
    entropy: Tensor | None
    """(B, T) of the old policy, at the sampling temperature."""
    keys: Sequence[str] | None = None
    """"{uid}_{conversation}_{row}" of each row. None: every row is an answer."""
    acc: Tensor | None = None
    """(B,) raw correctness, where the reward manager reports it."""
    score: Tensor | None = None
    """(B,) the raw score beside it, before penalties."""
    credited: list[CreditedBatch] = field(default_factory=list)
    """What the estimator computed, for metrics and records."""


_CURRENT: ContextVar[BatchContext | None] = ContextVar("dew_batch", default=None)


@contextmanager
def batch_context(context: BatchContext) -> Iterator[BatchContext]:
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)


def current_context(name: str, mask: Tensor) -> BatchContext:
    """The context that the trainer set, checked for what the algorithm `name` needs."""
    context = _CURRENT.get()
    if context is None:
        what = f"algorithm.adv_estimator={name}: this trainer does not pass on the old policy's entropy."
        raise EngineError(Problem(what, f"The advantages would not be those of {name}.", SWITCH_ON))
    if context.algorithm.name != name:
        raise EngineError(f"verl requested {name}, but the trainer is set up for {context.algorithm.name}.")
    if context.algorithm.needs_entropy == "old" and (problem := entropy_problem(context.entropy, mask)):
        raise EngineError(Problem(f"{name}: {problem.what}", problem.why, problem.remedy))
    return context


def entropy_problem(entropy: Tensor | None, mask: Tensor) -> Problem | None:
    """Missing, of another shape, not finite, negative or 0 everywhere: not an entropy."""
    if entropy is None:
        why = "algorithm.rollout_correction.bypass_mode=True skips the pass that computes it."
        return Problem("verl's queue holds no entropy of the old policy.", why, "Set bypass_mode=False.")
    if entropy.shape != mask.shape:
        shapes = f"{tuple(entropy.shape)}, the responses {tuple(mask.shape)}"
        return Problem(f"the old policy's entropy has shape {shapes}.", remedy=OTHER_RELEASE)
    live = entropy[mask.bool()]
    if not live.isfinite().all() or (live < -1e-3).any():
        what = "the old policy's entropy is NaN, infinite or negative on tokens that train."
        remedy = "Check for a diverged model, and set actor_rollout_ref.actor.entropy_from_logits_with_chunking=True."
        return Problem(what, remedy=remedy)
    if live.numel() and not torch.count_nonzero(live):
        why = "Either this verl does not compute it, or the policy has collapsed to one answer."
        remedy = f"{OTHER_RELEASE} After a collapse, lower the learning rate and sample at temperature 1."
        return Problem("the old policy's entropy is exactly 0 on every token.", why, remedy)
    return None
