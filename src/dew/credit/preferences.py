"""Entropy weights for preference pairs: DEW compared along the answer, because a pair has one answer on each side.

The paper (Tan et al. 2025, arXiv:2508.04349) names preference training as future work; the weights are dew's own.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_tokens
from dew.credit.weighting import floored, shaped
from dew.errors import ConfigError, Problem


def preference_weights(
    chosen: Bool[Tensor, "*P G"],
    entropy: Float[Tensor, "*P G T"],
    mask: Bool[Tensor, "*P G T"],
    *,
    alpha: float = 0.25,
    floor: float = 0.01,
) -> Float[Tensor, "*P G T"]:
    """The weight of each token in the sums over log π/π_ref of a preference loss.

        w⁺ₜ = 1 + α · (Hₜ   / mean(H   over the answer) − 1)     in chosen answers
        w⁻ₜ = 1 + α · (Hₜ⁻¹ / mean(H⁻¹ over the answer) − 1)     in rejected answers

    Args:
        chosen: which answers are preferred.
        entropy: Hₜ of the reference policy, in nats. A constant: no gradient flows through it.
        mask: True on tokens of the answer, False on the prompt and on padding.
        alpha: 0 gives every token the weight 1, which is DPO; 1 is the largest without negative weights.
        floor: a smaller H counts as this, so that no single confident token gets all the weight of its answer.

    Returns:
        Weights between 1 − α and 1 − α + α · (number of tokens), on average 1 in every answer; 0 where `mask` is False.
    """
    check_tokens(chosen, entropy, mask)
    if problems := weight_problems(alpha, floor):
        raise ConfigError(problems)
    H = floored(entropy, (floor, float("inf")))
    preferred = chosen.unsqueeze(-1).expand_as(mask)
    return shaped(H, preferred, mask, -1, "arithmetic", 1 - alpha, alpha, "both").abs()


def weight_problems(alpha: float, floor: float) -> list[Problem]:
    """What is wrong with these settings."""
    problems = []
    if not 0 <= alpha <= 1:
        problems.append(Problem(f"alpha={alpha}:", "weights could be negative.", "Give 0 (plain DPO) to 1."))
    if not 0 < floor < float("inf"):
        problems.append(Problem(f"entropy_floor={floor}:", remedy="give nats above 0, such as 0.01."))
    return problems
