"""GTPO, Group Token Policy Optimization, and its sequence-level form GRPO-S: Tan et al. 2025, arXiv:2508.04349.

Axes: P problems, G answers to one problem, T tokens. O⁺ and O⁻ are the correct and the wrong answers of one
problem; "alive at t" means having a token at t.
"""

from collections.abc import Sequence
from typing import get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dew.checks import check_by_token, check_choice, check_present, check_shape, check_tokens
from dew.credit.comparison import Compare, Value, compared
from dew.credit.weighting import Average, Pool, Side, floored, mean_over, pooled, shaped, weight_problems
from dew.errors import ConfigError
from dew.ops import at_least_float32


def gtpo_rewards(
    correct: Bool[Tensor, "*P G"],
    entropy: Float[Tensor, "*P G T"],
    mask: Bool[Tensor, "*P G T"],
    *,
    alpha1: float = 1.0,
    alpha2: float = 0.1,
    compare: Compare = "column",
    average: Average = "arithmetic",
    entropy_clip: tuple[float, float] | None = None,
    spread: Side = "both",
    value: Value = "entropy",
    tokens: Int[Tensor, "*P G T"] | None = None,
    step_ends: Sequence[int] = (),
    shrink: float = 0.0,
    cap: float | None = None,
    least: int = 1,
    extra: Float[Tensor, "*P G"] | None = None,
) -> Float[Tensor, "*P G T"]:
    """Distribute each answer's ±1 over its tokens by the entropy of the policy that sampled them (section 2.2).

        r̃⁺ᵢₜ = +α₁ + α₂ ·  Hᵢₜ    / mean(H   over O⁺ alive at t)     (Eq. 3)
        r̃⁻ⱼₜ = −α₁ − α₂ · (1/Hⱼₜ) / mean(1/H over O⁻ alive at t)     (Eq. 5)

    So in a correct answer the uncertain tokens get the largest reward, in a wrong one the confident tokens the
    largest penalty.

    Args:
        correct: the verifier's verdict on each answer.
        entropy: Hᵢₜ of the sampling policy, in nats. A constant: no gradient flows through it.
        mask: True on tokens the policy sampled, False on padding and on tool output.
        alpha1: weight of the plain outcome.
        alpha2: weight of the part distributed by entropy.
        compare: the tokens of one polarity that a token is compared with, "column" (the same position across answers)
            as published; `dew.credit.comparison.compared` documents it, and `value`, `tokens` and `step_ends`.
        average: "geometric" takes the comparison set's geometric mean (v6, Appendix C).
        entropy_clip: clamps H to (low, high) first. Off in the equations.
        spread: the side whose credit is distributed by entropy; on the other side every weight is 1.
        shrink: bounds the weights, as do `cap` and `least` (`dew.credit.weighting.shaped`). Off in the equations.
        extra: added to ±α₁ of each answer, e.g. an overlong penalty (v6, Appendix D).

    Returns:
        Signed token rewards, 0 where `mask` is False. With the defaults they sum, at every t, to
        (α₁ + α₂) · dₜ over O⁺ (Prop. 2.2) and to −(α₁ + α₂) · hₜ over O⁻, with dₜ and hₜ those alive.
    """
    mask = check_tokens(correct, entropy, mask)
    check_choice("compare", compare, get_args(Compare))
    check_choice("value", value, get_args(Value))
    if tokens is not None:
        check_by_token(mask, tokens=tokens)
    if problems := weight_problems(alpha1=alpha1, alpha2=alpha2):
        raise ConfigError(problems)

    H = floored(entropy, entropy_clip)
    won = correct.unsqueeze(-1).expand_as(mask)
    x, over = compared(H, won, mask, compare, value, tokens, step_ends)
    rewards = shaped(x, won, mask, over, average, alpha1, alpha2, spread, shrink, cap, least)
    if extra is None:
        return rewards
    check_shape("extra", extra, correct.shape, "answer (*P, G)")
    return rewards + torch.where(mask, at_least_float32(extra).unsqueeze(-1), 0)


def gtpo_advantages(
    rewards: Float[Tensor, "*P G T"],
    mask: Bool[Tensor, "*P G T"],
    *,
    pool: Pool = "group",
    correct: Bool[Tensor, "*P G"] | None = None,
) -> Float[Tensor, "*P G T"]:
    """Standardise r̃⁺ and r̃⁻ over the group's tokens (Eq. 6); `dew.credit.weighting.pooled` documents `pool`.

    The polarity of a token is the sign of its reward; pass `correct` if an `extra` may have flipped it.
    """
    mask = check_by_token(mask, rewards=rewards)
    r = torch.where(mask, at_least_float32(rewards), 0)
    if correct is None:
        won = r > 0
    else:
        check_shape("correct", correct, r.shape[:-1], "answer (*P, G)")
        won = correct.unsqueeze(-1) & mask
    return pooled(r, won, mask & ~won, (-2, -1), pool)


def grpo_s_rewards(
    correct: Bool[Tensor, "*P G"],
    entropy: Float[Tensor, "*P G T"],
    mask: Bool[Tensor, "*P G T"],
    *,
    beta1: float = 1.0,
    beta2: float = 0.1,
    average: Average = "arithmetic",
    entropy_clip: tuple[float, float] | None = None,
    spread: Side = "both",
    shrink: float = 0.0,
    cap: float | None = None,
    least: int = 1,
    extra: Float[Tensor, "*P G"] | None = None,
) -> Float[Tensor, "*P G"]:
    """Weight each answer's ±1 by its mean entropy relative to answers with the same outcome (section 2.3).

        Ĥᵢ  = meanₜ Hᵢₜ
        r̂⁺ᵢ = +β₁ + β₂ ·  Ĥᵢ    / mean(Ĥ   over O⁺)     (Eq. 9)
        r̂⁻ⱼ = −β₁ − β₂ · (1/Ĥⱼ) / mean(1/Ĥ over O⁻)     (Eq. 10)

    `average="geometric"` takes both means geometrically (v6, Appendix C). An answer without live tokens is
    excluded from the group and gets 0. The other arguments are those of `gtpo_rewards`.
    """
    mask = check_tokens(correct, entropy, mask)
    if problems := weight_problems(beta1=beta1, beta2=beta2):
        raise ConfigError(problems)

    live = mask.any(-1)
    H = mean_over(floored(entropy, entropy_clip), mask, -1, average).squeeze(-1)
    H = torch.where(live, H, 1)
    x = torch.where(correct, H, 1 / H)
    rewards = shaped(x, correct, live, -1, average, beta1, beta2, spread, shrink, cap, least)
    if extra is None:
        return rewards
    check_shape("extra", extra, correct.shape, "answer (*P, G)")
    return rewards + torch.where(live, at_least_float32(extra), 0)


def grpo_s_advantages(
    rewards: Float[Tensor, "*P G"],
    present: Bool[Tensor, "*P G"] | None = None,
    *,
    pool: Pool = "group",
    correct: Bool[Tensor, "*P G"] | None = None,
) -> Float[Tensor, "*P G"]:
    """Standardise r̂⁺ and r̂⁻ over the group's answers; `dew.credit.weighting.pooled` documents `pool`.

    The polarity of an answer is the sign of its reward; pass `correct` if an `extra` may have flipped it.
    """
    present = check_present(rewards, present)
    r = torch.where(present, at_least_float32(rewards), 0)
    if correct is None:
        won = r > 0
    else:
        check_shape("correct", correct, r.shape, "answer (*P, G)")
        won = correct & present
    return pooled(r, won, present & ~won, -1, pool)
