"""The update: log-probabilities with dew's operator, micro-batches with little padding, inputs of the loss."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer import utils

from dew.algorithms import Algorithm
from dew.algorithms.base import Part
from dew.decoding import replaced
from dew.engines.compat import FUSED_HEAD, HEAD_OUTPUTS
from dew.engines.credit import Credit, Rows, Signals
from dew.engines.recorder import Columns
from dew.engines.trl.batch import Batch, local_rows, loss_mask
from dew.errors import ConfigError, Problem
from dew.kernels import linear_logprob_entropy, plain_head

logger = logging.getLogger("dew")

# ── log-probabilities and entropies ─────────────────────────────────────────────────────────────────────────
#
# TRL's patched forward runs the backbone, gathers a sharded head (FSDP2, ZeRO-3), and passes hidden states and head to
# one autograd function. Only that function is replaced, for the duration of a pass.


class _LogprobEntropy:
    """Drop-in for TRL's function: (hidden, weight, bias, labels, temperature, chunk, softcap, scale, outputs)."""

    def __init__(self, entropy_grad: bool, sum_sq: bool) -> None:
        self._settings: dict[str, Any] = {"entropy_grad": entropy_grad, "sum_sq": sum_sq}

    def apply(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: Any) -> tuple[Any, ...]:
        temperature, _, softcap, scale, _ = rest
        if scale != 1.0 and softcap is None and bias is None:
            temperature = temperature / scale
        elif scale != 1.0:  # applied before the cap, so it cannot go into the temperature
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        with _gather_again(weight, bias):
            logp, entropy, *squares = linear_logprob_entropy(
                hidden, weight, labels, bias=bias, temperature=temperature, softcap=softcap, **self._settings
            )
        found: dict[str, Tensor | None] = {"log_probs": logp, "entropy": entropy}
        found["log_sum_sq_probs"] = squares[0].log() if squares else None
        return tuple(found.get(name) for name in HEAD_OUTPUTS)


def _gather_again(*head: Tensor | None) -> AbstractContextManager[Any]:
    """Gather the head again for the backward pass, because ZeRO-3 partitions it after the forward pass."""
    sharded = {p.data_ptr(): p for p in head if p is not None and p.requires_grad and hasattr(p, "ds_status")}
    if not sharded:
        return nullcontext()

    def unpack(saved: Tensor) -> Tensor:
        if not hasattr(saved, "ds_status"):
            return saved
        with utils.maybe_gather_lm_head_ctx(saved):
            return saved.detach()

    return torch.autograd.graph.saved_tensors_hooks(lambda saved: sharded.get(saved.data_ptr(), saved), unpack)


def exact_head(entropy_grad: bool = False, sum_sq: bool = False) -> AbstractContextManager[None]:
    """Replace TRL's fused head by dew's operator, which computes entropies in float32 without storing the logits.

    `entropy_grad`: whether gradients flow through the entropy, which only an entropy bonus needs.
    """
    return replaced([(utils, FUSED_HEAD, _LogprobEntropy(entropy_grad, sum_sq))])


class Head:
    """Computes a model's log-probabilities and entropies, with dew's operator or TRL's, padded or aligned."""

    def __init__(self, trainer: Any) -> None:
        args, algorithm = trainer.args, trainer.algorithm
        self._trainer = trainer
        self._exact = uses_exact_head(args.exact_head, trainer.model, algorithm)
        special = trainer.sharded or trainer.aux_loss_enabled or trainer._is_vlm or algorithm.engine_loss
        self._aligns = args.less_padding and not special

    @property
    def aligned(self) -> bool:
        return self._aligns and not self._trainer.overrides_loss

    def __call__(
        self, trl: Callable[..., Any], model: Any, ids: Tensor, mask: Tensor, keep: int, rows: int | None, **kwargs: Any
    ) -> tuple[Signals, Any]:
        """Return the signals of the last `keep` columns, at most `rows` rows per pass, and the router's loss."""
        trainer, scoring, longest = self._trainer, not torch.is_grad_enabled(), kwargs.pop("longest", None)
        own = scoring and model is trainer.model
        sum_sq = own and trainer.algorithm.needs_sum_sq
        if own:
            kwargs["compute_entropy"] = True  # the head computes it anyway, and TRL discards it
        squares: list[Tensor] = []

        def watch(module: Any, inputs: Any, output: Any) -> None:  # TRL's scoring pass does not return Σπ²
            squares.append(output.log_sum_sq_probs.exp()[:, -keep:])

        head: Any = nullcontext()
        if self._exact:
            head = exact_head(trainer._entropy_bonus_enabled and not scoring, sum_sq)
        with head, model.register_forward_hook(watch) if sum_sq else nullcontext():
            if self.aligned and not sum_sq:
                with trainer.accelerator.autocast():
                    logp, entropy = aligned_passes(model, ids, mask, keep, rows, longest)
                return Signals(logp=logp, entropy=entropy), None
            logp, entropy, aux = trl(model, ids, mask, keep, batch_size=rows, **kwargs)
        return Signals(logp=logp, entropy=entropy, sum_sq=torch.cat(squares) if squares else None), aux


def uses_exact_head(wanted: bool, model: Any, algorithm: Algorithm) -> bool:
    """Whether dew's operator computes the head; if it cannot, log why. A sharded head is fine: TRL gathers it."""
    head = plain_head(model) if wanted else None
    unsupported = isinstance(head, str) and "shard" not in head
    if algorithm.needs_sum_sq and (unsupported or not wanted):
        what = f"{algorithm.label} needs the sum of squared probabilities, which only dew's operator computes."
        remedy = "Remove exact_head=False; if the model's output head is not supported, choose another algorithm."
        raise ConfigError(Problem(what, remedy=remedy))
    if unsupported:
        logger.warning("Log-probabilities are computed by TRL's head instead of dew's operator: %s.", head)
    return wanted and not unsupported


def compile_layers(trainer: Any) -> None:
    """If `torch_compile` or accelerate asks for it, compile the layers in place, once for all layers and lengths.

    accelerate would compile either the whole model, whose compile time grows with its depth, or, by regions, a copy
    that does not follow the model's training mode.
    """
    plugin = trainer.accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO:
        return
    blocks = getattr(trainer.model, "_no_split_modules", None) or ()
    for module in trainer.model.modules():
        if type(module).__name__ in blocks:
            module.compile(dynamic=True, backend=plugin.backend.value.lower(), mode=plugin.mode)
    plugin.backend = DynamoBackend.NO


# ── passes with little padding ──────────────────────────────────────────────────────────────────────────────
#
#    prompts left-padded, answers right-padded (TRL)        aligned
#    . . p p | a a a .                                      p p a a a .
#    p p p p | a . . .                                      p p p p a .
#
# Aligned rows need no attention mask: in a causal model, padding after the end of a row does not affect its tokens.


ENOUGH = 8192
"""Tokens that keep a GPU busy: a pass with this many takes no more rows of less than half its longest row's length."""


def token_parts(lengths: list[int], budget: int) -> list[list[int]]:
    """Split rows, longest first, into parts of at most `budget` tokens including padding, or of one longer row."""
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[parts[-1][0]] if parts else 0
        filled = len(parts[-1]) * longest if parts else budget + 1
        if filled + longest > budget or (filled >= ENOUGH and 2 * lengths[row] < longest):
            parts.append([])
        parts[-1].append(row)
    return parts


def aligned_passes(
    model: Any, ids: Tensor, mask: Tensor, keep: int, rows_at_once: int | None, longest: int | None
) -> tuple[Tensor, Tensor]:
    """(B, keep) log-probabilities and entropies of the last `keep` columns.

    Takes one pass, or several with at most as many tokens as `rows_at_once` padded rows. `longest` is the number of
    tokens in the longest row of a single pass; None reads it from the device.
    """
    if rows_at_once is None or rows_at_once >= len(ids):
        most = int(mask.sum(1).amax()) if longest is None else longest
        return _aligned_pass(model, ids, mask, keep, most)
    lengths = mask.sum(1).tolist()
    parts = token_parts(lengths, rows_at_once * ids.shape[1])
    indices = [torch.tensor(part, device=ids.device) for part in parts]  # first, because a copy waits for a pass
    passes = [
        _aligned_pass(model, ids[rows], mask[rows], keep, lengths[part[0]])
        for rows, part in zip(indices, parts, strict=True)
    ]
    order = torch.cat(indices).argsort()
    logp, entropy = (torch.cat(column)[order] for column in zip(*passes, strict=True))
    return logp, entropy


def _aligned_pass(model: Any, ids: Tensor, mask: Tensor, keep: int, longest: int) -> tuple[Tensor, Tensor]:
    """One pass with every row's tokens moved to the left. Entropies are 0 for a reference policy, whose head does not
    compute them."""
    live = mask.bool()
    order = torch.argsort(~live, dim=1, stable=True)[:, :longest]
    scored = live.gather(1, order) & (order >= ids.shape[1] - keep)
    tokens = ids.gather(1, order)
    outputs = model(input_ids=tokens, labels=tokens.masked_fill(~scored, -100), fused_lm_head=True)
    logp = outputs.log_probs
    found = (torch.zeros_like(logp) if x is None else x for x in (logp, outputs.entropy))
    # Nothing predicts the first token.
    back = (torch.zeros_like(ids, dtype=x.dtype).scatter(1, order, pad(x, (1, 0))) for x in found)
    logp, entropy = (x[:, -keep:] for x in back)
    return logp, entropy


# ── inputs of the loss ──────────────────────────────────────────────────────────────────────────────────────
def loss_inputs(algorithm: Algorithm, batch: Batch, credit: Credit, accelerator: Any) -> Columns:
    """Return TRL's inputs with dew's advantages and the other columns that the loss needs."""
    verdict = local_rows(accelerator, torch.where(credit.scored, credit.correct.long(), -1))
    if algorithm.engine_loss:
        return {**batch.inputs, "verdict": verdict}
    width = batch.inputs["completion_ids"].size(1)
    added = {
        "advantages": local_rows(accelerator, credit.advantages, width),
        "verdict": verdict,
        "num_items_in_batch": batch.mask.sum(),
        "divisor": torch.tensor(divisor(algorithm, batch, ~batch.filler) or 1.0, device=batch.mask.device),
    }
    if credit.penalty is not None:
        added["penalty"] = local_rows(accelerator, credit.penalty, width)
    return {**batch.inputs, **added}


def divisor(algorithm: Algorithm, rows: Rows, which: Tensor) -> float:
    """Return the divisor of these rows' loss: their number of live tokens or of answers.

    As in TRL, an answer counts even if it is masked or has no reward.
    """
    return algorithm.divisor(int(rows.mask[which].sum()), int(which.sum()))


def update_parts(waiting: list[Columns], rows_at_once: int, skip: bool) -> list[Columns]:
    """Split the rows of an optimizer step into micro-batches that need no more memory than `rows_at_once` padded rows.

    With `skip`, answers without an advantage or penalty are left out. If none has any, one is kept, because every
    process needs a gradient, and `idle` is True. `longest` is the number of tokens in the longest row.
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
        part_rows = {name: x[index] for name, x in rows.items()}
        found.append({**others, **part_rows, "longest": longest, "idle": skip and not any(trained)})
    return found


def loss_part(inputs: Columns, logp: Tensor, entropy: Tensor) -> Part:
    """Return the rows of a micro-batch.

    If TRL kept no old log-probabilities, the policy being trained is the one that sampled, and the ratio is exactly 1.
    The old values are then `logp`, detached: those of a second pass would differ by rounding.
    """
    old = inputs.get("old_per_token_logps")
    return Part(
        mask=loss_mask(inputs),
        old_logp=logp.detach() if old is None else old,
        ref_logp=inputs.get("ref_per_token_logps"),
        weight=inputs.get("importance_sampling_ratio"),
        entropy=entropy.detach(),
        penalty=inputs.get("penalty"),
    )


def observe_loss(trainer: Any, inputs: Columns, signals: Signals) -> None:
    """Add a micro-batch trained with TRL's own loss to the statistics of the step."""
    assert signals.logp is not None and signals.entropy is not None
    logp, entropy = signals.logp.detach(), signals.entropy.detach()
    part = loss_part(inputs, logp, entropy)
    _, stats = trainer.algorithm.loss(logp, part, inputs["advantages"], count=1)
    for side in ("low", "high"):  # use TRL's own numbers for what its loss clips
        del stats[f"clip/{side}"]
        if values := trainer._metrics[trainer._mode].get(f"clip_ratio/{side}_mean"):
            stats[f"clip/{side}"] = torch.tensor(values[-1], device=logp.device)
    trainer._statistics.add(stats, part.mask.sum())
    trainer._statistics.add_entropy(inputs["verdict"], part.mask, entropy)
