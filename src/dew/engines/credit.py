"""From the rows of a generation to the credit of each of their tokens, on whole groups.

This is the only place where groups are whole. Micro-batches of the loss mix rows of several groups: a group
statistic taken there is silently wrong, and with one row it is exactly zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Every completion of a generation, on all processes."""

    group: Tensor
    """(N,) which group a row belongs to."""
    mask: Tensor
    """(N, T) True on tokens that train."""
    outcome: Tensor
    """(N,) the outcome reward; NaN where it gave none, and the row is left out of its group."""
    extra: Tensor
    """(N,) what the other rewards add."""
    entropy: Tensor | None
    """(N, T) of the policy that sampled."""
    guided: Tensor
    """(N,) True on answers of the guide."""


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What the rows earned. Rows that are left out (no outcome, or a group that trains nothing) have 0 and False."""

    advantages: Tensor
    """(N, T)"""
    shaped: Tensor
    """(N, T) the token rewards before they were compared with the group."""
    extra: Tensor
    """(N,) what was added to the outcome: other rewards and overlong charges."""
    correct: Tensor
    """(N,) True on O⁺."""
    scored: Tensor
    """(N,) True on rows that belong to O⁺ or O⁻."""
    signal: Tensor
    """(N,) True on rows of groups with a correct and a wrong answer."""
    failed: Tensor
    """(N,) True on rows of groups that only the guide solved: a batch of their own."""


def judge(algorithm: Algorithm, rows: Rows) -> Credit:
    """Verdicts alone, by raw correctness: what dynamic sampling keeps. Advantages are 0."""
    return _credit(algorithm, rows, shape=False)


def give_credit(algorithm: Algorithm, rows: Rows) -> Credit:
    """Verdicts and advantages. Groups that only the guide solved are shaped apart from the others."""
    return _credit(algorithm, rows, shape=True)


def _credit(algorithm: Algorithm, rows: Rows, shape: bool) -> Credit:
    scored = ~rows.outcome.isnan() & _in_living_group(rows)
    correct, signal = (torch.zeros_like(scored) for _ in range(2))
    if scored.any():
        index, rollouts = _rollouts(rows, scored)
        verdicts = algorithm.correct(rollouts)
        correct[index] = rollouts.to_rows(verdicts)
        signal[index] = rollouts.to_rows(algorithm.signal(rollouts)[:, None].expand_as(verdicts))
    failed = signal & ~_any_in_group(rows.group, correct & ~rows.guided)
    advantages, shaped = (torch.zeros(rows.mask.shape, device=rows.mask.device) for _ in range(2))
    extra = torch.zeros_like(rows.extra)
    if shape:
        for part in (scored & ~failed, scored & failed):
            if part.any():
                index, rollouts = _rollouts(rows, part)
                advantages[index] = rollouts.to_rows(algorithm.advantages(rollouts)).to(advantages.dtype)
                shaped[index] = rollouts.to_rows(algorithm.rewards(rollouts)).to(shaped.dtype)
                extra[index] = rollouts.to_rows(algorithm.extra(rollouts)).to(extra.dtype)
    return Credit(
        advantages=advantages,
        shaped=shaped,
        extra=extra,
        correct=correct,
        scored=scored,
        signal=signal,
        failed=failed,
    )


def _rollouts(rows: Rows, part: Tensor) -> tuple[Tensor, Rollouts]:
    index = part.nonzero()[:, 0]
    return index, Rollouts.from_rows(
        rows.group[index],
        mask=rows.mask[index],
        reward=rows.outcome[index],
        entropy=None if rows.entropy is None else rows.entropy[index],
        extra=rows.extra[index],
    )


def _in_living_group(rows: Rows) -> Tensor:
    """A group without a scored row that trains has nothing to say."""
    return _any_in_group(rows.group, rows.mask.any(-1) & ~rows.outcome.isnan())


def _any_in_group(group: Tensor, x: Tensor) -> Tensor:
    """(N,) True on the rows of groups in which x is True on some row."""
    counts = torch.zeros(int(group.max()) + 1, dtype=torch.long, device=group.device)
    return counts.index_add(0, group, x.long())[group] > 0
