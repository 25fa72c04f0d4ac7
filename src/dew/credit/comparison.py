"""What a token is compared with, and by which value: the settings `compare` and `value` of GTPO and dew.

Only columns, rows and matrices are in the paper (arXiv:2508.04349). In prose, position t means something different in
every answer; the others compare tokens that play a similar part. Axes: P problems, G answers, T tokens.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dew.errors import ShapeError
from dew.ops import H_FLOOR, PGT, Dims, Ids, MaskPGT, masked_mean, masked_sum, rank_by, same_labels, turn_numbers

Compare = Literal["column", "row", "matrix", "turn", "relative", "step", "step_mean", "context"]
Value = Literal["entropy", "rank", "divergence", "contrast"]
BY_TOKENS = ("step", "step_mean", "context", "divergence", "contrast")
"""Those that read token ids."""
ALONG: dict[str, Dims] = {"column": -2, "row": -1, "matrix": (-2, -1)}
PARTS = 10


def compared(
    H: PGT, won: MaskPGT, mask: MaskPGT, compare: Compare, value: Value, tokens: Ids | None, step_ends: Sequence[int]
) -> tuple[PGT, Dims | Ids]:
    """x of each token, and what it is compared with: the tokens of its polarity along these dims, or of the same label.

    column      the same position across answers (published)
    row         the same answer
    matrix      the whole group
    turn        the same turn, the k-th of each answer; a turn is a run of True in `mask`, ended by tool output
    relative    the same tenth of each answer
    step        the k-th token of the j-th step; a step ends with one of the tokens `step_ends`, e.g. a line break
    step_mean   the j-th step of each answer, where every token has the mean entropy of its step
    context     the tokens after the same two tokens, wherever they are in the group; those whose two are unique, after
                the same one; the rest with each other

    entropy      x = H on O⁺ and 1/H on O⁻ (published)
    rank         the rank of that among the tokens it is compared with: a weight is then below 2
    divergence   1 from the first token on that no answer of the other outcome has after the same beginning, else 0
    contrast     share of the answers with its own outcome that contain the token after the same token, minus the share
                 of the others that do; at least 0
    """
    over: Dims | Tensor
    if compare in ALONG:
        over = ALONG[compare]
    elif compare == "turn":
        over = same_labels(turn_numbers(mask))
    elif compare == "relative":
        over = same_labels(PARTS * _place(mask) // mask.sum(-1, keepdim=True).clamp_min(1))
    elif compare == "context":
        over = _context(won, mask, _given(tokens))
    else:
        step, place = _steps(mask, _given(tokens), step_ends)
        over = same_labels(step, place) if compare == "step" else same_labels(step)
        if compare == "step_mean":
            H = masked_mean(H, mask, same_labels(_answer(mask), step))

    if value in ("divergence", "contrast"):
        found = _divergence if value == "divergence" else _contrast
        return found(won, mask, _given(tokens)).to(H.dtype).clamp_min(H_FLOOR), over
    x = torch.where(won, H, 1 / H)
    if value == "entropy":
        return x, over
    label = {"row": _answer(mask), "column": torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)}
    by = over if isinstance(over, Tensor) else label.get(compare, torch.zeros_like(mask))
    return rank_by(x, mask, same_labels(won, by)), over


def _given(tokens: Tensor | None) -> Tensor:
    if tokens is None:
        raise ShapeError("this comparison reads the token ids: pass tokens=(*P, G, T).")
    return tokens


def _answer(mask: Tensor) -> Tensor:
    """The number of each token's answer within its group."""
    return torch.arange(mask.shape[-2], device=mask.device)[:, None].expand(mask.shape)


def _place(mask: Tensor) -> Tensor:
    """How many live tokens of the answer come before."""
    return mask.cumsum(-1) - mask.long()


def _previous(tokens: Tensor, mask: Tensor) -> Tensor:
    """The token before, −1 if the policy did not write it."""
    before = torch.where(mask, tokens, -1)[..., :-1]
    return torch.nn.functional.pad(before, (1, 0), value=-1)


def _steps(mask: Tensor, tokens: Tensor, step_ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The step of each token, and its place in it, both from 0."""
    ends = mask & torch.isin(tokens, torch.tensor(step_ends, device=tokens.device))
    step, place = ends.cumsum(-1) - ends.long(), _place(mask)
    first = torch.nn.functional.pad(ends, (1, 0))[..., :-1]
    return step, place - torch.where(first, place, 0).cummax(-1).values


def _context(won: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    one = _previous(tokens, mask)
    two = _previous(one, mask)
    level, label = torch.zeros_like(one), torch.zeros_like(one)
    for length, keys in enumerate([(one,), (one, two)], start=1):
        same = same_labels(won, *keys)
        shared = masked_sum(torch.ones_like(same), mask, same) > 1
        level, label = torch.where(shared, length, level), torch.where(shared, same, label)
    return same_labels(level, label)


def _divergence(won: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    at = torch.arange(mask.shape[-1], device=mask.device)
    shared = torch.zeros_like(tokens[..., :1])
    for i in range(mask.shape[-2]):
        one, live = tokens[..., i : i + 1, :], mask[..., i : i + 1, :]
        differs = (mask != live) | (mask & (tokens != one))
        common = torch.where(differs, at, len(at)).amin(-1, keepdim=True)
        shared = torch.where(won[..., :1] != won[..., i : i + 1, :1], shared.maximum(common), shared)
    return at >= shared


def _contrast(won: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    pair = same_labels(_previous(tokens, mask), tokens)
    repeats = masked_sum(torch.ones_like(pair), mask, same_labels(_answer(mask), pair))
    won_share, lost_share = (
        masked_sum(1 / repeats.clamp_min(1), side, pair) / side.any(-1).sum(-1).clamp_min(1)[..., None, None]
        for side in (mask & won, mask & ~won)
    )
    return torch.where(won, won_share - lost_share, lost_share - won_share).clamp_min(0)
