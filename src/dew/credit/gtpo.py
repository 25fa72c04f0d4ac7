"""GTPO, Group Token Policy Optimization, and its sequence-level form GRPO-S: Tan et al. 2025, arXiv:2508.04349.

In both, a weight is a value divided by the mean of the values that it is compared with. The value is H on O⁺ (correct
answers) and 1/H on O⁻ (wrong answers), so the weight is large where a correct answer was uncertain and where a wrong
answer was confident.

Axes: P problems, G answers to each, T tokens. O⁺ and O⁻ are the correct and the wrong answers to one problem; an answer
is "alive at t" if it has a token at t.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dew.checks import (
    check_by_token,
    check_choice,
    check_finite,
    check_present,
    check_shape,
    check_start,
    check_tokens,
    check_verdicts,
)
from dew.errors import ConfigError
from dew.ops import (
    H_FLOOR,
    PG,
    PGT,
    Dims,
    Ids,
    MaskPG,
    MaskPGT,
    at_least_float32,
    masked_mean,
    same_labels,
    standardize,
    turn_numbers,
)

Compare = Literal["column", "row", "matrix", "turn", "relative"]
Average = Literal["arithmetic", "geometric"]
Pool = Literal["group", "joint", "sign"]
Side = Literal["both", "correct", "wrong"]


def gtpo_rewards(
    correct: MaskPG, entropy: PGT, mask: MaskPGT, *, alpha1: float = 1.0, alpha2: float = 0.1,
    compare: Compare = "column", average: Average = "arithmetic", entropy_clip: tuple[float, float] | None = None,
    spread: Side = "both", extra: PG | None = None,
) -> PGT:  # fmt: skip
    """Distribute each answer's ±1 over its tokens by the entropy of the policy that sampled them (section 2.2).

        r̃⁺ᵢₜ = +α₁ + α₂ ·  Hᵢₜ    / mean(H   over O⁺ alive at t)     (Eq. 3)
        r̃⁻ⱼₜ = −α₁ − α₂ · (1/Hⱼₜ) / mean(1/H over O⁻ alive at t)     (Eq. 5)

    In a correct answer, uncertain tokens get the largest reward; in a wrong one, confident tokens get the largest
    penalty.

    Args:
        correct: the verifier's verdict on each answer.
        entropy: Hᵢₜ of the sampling policy, in nats. A constant: no gradient flows through it.
        mask: True on tokens the policy sampled, end-of-sequence token included; False on padding and on tool output.
        alpha1: weight of the plain outcome.
        alpha2: weight of the part distributed by entropy.
        compare: the tokens of its polarity that a token is compared with; see `compared_with`.
        average: "geometric" takes the comparison set's geometric mean (v6, Appendix C).
        entropy_clip: clamps H to (low, high) first. Off in the equations.
        spread: the side whose credit is distributed by entropy; on the other side every weight is 1.
        extra: added to ±α₁ of each answer, e.g. an overlong penalty (v6, Appendix D).

    Returns:
        Signed token rewards, 0 where `mask` is False. With the defaults they sum, at every t, to (α₁ + α₂) · dₜ
        over O⁺ (Prop. 2.2) and to −(α₁ + α₂) · hₜ over O⁻, where dₜ and hₜ answers are alive.
    """
    mask = check_tokens(correct, entropy, mask)
    check_choice("compare", compare, get_args(Compare))
    if problems := weight_problems(alpha1=alpha1, alpha2=alpha2):
        raise ConfigError(problems)
    if compare == "column":
        check_start(mask)

    H = floored(entropy, entropy_clip)
    won = correct.unsqueeze(-1).expand_as(mask)
    x = torch.where(won, H, 1 / H)
    rewards = shaped(x, won, mask, compared_with(compare, mask), average, alpha1, alpha2, spread)
    if extra is None:
        return rewards
    check_shape("extra", extra, correct.shape, "answer (*P, G)")
    return rewards + torch.where(mask, at_least_float32(extra).unsqueeze(-1), 0)


def compared_with(compare: Compare, mask: MaskPGT) -> Dims | Ids:
    """A token's comparison set, as dims or labels: the tokens of its polarity along these dims, or with its label.

    column     the same position across answers (published)
    row        the same answer
    matrix     the whole group
    turn       the same turn, the k-th of each answer; a turn is a run of True in `mask`, ended by tool output
    relative   the same tenth of each answer; like "turn", not in the paper
    """
    along: dict[str, Dims] = {"column": -2, "row": -1, "matrix": (-2, -1)}
    if compare in along:
        return along[compare]
    if compare == "turn":
        return same_labels(turn_numbers(mask))
    before = mask.cumsum(-1) - mask.long()
    return same_labels(10 * before // mask.sum(-1, keepdim=True).clamp_min(1))


def gtpo_advantages(rewards: PGT, mask: MaskPGT, *, pool: Pool = "group", correct: MaskPG | None = None) -> PGT:
    """Standardise r̃⁺ and r̃⁻ over the group's tokens (Eq. 6). See `pooled` for `pool`.

    A token's polarity is the sign of its reward. Pass `correct` if an `extra` may have flipped that sign. In a group
    with a single outcome the result is entropy noise: multiply by
    `has_signal(correct, mask.any(-1))[..., None, None]`.
    """
    mask = check_by_token(mask, rewards=rewards)
    check_finite("reward", rewards, mask)
    if correct is not None:
        check_shape("correct", correct, mask.shape[:-1], "answer (*P, G)")
        correct = correct.unsqueeze(-1)
    return pooled(rewards, mask, correct, (-2, -1), pool)


def grpo_s_rewards(
    correct: MaskPG, entropy: PGT, mask: MaskPGT, *, beta1: float = 1.0, beta2: float = 0.1,
    average: Average = "arithmetic", entropy_clip: tuple[float, float] | None = None, spread: Side = "both",
    extra: PG | None = None,
) -> PG:  # fmt: skip
    """Weight each answer's ±1 by its mean entropy relative to answers with the same outcome (section 2.3).

        Ĥᵢ  = meanₜ Hᵢₜ
        r̂⁺ᵢ = +β₁ + β₂ ·  Ĥᵢ    / mean(Ĥ   over O⁺)     (Eq. 9)
        r̂⁻ⱼ = −β₁ − β₂ · (1/Ĥⱼ) / mean(1/Ĥ over O⁻)     (Eq. 10)

    `average="geometric"` makes both means geometric (v6, Appendix C). An answer without live tokens is excluded from
    the group and gets 0. The other arguments are as in `gtpo_rewards`.
    """
    mask = check_tokens(correct, entropy, mask)
    if problems := weight_problems(beta1=beta1, beta2=beta2):
        raise ConfigError(problems)

    live = mask.any(-1)
    H = mean_over(floored(entropy, entropy_clip), mask, -1, average).squeeze(-1)
    H = torch.where(live, H, 1)
    x = torch.where(correct, H, 1 / H)
    rewards = shaped(x, correct, live, -1, average, beta1, beta2, spread)
    if extra is None:
        return rewards
    check_shape("extra", extra, correct.shape, "answer (*P, G)")
    return rewards + torch.where(live, at_least_float32(extra), 0)


def grpo_s_advantages(
    rewards: PG, present: MaskPG | None = None, *, pool: Pool = "group", correct: MaskPG | None = None
) -> PG:
    """Standardise r̂⁺ and r̂⁻ over the group's answers. See `pooled` for `pool`.

    An answer's polarity is the sign of its reward. Pass `correct` if an `extra` may have flipped that sign. In a group
    with a single outcome the result is entropy noise: multiply by `has_signal(correct, present)[..., None]`. If an
    answer may have no live token, pass `present=mask.any(-1)`.
    """
    present = check_present(rewards, present)
    if correct is not None:
        check_shape("correct", correct, rewards.shape, "answer (*P, G)")
    return pooled(rewards, present, correct, -1, pool)


# ── shared by both (section 2) ──────────────────────────────────────────────────────────────────────────────
def floored(entropy: Tensor, clip: tuple[float, float] | None) -> Tensor:
    """H, detached, clamped to `clip` if set and to at least 1e-6, so that 1/H is finite even if `clip` starts at 0."""
    if problems := clip_problems(clip):
        raise ConfigError(problems)
    H = at_least_float32(entropy)
    return (H if clip is None else H.clamp(*clip)).clamp_min(H_FLOOR)


def clip_problems(clip: Any) -> list[str]:
    """Problems with `entropy_clip`; empty if it is valid."""
    numbers = isinstance(clip, tuple | list) and all(isinstance(x, int | float) for x in clip)
    if clip is None or (numbers and len(clip) == 2 and 0 <= clip[0] <= clip[1]):
        return []
    return [f"entropy_clip={clip}: give (low, high) in nats with 0 <= low <= high, or leave it out."]


def weight_problems(**weights: float) -> list[str]:
    """Problems with α₁ and α₂, or β₁ and β₂; empty if they are valid."""
    return [
        f"{name}={value}: a wrong answer would be rewarded{' for being sure' if name.endswith('2') else ''}. "
        f"The paper uses {'0.1' if name.endswith('2') else '1.0'}; 0 turns this part off. Give a number >= 0."
        for name, value in weights.items()
        if not 0 <= value < float("inf")
    ]


def mean_over(x: Tensor, alive: Tensor, over: Dims | Tensor, average: Average) -> Tensor:
    """The arithmetic or geometric mean of x > 0 over the entries where `alive` is True: along dims, or by label."""
    check_choice("average", average, get_args(Average))
    values = x.log() if average == "geometric" else x
    mean = masked_mean(values, alive, over)
    return mean.exp() if average == "geometric" else mean


def shaped(
    x: Tensor, correct: Tensor, live: Tensor, over: Dims | Tensor, average: Average, alpha1: float, alpha2: float,
    spread: Side,
) -> Tensor:  # fmt: skip
    """r̃ = ±(α₁ + α₂ · w), w = x / mean(x over its comparison set), + on O⁺ and − on O⁻; 0 where not live.

    The comparison set is the live entries of the same polarity along the dims `over`, or with the same label in `over`.
    The paper writes the weight as xᵢ / Σₖ xₖ · #alive. On a side that `spread` leaves out, every weight is 1.
    """
    check_choice("spread", spread, get_args(Side))
    mean_won, mean_lost = (mean_over(x, live & side, over, average) for side in (correct, ~correct))
    weight = x / torch.where(correct, mean_won, mean_lost)
    if spread != "both":
        weight = torch.where(correct == (spread == "correct"), weight, 1)
    r = alpha1 + alpha2 * weight
    return torch.where(live, torch.where(correct, r, -r), 0)


def pooled(rewards: Tensor, live: Tensor, correct: Tensor | None, dim: Dims, pool: Pool) -> Tensor:
    """A = (r̃ − mean) / (std + 1e-4) (Eq. 6), separately for O⁺ and O⁻. `pool`: what mean and std are taken over:

    group   ALL entries of the group, with those of the other polarity counted as 0
    joint   one mean and std over the signed rewards of the whole group
    sign    only the entries of the same polarity: each side has mean 0, so the difference between correct and
            wrong is lost. For comparison only; it unlearns the task.
    """
    check_choice("pool", pool, get_args(Pool))
    if correct is not None:
        check_verdicts(correct)
    r = torch.where(live, at_least_float32(rewards), 0)
    if pool == "joint":
        return standardize(r, live, dim)
    won = r > 0 if correct is None else correct & live
    lost = live & ~won
    positive = standardize(torch.where(won, r, 0), live if pool == "group" else won, dim)
    negative = standardize(torch.where(lost, r, 0), live if pool == "group" else lost, dim)
    return torch.where(won, positive, negative)
