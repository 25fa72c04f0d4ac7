"""The functions that verl calls: an algorithm's advantages, and its loss inside verl's actor loss.

verl calls an estimator with rewards, mask and uids. The trainer modes of `dew.engines.verl.trainer` put the rest (the
old policy's entropy, correctness, row keys) into a context variable around that call. Missing or impossible values
raise an error, because without them a different algorithm would be trained silently.

Rows come in any order, any number per group, with verl's padding rows among them. Padding rows have their own uid and
no live token; a group without a live token gets 0.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dew.algorithms import Algorithm
from dew.algorithms.base import SIGNALS, Part
from dew.credit import soft_overlong
from dew.engines.credit import Credit, Rows, Signals, give_credit, outcomes
from dew.engines.verl.config import DEW_LOSS, SWITCH_ON
from dew.errors import EngineError, Problem

OTHER_RELEASE = "Install a release of verl that dew is tested with."


@dataclass(frozen=True)
class Conversations:
    """How verl's B rows make up N answers.

    An agent loop may return an answer as several rows (a condensed context, a sub-agent), each with the outcome of the
    whole answer. If each row counted as an answer, a long conversation would weigh more in its group, and its tokens
    would be compared with the beginnings of other conversations. So the rows of an answer, each up to its last live
    token, are concatenated, and results are split back into rows.
    """

    rows: list[list[int]]
    """The rows of each answer, in order. verl's rewards are read from the last one."""
    lengths: list[int]
    """The length of each row, up to its last live token."""

    @classmethod
    def of(cls, mask: Tensor, keys: Sequence[str] | None) -> "Conversations":
        """Group rows by their keys "{uid}_{conversation}_{row}", in any order. Without keys, every row is an answer."""
        B, T = mask.shape
        lengths = torch.where(mask, torch.arange(1, T + 1, device=mask.device), 0).amax(-1) if T else mask.sum(-1)
        names = [key.rsplit("_", 2) for key in keys] if keys is not None else [[str(b), "", "0"] for b in range(B)]
        answers: dict[tuple[str, str], list[int]] = {(uid, conversation): [] for uid, conversation, _ in names}
        for b in sorted(range(B), key=lambda b: int(names[b][2])):
            answers[names[b][0], names[b][1]].append(b)
        return cls(list(answers.values()), lengths.tolist())

    @property
    def last_row(self) -> list[int]:
        """Index of the last row of each answer."""
        return [rows[-1] for rows in self.rows]

    def join(self, x: Tensor) -> Tensor:
        """(B, T) -> (N, T′)"""
        if len(self.rows) == len(x):  # every row is an answer
            return x
        return pad_sequence([torch.cat([x[b, : self.lengths[b]] for b in rows]) for rows in self.rows], True)

    def split(self, x: Tensor, width: int) -> Tensor:
        """(N, T′) -> (B, width), 0 after a row's end."""
        if len(self.rows) == len(self.lengths):
            return x
        out = x.new_zeros(len(self.lengths), width)
        for answer, rows in zip(x, self.rows, strict=True):
            start = 0
            for b in rows:
                out[b, : self.lengths[b]] = answer[start : start + self.lengths[b]]
                start += self.lengths[b]
        return out


@dataclass(frozen=True)
class CreditedBatch:
    """The answers of a batch, with the rows of each conversation joined, and their credit."""

    rows: Rows
    credit: Credit
    conversations: Conversations
    """How verl's rows make up the answers."""


@dataclass(frozen=True, kw_only=True)
class BatchContext(Signals):
    """What dew passes to the estimator or the loss in addition to verl's arguments, in the order of the rows.

    Signals are from the old policy, except that the loss gets the entropy of the policy being trained.
    """

    algorithm: Algorithm
    keys: Sequence[str] | None = None
    """"{uid}_{conversation}_{row}" of each row. None: every row is an answer."""
    acc: Tensor | None = None
    """(B,) raw correctness, if the reward manager reports it."""
    score: Tensor | None = None
    """(B,) raw score before penalties, reported together with `acc`."""
    recorded: bool = False
    """Whether a token record of this batch is written."""
    credited: list[CreditedBatch] = field(default_factory=list)
    """What the estimator computed, for metrics and records."""


CURRENT: ContextVar[BatchContext | None] = ContextVar("dew_batch", default=None)


@contextmanager
def batch_context(context: BatchContext) -> Iterator[BatchContext]:
    """Set the context for the estimator or loss that verl calls inside the `with` block."""
    token = CURRENT.set(context)
    try:
        yield context
    finally:
        CURRENT.reset(token)


def check_entropy(entropy: Tensor | None, mask: Tensor) -> None:
    """Raise an error if the entropy is missing, not finite, negative, or 0 on every token."""
    name = "The old policy's entropy"
    if entropy is None:
        why = "algorithm.rollout_correction.bypass_mode=True skips the pass that computes it."
        raise EngineError(Problem(f"{name} is not in verl's queue.", why, "Set bypass_mode=False."))
    live = entropy[mask.bool()]
    if not live.isfinite().all() or (live < -1e-3).any():
        remedy = "Check for a diverged model, and set actor_rollout_ref.actor.entropy_from_logits_with_chunking=True."
        raise EngineError(Problem(f"{name} is NaN, infinite or negative on tokens that train.", remedy=remedy))
    if live.numel() and not live.any():
        why = "Either this release of verl does not compute it, or the policy has collapsed to one answer."
        remedy = f"{OTHER_RELEASE} After a collapse, lower the learning rate and sample at temperature 1."
        raise EngineError(Problem(f"{name} is exactly 0 on every token.", why, remedy))


def estimator(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that verl calls for `algorithm.adv_estimator=name`."""

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], config: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        context = CURRENT.get()
        if context is None:
            what = f"algorithm.adv_estimator={name}: this trainer drops the old policy's entropy."
            raise EngineError(Problem(what, f"The advantages would not be those of {name}.", SWITCH_ON))
        if context.algorithm.needs_entropy == "old":
            check_entropy(context.entropy, response_mask)
        with torch.no_grad():
            batch, advantages = credit_rows(context, token_level_rewards, response_mask.bool(), index)
        context.credited.append(batch)
        return advantages, advantages  # without a critic, nothing reads the returns

    estimate.__name__ = f"{name}_advantages"
    return estimate


def credit_rows(
    context: BatchContext, rewards: Tensor, mask: Tensor, index: Sequence[Any]
) -> tuple[CreditedBatch, Tensor]:
    """Return the credit of the answers and the (B, T) advantages of verl's rows."""
    rows, conversations = answers(context, rewards, mask, index)
    algorithm, credited = context.algorithm, rows
    if algorithm.overlong == "soft":  # max_tokens limits a row; the last one counts, as for truncation
        assert algorithm.max_tokens is not None and algorithm.overlong_buffer is not None
        last = mask.sum(-1)[conversations.last_row]
        penalty = soft_overlong(last, limit=algorithm.max_tokens, buffer=algorithm.overlong_buffer)
        algorithm, credited = replace(algorithm, overlong="none"), replace(rows, extra=rows.extra + penalty)
    credit = give_credit(algorithm, credited, for_records=context.recorded)
    advantages = conversations.split(credit.advantages, mask.shape[1]).to(rewards.dtype)
    return CreditedBatch(rows, credit, conversations), advantages


def record_rows(
    context: BatchContext, rewards: Tensor, mask: Tensor, index: Sequence[Any], advantages: Tensor
) -> CreditedBatch:
    """Return the answers with the `advantages` of one of verl's own estimators, for metrics and records."""
    rows, conversations = answers(context, rewards, mask, index)
    reward = (rows.outcome + rows.extra)[:, None] * rows.mask
    verls = {"advantages": conversations.join(advantages), "shaped": reward, "extra": rows.extra}
    return CreditedBatch(rows, replace(outcomes(context.algorithm, rows), **verls), conversations)


def answers(context: BatchContext, rewards: Tensor, mask: Tensor, index: Sequence[Any]) -> tuple[Rows, Conversations]:
    """Join rows into answers. Correctness is `acc`, never the reward, which may include penalties.

    If `acc` determines the score, the score is the outcome on another scale (e.g. ±1). If scores differ between answers
    with the same `acc`, they include other rewards (e.g. for the format), and what they add to `acc` is `extra`.
    """
    conversations = Conversations.of(mask, context.keys)
    last = conversations.last_row
    total = rewards.sum(-1)[last]
    acc = total if context.acc is None else context.acc.to(total)[last]
    score = acc if context.score is None else context.score.to(total)[last]
    if any(score[acc == value].std(correction=0) > 1e-6 for value in acc.unique()):
        score = acc
    ids: dict[Any, int] = {}
    group = torch.tensor([ids.setdefault(index[b], len(ids)) for b in last], device=mask.device)
    given = {name: getattr(context, name) for name in SIGNALS}
    joined = {name: None if x is None else conversations.join(x) for name, x in given.items()}
    live = conversations.join(mask)
    return Rows(group=group, mask=live, outcome=acc, extra=total - score, **joined), conversations


# ── the loss, in the workers ────────────────────────────────────────────────────────────────────────────────
#
# The trainer gives every worker `actor_loss` with the algorithm. It runs verl's `ppo_loss`, which adds the KL and
# entropy terms, and in there `policy_loss` (`loss_mode=dew`) calls `algorithm.loss`.
#
# verl's workers average gradients over D data-parallel processes and split a mini-batch into micro-batches. Each part
# is divided by (divisor of the whole mini-batch) / D, so the result does not depend on the split. As in TRL, the token
# count of a mini-batch is its share of the generation's tokens, so a token weighs the same in every optimizer step.
# Rows are verl's rows: an answer of several rows has a sequence ratio for each of them.

TOKENS_PER_ROW = "dew_tokens_per_row"
"""Mean number of live tokens per row of a generation, which the trainer passes to the workers."""


def actor_loss(
    config: Any, model_output: Any, data: Any, dp_group: Any = None, *, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Any]]:
    """Return verl's `ppo_loss` with the algorithm's own policy loss."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    entropy = None
    if algorithm.needs_entropy == "current":  # config.check made sure that verl computes it
        entropy = no_padding_2_padding(model_output["entropy"], data).detach()
    per_row = tu.get_non_tensor_data(data, TOKENS_PER_ROW, None)
    tu.assign_non_tensor_data(data, "batch_num_tokens", per_row * data["global_batch_size"])
    with batch_context(BatchContext(algorithm=algorithm, entropy=entropy)):
        return ppo_loss(config, model_output, data, dp_group)  # type: ignore[no-any-return]


def policy_loss(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str = "",
    config: Any = None, rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """Called by verl for `loss_mode=dew`. The algorithm has its own reduction; `loss_agg_mode` is not used."""
    context = CURRENT.get()
    if context is None:
        what = f"loss_mode={DEW_LOSS}: this trainer does not pass the algorithm to its workers."
        raise EngineError(Problem(what, remedy=SWITCH_ON))
    algorithm, mask = context.algorithm, response_mask.bool()
    part = Part(mask=mask, old_logp=old_log_prob, weight=rollout_is_weights, entropy=context.entropy)
    batch, count = config.global_batch_info, None
    if batch:  # the divisor of the whole mini-batch, divided by D
        tokens, sequences, processes = (batch[key] for key in ("batch_num_tokens", "global_batch_size", "dp_size"))
        count = algorithm.divisor(tokens, sequences) / processes
    value, stats = algorithm.loss(log_prob, part, advantages, count=count)
    return value, _metrics(stats)


def _metrics(stats: dict[str, Tensor]) -> dict[str, float]:
    """Report every metric as `actor/dew/...`, and some also under verl's names. verl averages: maxima are left out."""
    numbers = {name: float(value) for name, value in stats.items() if not name.endswith("/max")}
    return {
        "actor/pg_clipfrac": numbers.get("clip/low", 0.0) + numbers.get("clip/high", 0.0),
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": numbers.get("kl/approx", 0.0),
        **{f"actor/dew/{name}": value for name, value in numbers.items()},
    }
