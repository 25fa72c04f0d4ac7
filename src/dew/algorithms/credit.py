"""The credit of whole groups, computed once per generation by every engine.

Only here are groups complete. Micro-batches of the loss mix rows of several groups, so a group statistic computed there
would be silently wrong and, with one row, exactly zero.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dew.algorithms.base import SIGNALS, Algorithm
from dew.credit import wrong_sign
from dew.errors import Problem, ShapeError, unknown, user_line
from dew.ops import at_least_float32
from dew.rollouts import Rollouts

DIVISION = "Look for a division by 0, e.g. by the standard deviation of a group with equal rewards."
"""What to do about credit that is NaN."""


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The credit of P groups of G answers."""

    correct: Tensor
    """(P, G) True on O⁺."""
    signal: Tensor
    """(P,) True on groups that dynamic sampling keeps: by default those with a correct and a wrong answer."""
    extra: Tensor
    """(P, G) everything added to the outcome: other rewards and overlong penalties."""
    advantages: Tensor
    """(P, G, T), 0 where the mask is False."""
    penalty: Tensor | None = None
    """(P, G, T) coefficient of |log w| in each token's loss, for algorithms that have one."""
    flipped: Tensor | None = None
    """(P, G, T) True on tokens whose advantage has the opposite sign to their answer's reward relative to its group."""


def give_credit(algorithm: Algorithm, rollouts: Rollouts) -> Credit:
    """Compute the credit of any algorithm, a user's included, with its advantages checked."""
    advantages, extra = advantages_of(algorithm, rollouts), algorithm.extra(rollouts)
    return Credit(
        correct=algorithm.correct(rollouts),
        signal=algorithm.signal(rollouts),
        extra=extra,
        advantages=advantages,
        penalty=algorithm.penalties(rollouts, advantages) if algorithm.penalises else None,
        flipped=wrong_sign(advantages, rollouts.reward + extra, rollouts.present) & rollouts.mask,
    )


def advantages_of(algorithm: Algorithm, rollouts: Rollouts) -> Tensor:
    """(P, G, T) `algorithm.advantages(rollouts)`, checked, float32 or wider, 0 where not live; permuted if placebo."""
    name, mask = algorithm.name, rollouts.mask
    # Copies, because a rule may write to them, without what an engine has only at steps with a token record.
    hidden = SIGNALS.keys() - set(algorithm.signals)
    given = {key: x.clone() for key, x in vars(rollouts).items() if x is not None and key not in hidden}
    rollouts = Rollouts(**given)
    try:
        A = algorithm.advantages(rollouts)
    except (TypeError, AttributeError) as error:
        if isinstance(error, AttributeError) and error.obj is rollouts:
            what = f"{name}: rollouts has no {error.name!r}{user_line(error)}."
            raise ShapeError(unknown(what, str(error.name), [f.name for f in fields(rollouts)])) from error
        if "NoneType" not in str(error):
            raise
        missing = ", ".join(x for x in SIGNALS if getattr(rollouts, x) is None)
        why = f"The class does not ask for these fields of rollouts, so they are None: {missing}."
        remedy = 'Write needs_entropy = "old", or needs_logp, needs_sum_sq or needs_tokens = True.'
        raise ShapeError(Problem(f"{name}: {error}{user_line(error)}.", why, remedy)) from error
    if not isinstance(A, Tensor) or A.shape != mask.shape:
        got = f"shape {tuple(A.shape)}" if isinstance(A, Tensor) else f"{type(A).__name__}, not a tensor"
        what = f"{name}: advantages(rollouts) returned {got}; expected (P, G, T) = {tuple(mask.shape)}."
        remedy = "For one value per answer, return A[..., None] * rollouts.mask with A of shape (P, G)."
        raise ShapeError(Problem(what, remedy=remedy))
    A = torch.where(mask, at_least_float32(A), 0)
    return permuted(A, mask) if algorithm.placebo else A


def permuted(x: Tensor, mask: Tensor) -> Tensor:
    """(P, G, T) x with the values at the live tokens of each answer permuted, in an order that depends on the mask."""
    place = torch.arange(1, mask.numel() + 1, device=mask.device).view(mask.shape)
    random = torch.Generator(mask.device).manual_seed(int((place * mask).sum()) % 2**31)
    keys = torch.rand(mask.shape, generator=random, device=mask.device) + 2 * ~mask  # live tokens come first
    live = (~mask).int().argsort(dim=-1, stable=True)
    return torch.where(mask, torch.zeros_like(x).scatter(-1, live, x.gather(-1, keys.argsort(-1))), 0)
