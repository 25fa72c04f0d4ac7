"""Forward passes without padding, and micro-batches by their number of tokens.

On a GPU the answers of a micro-batch are joined into one row, if the model's attention can tell them apart. Otherwise
answers of similar length go together, and a micro-batch is as wide as its longest.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dew.decoding import refusal
from dew.engines.recording import Columns
from dew.engines.trl.batch import loss_mask, select_rows
from dew.kernels.attention import PACKED

logger = logging.getLogger("dew")


def why_not_joined(trainer: Any, model: Any) -> str | None:
    """Why answers cannot be joined into one row; None if they can."""
    config = model.config.get_text_config()
    reasons = (
        (trainer.accelerator.device.type != "cuda", "there is no GPU"),
        (not getattr(model, "_supports_attention_backend", False), "its attention cannot be replaced"),
        (config._attn_implementation not in ("sdpa", PACKED), f"its attention is {config._attn_implementation}"),
        (bool(getattr(config, "attention_dropout", 0)), "its attention has dropout"),
    )
    return refusal(model) or next((reason for found, reason in reasons if found), None)


def join_answers(trainer: Any) -> bool:
    """Whether answers are joined into one row; if so, the model gets the attention for it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    reason = why_not_joined(trainer, model)
    if reason is not None:
        logger.info("Answers are padded to the longest of their micro-batch: %s.", reason)
        return False
    for one in (model, trainer.ref_model):
        if one is not None:
            one.config.get_text_config()._attn_implementation_internal = PACKED
    return True


# ── micro-batches ───────────────────────────────────────────────────────────────────────────────────────────


def token_parts(lengths: list[int], budget: int, joined: bool) -> list[list[int]]:
    """Row numbers in parts of at most `budget` tokens (or one row), longest first; padding counts unless `joined`."""
    parts: list[list[int]] = []
    used = 0
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        cost = lengths[row] if joined or not parts else max(lengths[row], lengths[parts[-1][0]])
        if not parts or used + cost > budget:
            parts.append([])
            used, cost = 0, lengths[row]
        parts[-1].append(row)
        used += cost
    return parts


def update_parts(waiting: list[Columns], rows_at_once: int, joined: bool, skip: bool) -> list[Columns]:
    """The rows of an optimizer step in micro-batches that take no more memory than `rows_at_once` padded rows.

    With `skip`, answers without an advantage are left out; one remains, because every process needs a gradient.
    """
    first = waiting[0]
    rows = {name: torch.cat([w[name] for w in waiting]) for name, x in first.items() if x is not None and x.ndim}
    others = {name: x for name, x in first.items() if name not in rows}
    lengths = rows["prompt_mask"].sum(1) + rows["completion_mask"].sum(1)
    trained = ((rows["advantages"] != 0) & loss_mask(rows)).any(1) if skip else torch.ones_like(lengths).bool()
    width = rows["prompt_ids"].shape[1] + rows["completion_ids"].shape[1]
    kept, tokens = trained.nonzero()[:, 0].tolist() or [int(lengths.argmin())], lengths.tolist()
    parts = token_parts([tokens[i] for i in kept], rows_at_once * width, joined)
    return [{**others, **select_rows(rows, [kept[i] for i in part])} for part in parts]


# ── forward passes ──────────────────────────────────────────────────────────────────────────────────────────


def joined_pass(model: Any, ids: Tensor, mask: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """(B, keep) log-probabilities and entropies of the last `keep` columns, from one row without padding."""
    live = mask.bool()
    places, count = live.cumsum(1) - 1, live.sum(1)
    ends = torch.nn.functional.pad(count.cumsum(0), (1, 0)).int()
    scored = live.clone()
    scored[:, :-keep] = False
    longest = int(count.max())
    outputs = model(
        input_ids=ids[live][None],
        labels=ids.masked_fill(~scored, -100)[live][
            None
        ],  # a prompt comes first, so no label crosses to another answer
        position_ids=places[live][None],
        attention_mask=torch.ones(1, 1, 1, 1, device=ids.device),  # not read: with four axes, none is built
        cu_seq_lens_q=ends,
        cu_seq_lens_k=ends,
        max_length_q=longest,
        max_length_k=longest,
        fused_lm_head=True,
    )
    found = []
    for x in (outputs.log_probs, outputs.log_probs.detach() if outputs.entropy is None else outputs.entropy):
        padded = torch.nn.functional.pad(x[0], (1, 0))  # the first token has no prediction
        found.append(torch.zeros(live.shape, dtype=x.dtype, device=x.device).masked_scatter(live, padded)[:, -keep:])
    return found[0], found[1]


def trimmed_pass(
    score: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Any]], ids: Tensor, mask: Tensor, keep: int
) -> tuple[Tensor, Tensor, Any]:
    """`score` without the columns that are padding in every row."""
    used = mask.bool().any(0).nonzero()[:, 0]
    start = min(int(used[0]), ids.shape[1] - keep)
    end = max(int(used[-1]) + 1, ids.shape[1] - keep + 1)
    cut = ids.shape[1] - end
    logp, entropy, aux = score(ids[:, start:end], mask[:, start:end], keep - cut)
    entropy = logp.detach() if entropy is None else entropy  # of a reference policy, where nobody reads it
    logp, entropy = (torch.nn.functional.pad(x, (0, cut)) for x in (logp, entropy))
    return logp, entropy, aux
