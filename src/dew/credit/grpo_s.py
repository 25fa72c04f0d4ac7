"""GRPO-S, sequence-level entropy weighting: Tan et al. 2025, arXiv:2508.04349, section 2.3.

Axes: P problems, G answers to one problem, T tokens. O⁺ and O⁻ are the correct and the wrong answers of one problem.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_present, check_shape, check_tokens
from dew.credit.weighting import Average, Pool, Side, floored, mean_over, pooled, shaped, weight_problems
from dew.errors import ConfigError
from dew.ops import at_least_float32


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
    extra: Float[Tensor, "*P G"] | None = None,
) -> Float[Tensor, "*P G"]:
    """Weight each answer's ±1 by its mean entropy relative to answers with the same outcome.

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
    rewards = shaped(x, correct, live, -1, average, beta1, beta2, spread)
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
