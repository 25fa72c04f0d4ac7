"""Metrics of answers, entropy and credit that every engine reports, named as in docs/metrics.md."""

import torch
from torch import Tensor

from dew.credit import forking_mask
from dew.credit.weighting import H_FLOOR
from dew.engines.credit import Credit, Rows

Numbers = dict[str, float]


def entropy_sums(entropy: Tensor, mask: Tensor, correct: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(sum, count) of the entropy over the tokens in `mask`: all, those of O⁺ (correct = 1), of O⁻ (correct = 0)."""
    H = torch.where(mask, entropy.detach(), 0)
    in_correct, in_wrong = mask & (correct == 1)[:, None], mask & (correct == 0)[:, None]
    return {
        "entropy": (H.sum(), mask.sum()),
        "entropy/correct": ((H * in_correct).sum(), in_correct.sum()),
        "entropy/wrong": ((H * in_wrong).sum(), in_wrong.sum()),
        "entropy/floor_share": (((H <= H_FLOOR) & mask).sum(), mask.sum()),
    }


def credit_metrics(rows: Rows, credit: Credit) -> Numbers:
    """How credit is distributed over the tokens of groups with signal."""
    A, mask = credit.advantages, rows.mask & credit.signal[:, None]
    numbers: dict[str, Tensor] = {}
    for name, side in (("correct", credit.correct), ("wrong", ~credit.correct)):
        values = A[mask & side[:, None]]
        if values.numel():
            numbers[f"credit/mean_{name}"] = values.mean()
            numbers[f"credit/std_{name}"] = values.std(correction=0)
    size = torch.where(mask, A.abs(), 0)
    total = size.sum(-1)
    if (total > 0).any():
        numbers["credit/tokens"] = (size[total > 0] > 0).sum(-1).float().mean()
        if credit.flipped is not None:
            numbers["credit/flipped_share"] = credit.flipped.sum() / mask.sum()
        numbers["credit/top1_share"] = (size.amax(-1)[total > 0] / total[total > 0]).mean()
        if rows.entropy is not None:
            top = forking_mask(rows.entropy, mask, keep=0.2)
            numbers["credit/top20_share"] = size[top].sum() / total.sum()
    return _numbers(numbers)


def answer_metrics(answers: dict[str, Tensor], reward_names: list[str], threshold: float) -> Numbers:
    """Rewards, accuracy and lengths over every answer that the policy sampled, dropped groups included."""
    own = ~answers["guided"]
    scored = own & ~answers["outcome"].isnan()
    length, correct = answers["length"].float(), answers["outcome"] > threshold
    numbers: dict[str, Tensor] = {
        "length/mean": length[own].mean(),
        "length/max": length[own].amax(),
        "length/truncated_share": answers["truncated"][own].float().mean(),
    }
    if scored.any():
        numbers["reward"] = (answers["outcome"] + answers["extra"])[scored].mean()
        numbers["accuracy"] = correct[scored].float().mean()
    for i, name in enumerate(reward_names):
        part = answers["parts"][own, i]
        if not part.isnan().all():
            numbers[f"reward/{name}"] = part.nanmean()
    for name, side in (("correct", scored & correct), ("wrong", scored & ~correct)):
        if side.any():
            numbers[f"length/{name}"] = length[side].mean()
    return _numbers(numbers)


def _numbers(tensors: dict[str, Tensor]) -> Numbers:
    """Copies all of them from the device at once."""
    if not tensors:
        return {}
    return dict(zip(tensors, torch.stack([x.float() for x in tensors.values()]).tolist(), strict=True))
