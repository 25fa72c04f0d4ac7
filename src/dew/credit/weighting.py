"""Dynamic Entropy Weighting: what GTPO and GRPO-S share. Tan et al. 2025, arXiv:2508.04349, section 2.

The idea of both: a weight is a value divided by the mean of the values that it is compared with. The value is
H on O⁺ (correct answers) and 1/H on O⁻ (wrong ones), so the weight is large where a correct answer was
uncertain and where a wrong answer was confident.
"""

from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_choice, unmet
from dew.errors import ConfigError
from dew.ops import Dims, at_least_float32, masked_mean, masked_mean_by, masked_sum, masked_sum_by, standardize

Average = Literal["arithmetic", "geometric"]
Pool = Literal["group", "joint", "sign"]
Side = Literal["both", "correct", "wrong"]

H_FLOOR = 1e-6
"""Minimum entropy. Below it 1/H explodes and a single confident token gets all the penalty."""


def floored(entropy: Float[Tensor, "*shape"], clip: tuple[float, float] | None) -> Float[Tensor, "*shape"]:
    """H clamped to `clip` if set, and at least 1e-6, so that 1/H is finite even if `clip` starts at 0. Detached."""
    if problems := clip_problems(clip):
        raise ConfigError(problems)
    H = at_least_float32(entropy)
    return (H if clip is None else H.clamp(*clip)).clamp_min(H_FLOOR)


def clip_problems(clip: Any) -> list[str]:
    """What is wrong with entropy_clip."""
    numbers = isinstance(clip, tuple | list) and all(isinstance(x, int | float) for x in clip)
    if clip is None or (numbers and len(clip) == 2 and 0 <= clip[0] <= clip[1]):
        return []
    return [f"entropy_clip={clip}: give (low, high) in nats with 0 <= low <= high, or leave it out."]


def weight_problems(**weights: float) -> list[str]:
    """What is wrong with α₁ and α₂, or β₁ and β₂."""
    return [
        f"{name}={value}: a wrong answer would be rewarded{' for being sure' if name.endswith('2') else ''}. "
        f"The paper uses {'0.1' if name.endswith('2') else '1.0'}; 0 turns this part off. Give a number >= 0."
        for name, value in weights.items()
        if not 0 <= value < float("inf")
    ]


def mean_over(
    x: Float[Tensor, "*shape"], alive: Bool[Tensor, "*shape"], over: Dims | Tensor, average: Average
) -> Float[Tensor, "..."]:
    """The arithmetic or geometric mean of x > 0 over the entries where `alive` is True: along dims, or by label."""
    check_choice("average", average, get_args(Average))
    values = x.log() if average == "geometric" else x
    mean = masked_mean_by(values, alive, over) if isinstance(over, Tensor) else masked_mean(values, alive, over)
    return mean.exp() if average == "geometric" else mean


def shaped(
    x: Float[Tensor, "*shape"],
    correct: Bool[Tensor, "*shape"],
    live: Bool[Tensor, "*shape"],
    over: Dims | Tensor,
    average: Average,
    alpha1: float,
    alpha2: float,
    spread: Side,
    shrink: float,
    cap: float | None,
    least: int,
) -> Float[Tensor, "*shape"]:
    """r̃ = ±(α₁ + α₂ · w), w = x / mean(x over its comparison set), + on O⁺ and − on O⁻; 0 where not live.

    The comparison set is what is live and of the same polarity along the dims `over`, or has the same label `over`. The
    paper writes the weight as xᵢ / Σₖ xₖ · #alive. On a side that `spread` leaves out, every weight is 1.

    With n values in the comparison set, w becomes 1 + (w − 1) · n / (n + shrink), 1 if n < least, and at most `cap`.
    """
    check_choice("spread", spread, get_args(Side))
    if problems := bound_problems(shrink, cap, least):
        raise ConfigError(problems)
    mean_won, mean_lost = (mean_over(x, live & side, over, average) for side in (correct, ~correct))
    weight = x / torch.where(correct, mean_won, mean_lost)
    if shrink or least > 1:
        n_won, n_lost = (_count(x, live & side, over) for side in (correct, ~correct))
        n = torch.where(correct, n_won, n_lost)
        weight = torch.where(n >= least, 1 + (weight - 1) * (n / (n + shrink)).to(x.dtype), 1)
    if spread != "both":
        weight = torch.where(correct == (spread == "correct"), weight, 1)
    r = alpha1 + alpha2 * (weight if cap is None else weight.clamp_max(cap))
    return torch.where(live, torch.where(correct, r, -r), 0)


def _count(x: Tensor, alive: Tensor, over: Dims | Tensor) -> Tensor:
    ones = torch.ones_like(x)
    return masked_sum_by(ones, alive, over) if isinstance(over, Tensor) else masked_sum(ones, alive, over)


def bound_problems(shrink: float, cap: float | None, least: int) -> list[str]:
    """What is wrong with the settings that bound a weight."""
    return unmet(
        (0 <= shrink < float("inf"), f"shrink={shrink}: weights would move away from 1. Give >= 0; 0 turns it off."),
        (cap is None or cap >= 1, f"cap={cap}: a weight of 1 is the mean. Give at least 1."),
        (least >= 1, f"least={least}: a comparison has at least one value. Give at least 1."),
    )


def pooled(
    rewards: Float[Tensor, "*shape"], won: Bool[Tensor, "*shape"], lost: Bool[Tensor, "*shape"], dim: Dims, pool: Pool
) -> Float[Tensor, "*shape"]:
    """A = (r̃ − mean) / (std + 1e-4) (Eq. 6), once for O⁺ and once for O⁻. `pool` sets what mean and std are taken over:

    group   ALL entries of the group, where those of the other polarity count as 0
    joint   one mean and std over the signed rewards of the whole group
    sign    only the entries of the same polarity: each side has mean 0, so the difference between correct and
            wrong is lost. For comparison only; it unlearns the task.
    """
    check_choice("pool", pool, get_args(Pool))
    live = won | lost
    if pool == "joint":
        return standardize(rewards, live, dim)
    positive = standardize(torch.where(won, rewards, 0), live if pool == "group" else won, dim)
    negative = standardize(torch.where(lost, rewards, 0), live if pool == "group" else lost, dim)
    return torch.where(won, positive, negative)
