"""verl's advantage estimators: rows in, advantages out, by the algorithm in the trainer's context.

Rows come in any order, any number per group, with verl's padding rows among them. Padding rows have their own uid and
no live token; a group without a live token gets 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dew.engines.credit import Rows, give_credit, judge
from dew.engines.verl.context import BatchContext, Conversations, CreditedBatch, current_context


def estimator(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function that verl calls for `algorithm.adv_estimator=name`."""

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], config: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        context = current_context(name, response_mask)
        with torch.no_grad():
            batch, advantages = credit_rows(context, token_level_rewards, response_mask.bool(), index)
        context.credited.append(batch)
        return advantages, advantages

    estimate.__name__ = f"{name}_advantages"
    return estimate


def credit_rows(
    context: BatchContext, rewards: Tensor, mask: Tensor, index: Sequence[Any]
) -> tuple[CreditedBatch, Tensor]:
    """The credit of the answers, and (B, T) advantages of verl's rows."""
    conversations = Conversations.of(mask, context.keys)
    rows = answers(context, conversations, rewards, mask, index)
    credit = give_credit(context.algorithm, rows)
    advantages = conversations.split(credit.advantages, mask.shape[1]).to(rewards.dtype)
    return CreditedBatch(rows, credit, conversations), advantages


def record_rows(
    context: BatchContext, rewards: Tensor, mask: Tensor, index: Sequence[Any], advantages: Tensor
) -> CreditedBatch:
    """The same for one of verl's own estimators, whose advantages are given: for metrics and records."""
    conversations = Conversations.of(mask, context.keys)
    rows = answers(context, conversations, rewards, mask, index)
    reward = (rows.outcome + rows.extra)[:, None] * rows.mask
    credit = replace(
        judge(context.algorithm, rows), advantages=conversations.join(advantages), shaped=reward, extra=rows.extra
    )
    return CreditedBatch(rows, credit, conversations)


def answers(
    context: BatchContext, conversations: Conversations, rewards: Tensor, mask: Tensor, index: Sequence[Any]
) -> Rows:
    """The rows as answers. Correctness is `acc`, never the reward that penalties were added to."""
    last = conversations.last_row
    total = rewards.sum(-1)[last]
    acc = total if context.acc is None else context.acc.to(total)[last]
    score = acc if context.score is None else context.score.to(total)[last]
    ids: dict[Any, int] = {}
    group = torch.tensor([ids.setdefault(index[b], len(ids)) for b in last.tolist()], device=mask.device)
    return Rows(
        group=group,
        mask=conversations.join(mask),
        outcome=acc,
        extra=total - score,
        entropy=None if context.entropy is None else conversations.join(context.entropy),
        guided=torch.zeros_like(group, dtype=torch.bool),
    )
