"""The batch that passes through a training step (sample, score, credit, report), and operations on its rows."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dew.engines.credit import Credit, Rows, Signals
from dew.engines.recorder import Columns, gold_of
from dew.engines.trl.rewards import outcome_columns

ANSWER_COLUMNS = ("outcome", "extra", "parts", "length", "truncated")
"""The columns that `answer_metrics` reads."""


@dataclass(frozen=True, kw_only=True)
class Batch(Rows):
    """One generation. Columns, including those of `Rows`, have the N answers of all processes, ordered by group."""

    inputs: dict[str, Any]
    """This process's answers as TRL returned them: the input of the loss."""
    parts: Tensor
    """(N, F) reward of each reward function. NaN: it returned none. Infinity: it was not finite and is not used."""
    total_length: Tensor
    """(N,) number of tokens, including tool output."""
    length: Tensor
    """(N,) number of tokens that the policy wrote."""
    truncated: Tensor
    """(N,) True on answers that were cut off at the maximum length."""
    filler: Tensor
    """(N,) True on masked answers that only fill the batch."""
    gold: list[str | None] | None = None
    extracted: list[str | None] | None = None
    verdict: list[str | None] | None = None
    """Gold answers, and what the outcome reward logged about each answer. For records only."""
    finite: Tensor
    """(N,) False on answers with an infinite or NaN log-probability or entropy."""
    answers: Columns
    """`ANSWER_COLUMNS` of every answer that the policy sampled, including those of dropped groups."""
    groups: dict[str, int]
    """Number of groups that were sampled, kept, dropped, refilled, ..., and number of sampling rounds."""

    @property
    def columns(self) -> Columns:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in values.items() if isinstance(x, Tensor | list)}


@dataclass
class Capture:
    """Intermediate results of TRL's `_generate_and_score_completions` that it does not return.

    The trainer's overrides fill it while TRL runs, and `DewTrainer.sample` reads it right afterwards.
    """

    completion_ids: list[list[int]] = field(default_factory=list)
    tool_mask: list[list[int]] | None = None
    parts: Tensor = field(default_factory=lambda: torch.empty(0))
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Columns that reward functions logged about this process's answers."""
    sampled: list[tuple[list[list[int]], Tensor, Tensor]] = field(default_factory=list)
    """Tokens, log-probabilities and entropies of each call to the sampler."""
    passes: list[Signals] = field(default_factory=list)
    """(B, T) signals from each forward pass without a gradient; with TRL's own loss, from each forward pass."""


def make_batch(
    trainer: Any, inputs: Columns, capture: Capture, old: Signals, recorded: list[dict[str, Any]] | None
) -> Batch:
    """Return the `Batch` of one call of TRL, with columns gathered from all processes.

    `recorded` has this process's rows of the data set if a token record is due.
    """
    accelerator, logp, entropy = trainer.accelerator, old.logp, old.entropy
    parts = capture.parts.masked_fill(capture.parts.isinf(), torch.nan)
    wants_logp = recorded is not None or trainer.algorithm.needs_logp
    mask, outcomes = loss_mask(inputs), parts[:, outcome_columns(trainer)]
    outcome = outcomes.nansum(1).masked_fill(outcomes.isnan().all(1), torch.nan)
    finite = torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    for x in (logp, entropy):
        if x is not None:
            finite &= (x.isfinite() | ~mask).all(-1)
    count, groups, device = len(parts), len(parts) // trainer.group_size, parts.device
    texts: Columns = {}
    if recorded is not None:
        texts["gold"] = gather_object([gold_of(row) for row in recorded])
        for name in ("extracted", "verdict"):
            column = f"{trainer.reward_func_names[trainer.outcome_index]}/{name}"
            texts[name] = gather_object(capture.extra.get(column, [None] * len(recorded)))
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    written = [len(ids) for ids in capture.completion_ids]
    answers = {
        "total_length": written,
        "length": written if capture.tool_mask is None else [sum(row) for row in capture.tool_mask],
        "truncated": [not ids or ids[-1] not in ends for ids in capture.completion_ids],
    }
    columns = {
        "outcome": outcome,
        "extra": (parts * trainer.reward_weights.to(device)).nansum(1) - outcome.nan_to_num(),
        "parts": parts,
        **{name: gather_rows(accelerator, torch.tensor(x, device=accelerator.device)) for name, x in answers.items()},
    }
    return Batch(
        **{**columns, "parts": capture.parts},
        **texts,
        inputs=inputs,
        group=torch.arange(count, device=device) // trainer.group_size,
        mask=gather_rows(accelerator, mask),
        entropy=None if entropy is None else gather_rows(accelerator, entropy.float().nan_to_num(0, 0, 0)),
        logp=gather_rows(accelerator, logp) if logp is not None and wants_logp else None,
        sum_sq=None if old.sum_sq is None else gather_rows(accelerator, old.sum_sq),
        tokens=gather_rows(accelerator, inputs["completion_ids"]) if trainer.algorithm.needs_tokens else None,
        finite=gather_rows(accelerator, finite),
        filler=torch.zeros(count, dtype=torch.bool, device=device),
        answers={name: columns[name] for name in ANSWER_COLUMNS},
        groups={"sampled": groups, "kept": groups, "dropped": 0, "refilled": 0, "rounds": 1},
    )


def first_rows(batch: Batch, count: float, size: int) -> Batch:
    """Exclude all answers after the first `count` from credit and metrics."""
    n = int(min(count, len(batch.group)))
    outcome = torch.cat((batch.outcome[:n], torch.full_like(batch.outcome[n:], torch.nan)))
    answers, kept = {name: x[:n] for name, x in batch.answers.items()}, dict.fromkeys(("sampled", "kept"), n // size)
    return replace(batch, outcome=outcome, answers=answers, groups={**batch.groups, **kept})


def loss_mask(inputs: Columns) -> Tensor:
    """(B, T) True on tokens that train: sampled by the policy (no tool output), in answers not masked as truncated."""
    mask = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if inputs.get("tool_mask") is not None else mask


def with_trl_advantages(credit: Credit, batch: Batch, accelerator: Any) -> Credit:
    """Return the credit with TRL's advantages, one per answer or, in some subclasses of its trainer, one per token."""
    advantages = gather_rows(accelerator, batch.inputs["advantages"]).view(len(batch.group), -1)
    return replace(credit, advantages=torch.where(batch.mask, advantages, 0), flipped=None)


# ── rows of all processes ───────────────────────────────────────────────────────────────────────────────────
LEFT_PADDED = ("prompt_ids", "prompt_mask")


def gather_rows(accelerator: Any, x: Tensor, fill: float = 0, left: bool = False) -> Tensor:
    """Gather the rows of all processes, in order of rank, padded to the longest."""
    dtype = x.dtype
    if dtype == torch.bool:
        x = x.to(torch.uint8)
    if x.ndim > 1:
        x = accelerator.pad_across_processes(x, dim=1, pad_index=fill, pad_first=left)
    return accelerator.gather(x.contiguous()).to(dtype)


def local_rows(accelerator: Any, x: Any, width: int | None = None) -> Any:
    """Return this process's part of gathered rows, cut to `width` columns."""
    rows = len(x) // accelerator.num_processes
    part = x[accelerator.process_index * rows : (accelerator.process_index + 1) * rows]
    return part if width is None else part[:, :width]


def gather_columns(accelerator: Any, columns: Columns, fills: dict[str, float]) -> Columns:
    return {
        name: gather_rows(accelerator, x, fills.get(name, 0), left=name in LEFT_PADDED) for name, x in columns.items()
    }


def select_rows(columns: Columns, index: list[int]) -> Columns:
    return {name: x[index] if isinstance(x, Tensor) else [x[i] for i in index] for name, x in columns.items()}


def join_columns(parts: list[Columns], fills: dict[str, float]) -> Columns:
    """Concatenate the rows of all parts, padded to the longest."""
    joined: Columns = {}
    for name, x in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(x, Tensor) and x.ndim < 2:
            joined[name] = torch.cat(values)
            continue
        joined[name] = [row for value in values for row in value]
        if isinstance(x, Tensor):
            side = "left" if name in LEFT_PADDED else "right"
            joined[name] = pad_sequence(joined[name], True, fills.get(name, 0), side)
    return joined
