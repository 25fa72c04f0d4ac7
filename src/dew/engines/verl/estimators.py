"""verl's advantage estimators: rows in, advantages out, by the algorithm that the trainer carries.

Group, not stride: rows come in any order, of any number per group, with verl's padding rows among them. Padding
rows have an uid of their own and no live token; a group without a live token gets 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dew.engines.credit import Rows, give_credit, judge
from dew.engines.verl.carrying import Carried, Found, carried_for
from dew.engines.verl.conversations import Conversations

Estimator = Callable[..., tuple[Tensor, Tensor]]


def estimator(name: str) -> Estimator:
    """The function that verl calls for `algorithm.adv_estimator=name`."""

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], config: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        carried = carried_for(name, response_mask)
        with torch.no_grad():
            found, advantages = credit_rows(carried, token_level_rewards, response_mask.bool(), index)
        carried.found.append(found)
        return advantages, advantages

    estimate.__name__ = f"{name}_advantages"
    return estimate


def credit_rows(carried: Carried, rewards: Tensor, mask: Tensor, index: Sequence[Any]) -> tuple[Found, Tensor]:
    """What the answers earned, and (B, T) advantages of verl's rows."""
    conversations = Conversations.of(mask, carried.keys)
    rows = answers(carried, conversations, rewards, mask, index)
    credit = give_credit(carried.algorithm, rows)
    advantages = conversations.cut(credit.advantages, mask.shape[1]).to(rewards.dtype)
    return Found(rows, credit, conversations), advantages


def judge_rows(carried: Carried, rewards: Tensor, mask: Tensor, index: Sequence[Any], advantages: Tensor) -> Found:
    """The same for an estimator of verl's own, whose advantages are known: for metrics and records."""
    conversations = Conversations.of(mask, carried.keys)
    rows = answers(carried, conversations, rewards, mask, index)
    reward = (rows.outcome + rows.extra)[:, None] * rows.mask
    credit = replace(
        judge(carried.algorithm, rows), advantages=conversations.join(advantages), shaped=reward, extra=rows.extra
    )
    return Found(rows, credit, conversations)


def answers(
    carried: Carried, conversations: Conversations, rewards: Tensor, mask: Tensor, index: Sequence[Any]
) -> Rows:
    """The rows as answers. Correctness is `acc`, never the reward that penalties have been added to."""
    last = conversations.last_row
    total = rewards.sum(-1)[last]
    acc = total if carried.acc is None else carried.acc.to(total)[last]
    score = acc if carried.score is None else carried.score.to(total)[last]
    ids: dict[Any, int] = {}
    group = torch.tensor([ids.setdefault(index[b], len(ids)) for b in last.tolist()], device=mask.device)
    return Rows(
        group=group,
        mask=conversations.join(mask),
        outcome=acc,
        extra=total - score,
        entropy=None if carried.entropy is None else conversations.join(carried.entropy),
        guided=torch.zeros_like(group, dtype=torch.bool),
    )
