"""From the rows of a generation to an advantage for each of their tokens, on whole groups.

This is the only place where groups are complete. Micro-batches of the loss mix rows of several groups: a group
statistic taken there is silently wrong, and with one row it is exactly zero.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.algorithms import credit as groups
from dew.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What credit reads of every completion of a generation, on all processes."""

    group: Tensor
    """(N,) group id of each row."""
    mask: Tensor
    """(N, T) True on tokens that train."""
    outcome: Tensor
    """(N,) outcome reward; NaN where there is none, which excludes the row from its group."""
    extra: Tensor
    """(N,) sum of the other rewards."""
    entropy: Tensor | None
    """(N, T) entropy of the sampling policy."""
    logp: Tensor | None = None
    """(N, T) log-probability under the sampling policy; for algorithms that need it, and for records."""
    sum_sq: Tensor | None = None
    """(N, T) Σ_v π(v)² of the sampling policy, for algorithms that need it."""
    guided: Tensor
    """(N,) True on answers of the guide."""


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What the rows earned. Excluded rows (no outcome, or a group in which nothing trains) have 0 and False."""

    advantages: Tensor
    """(N, T)"""
    penalty: Tensor | None = None
    """(N, T) coefficient of |log w| in each token's loss, for algorithms that have one."""
    shaped: Tensor | None = None
    """(N, T) token rewards before they are compared with the group; only computed for records."""
    extra: Tensor | None = None
    """(N,) everything added to the outcome: other rewards and overlong penalties; only computed for records."""
    flipped: Tensor | None = None
    """(N, T) tokens whose advantage has the sign opposite to their answer's reward relative to its group."""
    correct: Tensor
    """(N,) True on O⁺."""
    scored: Tensor
    """(N,) True on rows of O⁺ or O⁻."""
    signal: Tensor
    """(N,) True on rows of groups with a correct and a wrong answer."""
    failed: Tensor
    """(N,) True on rows of groups that only the guide solved: a batch of their own."""


def outcomes(algorithm: Algorithm, rows: Rows) -> Credit:
    """Correctness and signal alone, by the outcome reward: what dynamic sampling filters on. Advantages are 0."""
    scored = ~rows.outcome.isnan()
    scored = scored & _any_in_group(rows.group, rows.mask.any(-1) & scored)  # not in a group in which nothing trains
    correct, signal = torch.zeros_like(scored), torch.zeros_like(scored)
    if scored.any():
        index, rollouts = _rollouts(rows, scored)
        is_correct = algorithm.correct(rollouts)
        correct[index] = rollouts.to_rows(is_correct)
        signal[index] = rollouts.to_rows(algorithm.signal(rollouts)[:, None].expand_as(is_correct))
    advantages = torch.zeros(rows.mask.shape, device=rows.mask.device)
    failed = signal & ~_any_in_group(rows.group, correct & ~rows.guided)
    return Credit(advantages=advantages, correct=correct, scored=scored, signal=signal, failed=failed)


def give_credit(algorithm: Algorithm, rows: Rows, *, for_records: bool = False) -> Credit:
    """Correctness and advantages. Groups that only the guide solved are shaped apart from the others.

    `for_records` adds `shaped` and `extra`, which repeats the shaping: ask for it only where a record is written.
    """
    credit = outcomes(algorithm, rows)
    advantages, shaped = credit.advantages, torch.zeros_like(credit.advantages)
    extra, flipped = torch.zeros_like(rows.extra), torch.zeros_like(rows.mask)
    penalty = torch.zeros_like(advantages) if algorithm.penalises else None
    for part in (credit.scored & ~credit.failed, credit.scored & credit.failed):
        if not part.any():
            continue
        index, rollouts = _rollouts(rows, part)
        earned = groups.give_credit(algorithm, rollouts)
        advantages[index] = rollouts.to_rows(earned.advantages).to(advantages.dtype)
        flipped[index] = rollouts.to_rows(earned.flipped)
        if penalty is not None and earned.penalty is not None:
            penalty[index] = rollouts.to_rows(earned.penalty).to(penalty.dtype)
        if for_records:
            shaped[index] = rollouts.to_rows(algorithm.rewards(rollouts)).to(shaped.dtype)
            extra[index] = rollouts.to_rows(earned.extra).to(extra.dtype)
    credit = replace(credit, flipped=flipped, penalty=penalty)
    return replace(credit, shaped=shaped, extra=extra) if for_records else credit


def _rollouts(rows: Rows, part: Tensor) -> tuple[Tensor, Rollouts]:
    """The row numbers of a part, and its rows by group."""
    index, policy = part.nonzero()[:, 0], ("logp", "entropy", "sum_sq")
    fields = {"mask": rows.mask, "reward": rows.outcome, "extra": rows.extra}
    fields |= {name: getattr(rows, name) for name in policy if getattr(rows, name) is not None}
    return index, Rollouts.from_rows(rows.group[index], **{name: x[index] for name, x in fields.items()})


def _any_in_group(group: Tensor, x: Tensor) -> Tensor:
    """(N,) True on the rows of groups in which x is True on some row."""
    counts = torch.zeros(int(group.max()) + 1, dtype=torch.long, device=group.device)
    return counts.index_add(0, group, x.long())[group] > 0
