"""Sampling: dynamic sampling, and dew's decoder instead of `generate`.

Dynamic sampling (DAPO) replaces groups without signal by new prompts until the batch is full. Only the outcome reward
decides whether a group has signal: a shaped or summed reward almost always varies, so a filter on it would keep noise.
Every process sees the same outcomes, so all of them sample the same number of rounds.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dew.algorithms import Algorithm
from dew.compare.sampling import check_prompt, set_pad_token
from dew.decoding import Decoder, Draw, SamplingCopy, refusal, replaced
from dew.engines.credit import Signals, outcomes
from dew.engines.recorder import Columns
from dew.engines.trl.batch import Batch, Capture, gather_columns, join_columns, local_rows, loss_mask, select_rows
from dew.errors import ConfigError, Problem

logger = logging.getLogger("dew")


# ── dynamic sampling ────────────────────────────────────────────────────────────────────────────────────────
class PromptStream:
    """Indices of the training prompts, reshuffled for each epoch. A checkpoint only needs its position."""

    def __init__(self, dataset: Any, seed: int, shuffle: bool) -> None:
        self.position = 0
        self._size, self._seed, self._shuffle = len(dataset), seed, shuffle
        self._epoch, self._order = -1, list[int]()

    def take(self, count: int) -> list[int]:
        places = [divmod(i, self._size) for i in range(self.position, self.position + count)]
        self.position += count
        return [self._pass(epoch)[place] for epoch, place in places]

    def _pass(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            shuffled = torch.randperm(self._size, generator=generator).tolist()
            self._epoch, self._order = epoch, shuffled if self._shuffle else list(range(self._size))
        return self._order


def prompt_stream(trainer: Any) -> PromptStream | None:
    """Return the source of prompts for dynamic sampling, or None if the algorithm does not use it."""
    algorithm, data = trainer.algorithm, trainer.train_dataset
    if not algorithm.dynamic_sampling:
        return None
    if not can_redraw(data):
        what = "dynamic sampling draws additional prompts, so the data must not be streamed or contain images."
        raise ConfigError(Problem(what, remedy=f"Write `algorithm: {algorithm.text(dynamic_sampling=False)}`."))
    return PromptStream(data, trainer.args.seed, bool(trainer.shuffle_dataset))


def can_redraw(dataset: Any) -> bool:
    """Whether additional prompts can be drawn from this data set."""
    images = {"image", "images"} & set(getattr(dataset, "column_names", None) or [])
    return not images and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def fill_batch(
    sample: Callable[[list[int]], Batch], algorithm: Algorithm, stream: PromptStream, accelerator: Any, *, quota: int,
    size: int, whole_groups: bool = False, fills: dict[str, float],
) -> Batch:  # fmt: skip
    """Sample rounds of up to `oversample · quota` prompts until `quota` groups of `size` have signal.

    If groups are missing after `max_rounds`, masked groups, which do not train, fill the batch. With `whole_groups`, no
    group spans two processes.
    """
    most = math.ceil(algorithm.oversample * quota)
    chosen: list[Batch] = []
    spare: list[Batch] = []
    answers: list[Columns] = []
    sampled, mixed = 0, 0
    # The rows of a round must divide evenly among the processes.
    step = accelerator.num_processes // (1 if whole_groups else math.gcd(accelerator.num_processes, size))
    while mixed < quota and len(answers) < algorithm.max_rounds:
        batch = sample(stream.take(round_size(most, quota - mixed, sampled, mixed, step)))
        rows = {name: x for name, x in batch.inputs.items() if x.ndim}
        everything = replace(batch, inputs=gather_columns(accelerator, rows, fills))
        signal = outcomes(algorithm, batch).mixed(size).tolist()
        with_signal = [group for group, found in enumerate(signal) if found]
        without = [group for group, found in enumerate(signal) if not found]
        chosen.append(_groups(everything, with_signal[: quota - mixed], size))
        spare.append(_groups(everything, without[: max(0, quota - (sampled - mixed))], size))
        sampled, mixed = sampled + len(signal), mixed + len(with_signal)
        answers.append(batch.answers)
    kept, first_round = min(quota, mixed), len(chosen[0].group) // size
    if short := quota - kept:
        filler = _groups(_join(spare, fills), list(range(short)), size)
        hidden = {**filler.inputs, "completion_mask": torch.zeros_like(filler.inputs["completion_mask"])}
        none, every = torch.zeros_like(filler.mask), torch.ones_like(filler.filler)
        chosen.append(replace(filler, inputs=hidden, mask=none, filler=every))
    batch = _join(chosen, fills)
    counts = {"sampled": sampled, "kept": kept, "dropped": sampled - kept, "refilled": kept - first_round}
    return replace(
        batch,
        group=torch.arange(quota, device=batch.group.device).repeat_interleave(size),
        inputs={name: local_rows(accelerator, x) for name, x in batch.inputs.items()},
        answers=join_columns(answers, fills),
        groups={**counts, "rounds": len(answers), "short": short, "mixed": mixed},
    )


def round_size(most: int, missing: int, sampled: int, mixed: int, step: int) -> int:
    """Return how many prompts to sample next, a multiple of `step`: first `most`, then missing / share with signal."""
    wanted = min(most, math.ceil(missing * sampled / mixed)) if mixed else most
    return math.ceil(wanted / step) * step


def _groups(batch: Batch, groups: list[int], size: int) -> Batch:
    rows = [group * size + i for group in groups for i in range(size)]
    return replace(batch, inputs=select_rows(batch.inputs, rows), **select_rows(batch.columns, rows))


def _join(parts: list[Batch], fills: dict[str, float]) -> Batch:
    inputs, columns = ([getattr(part, name) for part in parts] for name in ("inputs", "columns"))
    return replace(parts[0], inputs=join_columns(inputs, fills), **join_columns(columns, fills))


# ── what TRL samples from ───────────────────────────────────────────────────────────────────────────────────
@contextmanager
def loading_by_name(model: Any) -> Iterator[None]:
    """TRL loads the tokenizer and, with beta, the reference policy by the name of the model: explain if it has none."""
    try:
        yield
    except OSError:
        if isinstance(model, str) or model.config._name_or_path:
            raise
        what = "model: it has no name, by which TRL loads the tokenizer and, with beta (kl_coef), the reference policy."
        remedy = "Pass processing_class=TOKENIZER. With beta, save the model to a folder, and pass that folder."
        raise ConfigError(Problem(what, remedy=remedy)) from None


def check_inputs(trainer: Any) -> None:
    """Check model, tokenizer and prompts, and wrap a rollout function, which may use any prompts."""
    if not any(p.requires_grad for p in trainer.model.parameters()):
        remedy = "Load an adapter with PeftModel.from_pretrained(..., is_trainable=True)."
        raise ConfigError(Problem("model: all of its parameters are frozen.", remedy=remedy))
    set_pad_token(trainer._tokenizer)
    if trainer.rollout_func is not None:
        trainer.rollout_func = checked_rollout(trainer.rollout_func)
        return
    evaluated = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    for data in (trainer.train_dataset, *evaluated.values()):
        if can_redraw(data) and len(data):
            row = 0
            if hasattr(data, "select_columns"):  # the first missing prompt; -1: none is missing
                row = data.select_columns("prompt").with_format("arrow")[:]["prompt"].is_null().index(True).as_py()
            check_prompt(trainer.processing_class, data[max(0, row)]["prompt"])


def checked_rollout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a rollout function: lists of the wrong length, and a mask that TRL would ignore, are errors."""

    def rollout(prompts: list[Any], trainer: Any) -> Any:
        output = function(prompts, trainer)
        lengths = _lengths(output.get("completion_ids"))
        if len(lengths) != len(prompts) or not all(lengths):
            found = sum(map(bool, lengths))
            what = f"The rollout function returned {found} non-empty answers for {len(prompts)} prompts."
            raise ConfigError(Problem(what, remedy="Return one list of tokens per prompt in completion_ids."))
        for name in ("env_mask", "logprobs"):
            if output.get(name) is not None and _lengths(output[name]) != lengths:
                what = f"The rollout function's {name} does not have one number per token of completion_ids."
                raise ConfigError(Problem(what, remedy="Return one list per answer, as long as the answer."))
        masks = [name for name, rows in output.items() if "mask" in name and _lengths(rows) == lengths]
        if masks and "env_mask" not in masks:
            what = f"The rollout function returned {masks[0]}, which TRL only passes to the rewards."
            why = "All tokens would be trained on, including the output of tools."
            raise ConfigError(Problem(what, why, "Return it as env_mask: 1 on the policy's tokens, 0 on others."))
        return output

    return rollout


def _lengths(rows: Any) -> list[int]:
    try:
        return [len(row) for row in rows]
    except TypeError:  # a number, or numbers
        return []


# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────
def dropout_off(model: nn.Module) -> AbstractContextManager[None]:
    """Disable dropout. The outermost module keeps its mode, because TRL reads from it whether the model trains."""
    return replaced([(m, "training", False) for m in model.modules() if m is not model and m.training])


COMPARED = 16
"""Number of answers of the first generation on which the sampler is compared with a scoring pass."""
LARGEST_GAP = 0.1
"""Largest accepted mean difference of their entropies, relative to the mean entropy."""


class CapturedSampling:
    """Samples with `dew.decoding` from a copy of the weights in the sampling precision.

    The copy is made at the first call, once the model is on its device.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._copy: SamplingCopy | None = None
        self._decoder: Decoder | None = None
        self._started = False
        self._exact: bool | None = None
        """Whether the sampler's entropies are close to those of a scoring pass; None: not compared yet."""

    def generate(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], Tensor, Tensor] | None:
        """Return one answer per prompt, with log-probabilities and entropies, or None if TRL has to sample."""
        self.current_model()
        if self._decoder is None:
            return None
        try:
            return self._decoder.scored(prompt_ids, self._trainer.max_completion_length)
        except Exception as error:  # from PyTorch, or from Triton on a GPU that a kernel does not support
            reason = str(error.__context__ or error).split("\n")[0]  # PyTorch raises another when the capture ends
            logger.error("Captured sampling failed (%s); sampling with generate from now on.", reason)
            self._copy, self._decoder = None, None
            return None

    def signals(self, inputs: Columns, capture: Capture) -> Signals | None:
        """Return (B, T) log-probabilities and entropies from sampling, or None if a scoring pass has to compute them.

        Sampling rounds differently, so some answers of the first generation are compared with a scoring pass.
        """
        if self._exact is False:
            return None
        if len(capture.sampled) != 1 or capture.sampled[0][0] != capture.completion_ids:  # vLLM, tools, a guide, ...
            if self._exact is None:
                self._exact = False
                logger.debug("Sampling does not give the entropy of every token, so a scoring pass computes it.")
            return None
        live = inputs["completion_mask"].bool()
        logp, entropy = (torch.where(live, x[:, : live.shape[1]].to(live.device), 0) for x in capture.sampled[0][1:])
        if self._exact is None:
            rows = torch.linspace(0, len(logp) - 1, min(COMPARED, len(logp))).long().tolist()
            part = select_rows({name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.ndim}, rows)
            with torch.no_grad():
                at_once = self._trainer.args.per_device_train_batch_size  # what fits in an update fits here
                _, passed, _ = self._trainer._forward(self._trainer.model, part, batch_size=at_once)
            mask = loss_mask(part)
            gap, mean = ((passed - entropy[rows]).abs()[mask].mean().item(), passed[mask].mean().item())
            if not math.isfinite(gap):
                return None
            self._exact = gap <= LARGEST_GAP * mean + 1e-6
            level, then = logging.INFO, "no scoring pass is needed"
            if not self._exact:
                level, then = logging.WARNING, "every generation makes a scoring pass"
            text = "Entropy from sampling differs from a scoring pass by %.5f nats per token on average (of %.5f): %s."
            logger.log(level, text, gap, mean, then)
        return Signals(logp=logp, entropy=entropy) if self._exact else None

    def refused(self) -> str | None:
        """Return why `generate` or vLLM samples instead, or None."""
        trainer, args = self._trainer, self._trainer.args
        reasons = (
            (not args.captured_sampling, "captured_sampling is false"),
            (trainer.use_vllm, "vLLM samples"),
            (trainer.use_transformers_continuous_batching, "continuous batching is on"),
            (bool(args.generation_kwargs) or args.cache_implementation is not None, "generation settings are given"),
            (trainer.repetition_penalty not in (None, 1.0), "repetition_penalty is set"),
            (trainer.sharded, "the weights are sharded"),
        )
        found = next((reason for applies, reason in reasons if applies), None)
        return found or refusal(trainer.accelerator.unwrap_model(trainer.model))

    def current_model(self) -> Any:
        """Return a model with the current weights in the sampling precision."""
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if not self._started:
            self._started = True
            self._start(policy)
        return policy if self._copy is None else self._copy.refresh()

    def _start(self, policy: Any) -> None:
        trainer, args = self._trainer, self._trainer.args
        if self.refused() is not None:
            return
        self._copy = SamplingCopy(policy, torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None)
        draw = Draw(
            temperature=trainer.temperature,
            top_k=trainer.top_k or 0,
            top_p=1.0 if trainer.top_p is None else trainer.top_p,
            min_p=trainer.min_p or 0.0,
        )
        pad = trainer._tokenizer.pad_token_id
        self._decoder = Decoder(self._copy.model, draw, ends=trainer.eos_token_ids, pad=pad)
