"""Micro-batches with little padding: by their number of tokens, answers of similar length together.

    prompts left-padded, answers right-padded (TRL)        aligned
    . . p p | a a a .                                      p p a a a .
    p p p p | a . . .                                      p p p p a .

Aligned rows need no attention mask: what follows the end of a row does not reach back in a causal model.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dew.engines.recorder import Columns
from dew.engines.trl.batch import loss_mask


def token_parts(lengths: list[int], budget: int) -> list[list[int]]:
    """Row numbers, longest first, in parts of at most `budget` tokens (or one row) with the padding to the longest."""
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > budget:
            parts.append([])
        parts[-1].append(row)
    return parts


def update_parts(waiting: list[Columns], rows_at_once: int, skip: bool) -> list[Columns]:
    """The rows of an optimizer step in micro-batches that take no more memory than `rows_at_once` padded rows.

    With `skip`, answers without an advantage or penalty are left out; one remains, because every process needs a
    gradient. `longest` is the number of tokens of the longest row.
    """
    first = waiting[0]
    rows = {name: torch.cat([w[name] for w in waiting]) for name, x in first.items() if x is not None and x.ndim}
    others = {name: x for name, x in first.items() if name not in rows}
    lengths = (rows["prompt_mask"].sum(1) + rows["completion_mask"].sum(1)).tolist()
    credit = (rows["advantages"] != 0) | (rows["penalty"] != 0) if "penalty" in rows else rows["advantages"] != 0
    trained = (credit & loss_mask(rows)).any(1).tolist()
    kept = [i for i, found in enumerate(trained) if found or not skip] or [lengths.index(min(lengths))]
    width = rows["prompt_ids"].shape[1] + rows["completion_ids"].shape[1]
    found = []
    for part in token_parts([lengths[i] for i in kept], rows_at_once * width):
        index = torch.tensor([kept[i] for i in part], device=rows["prompt_ids"].device)
        longest = lengths[kept[part[0]]]
        found.append({**others, **{name: x[index] for name, x in rows.items()}, "longest": longest})
    return found


def aligned_passes(
    model: Any, ids: Tensor, mask: Tensor, keep: int, rows_at_once: int | None, longest: int | None
) -> tuple[Tensor, Tensor]:
    """(B, keep) log-probabilities and entropies of the last `keep` columns.

    In one pass, or in passes of at most as many tokens as `rows_at_once` padded rows. `longest`: tokens of the longest
    row of one pass, if known; else they are read from the device.
    """
    if rows_at_once is None or rows_at_once >= len(ids):
        most = int(mask.sum(1).amax()) if longest is None else longest
        return _aligned_pass(model, ids, mask, keep, most)
    lengths = mask.sum(1).tolist()
    parts = token_parts(lengths, rows_at_once * ids.shape[1])
    indices = [torch.tensor(part, device=ids.device) for part in parts]  # a copy would wait for a pass
    passes = [
        _aligned_pass(model, ids[rows], mask[rows], keep, lengths[part[0]])
        for rows, part in zip(indices, parts, strict=True)
    ]
    order = torch.cat(indices).argsort()
    logp, entropy = (torch.cat(column)[order] for column in zip(*passes, strict=True))
    return logp, entropy


def _aligned_pass(model: Any, ids: Tensor, mask: Tensor, keep: int, longest: int) -> tuple[Tensor, Tensor]:
    """With every row's tokens moved to the left. 0 if the model's head does not compute them: that of a reference
    policy has no entropies."""
    live = mask.bool()
    order = torch.argsort(~live, dim=1, stable=True)[:, :longest]
    scored = live.gather(1, order) & (order >= ids.shape[1] - keep)
    tokens = ids.gather(1, order)
    outputs = model(input_ids=tokens, labels=tokens.masked_fill(~scored, -100), fused_lm_head=True)
    logp = outputs.log_probs
    found = (torch.zeros_like(logp) if x is None else x for x in (logp, outputs.entropy))
    # The first token has no prediction.
    back = (torch.zeros_like(ids, dtype=x.dtype).scatter(1, order, pad(x, (1, 0))) for x in found)
    logp, entropy = (x[:, -keep:] for x in back)
    return logp, entropy
