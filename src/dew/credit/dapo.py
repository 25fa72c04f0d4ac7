"""What DAPO adds around the advantage: Yu et al. 2025, arXiv:2503.14476."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dew.checks import check_answers
from dew.errors import ConfigError


def has_signal(correct: Bool[Tensor, "*P G"], present: Bool[Tensor, "*P G"] | None = None) -> Bool[Tensor, "*P"]:
    """0 < n < G: the group has a correct and a wrong answer, so they can be compared (Eq. 8).

    Based on raw correctness: a shaped or summed reward always varies, and filtering on it would keep noise.
    """
    present = check_answers(correct, present)
    return (correct & present).any(-1) & (~correct & present).any(-1)


def soft_overlong(
    lengths: Int[Tensor, "*shape"] | Float[Tensor, "*shape"], *, limit: int, buffer: int
) -> Float[Tensor, "*shape"]:
    """The soft overlong punishment of DAPO, added to an answer's reward (Eq. 13).

    0                            len ≤ limit − buffer
    ((limit − buffer) − len)     in between
        / buffer
    −1                           limit < len
    """
    if not 0 < buffer <= limit:
        raise ConfigError(
            f"soft_overlong with limit={limit}, buffer={buffer}: the penalty grows over `buffer` tokens before "
            "the limit, so 0 < buffer <= limit. DAPO uses 16384 + 4096 = 20480 and 4096."
        )
    dtype = torch.promote_types(lengths.dtype, torch.float32)
    return (((limit - buffer) - lengths.to(dtype)) / buffer).clamp(-1, 0)
