"""Group Relative Overlong Punishment: Tan et al., arXiv:2508.04349 v6, Appendix D."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dew.checks import check_answers, check_shape
from dew.errors import ConfigError
from dew.ops import masked_mean

ROUNDING = 1e-9


def group_overlong(
    lengths: Int[Tensor, "*P G"] | Float[Tensor, "*P G"],
    correct: Bool[Tensor, "*P G"],
    present: Bool[Tensor, "*P G"] | None = None,
    *,
    gamma: float = 0.75,
) -> Float[Tensor, "*P G"]:
    """Penalise answers that are long for their group, except in hard groups.

        easy   n/G ≥ γ       correct answers are penalised, knee L over the correct lengths
        hard   n/G ≤ 1 − γ   no penalty
        else                 knee L over all lengths; for the correct ones if n > m, else for the wrong ones

        L      = max((min + max)/2, mean) of these lengths
        charge = 0 below L,  −½ (len − L)/L on [L, 2L),  −½ from 2L

    n of the group's G answers are correct, m wrong. Correctness is decided before the penalty.
    """
    present = check_answers(correct, present)
    check_shape("lengths", lengths, correct.shape, "answer (*P, G)")
    if not 0.5 <= gamma <= 1:
        what = f"gamma={gamma}: below 0.5 a group would be easy and hard at once."
        raise ConfigError(f"{what} Give 0.5 to 1; the paper uses 0.75.")
    won, lost = correct & present, ~correct & present
    n, m = won.sum(-1, keepdim=True), lost.sum(-1, keepdim=True)
    share = n.double() / (n + m).clamp_min(1)
    easy, hard = share >= gamma - ROUNDING, share <= 1 - gamma + ROUNDING

    length = lengths.to(torch.promote_types(lengths.dtype, torch.float32))
    L = torch.where(easy, _knee(length, won), _knee(length, present))
    charge = -0.5 * ((length - L) / L).clamp(0, 1)
    charged = torch.where(easy | (n > m), won, lost) & (easy | ~hard)
    return torch.where(charged, charge, 0)


def _knee(length: Float[Tensor, "*P G"], over: Bool[Tensor, "*P G"]) -> Float[Tensor, "*P 1"]:
    shortest = torch.where(over, length, torch.inf).amin(-1, keepdim=True)
    longest = torch.where(over, length, -torch.inf).amax(-1, keepdim=True)
    middle = torch.maximum((shortest + longest) / 2, masked_mean(length, over, -1))
    # Without lengths there is no penalty, so any positive knee will do. Empty answers have length 0.
    return torch.where(over.any(-1, keepdim=True), middle, 1).clamp_min(1e-9)
