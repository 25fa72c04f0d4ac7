"""Mixed policy: a guide answers each prompt in addition to the policy.

Based on the abstract of "Improving DAPO from a Mixed-Policy Perspective" (arXiv:2507.12931); the full text was not
available. A guide is a file of recorded answers, or an object with the methods of `Guide`. The trainer calls one method
of `MixedPolicy` in each phase of a step.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dew.algorithms.base import Part
from dew.decoding import replaced
from dew.engines.credit import Credit, any_in_group, outcomes
from dew.engines.recorder import Columns, Numbers
from dew.engines.trl.batch import Batch, gather_rows, local_rows
from dew.engines.trl.loss import divisor
from dew.errors import ConfigError, EngineError, Problem
from dew.losses import UNBOUNDED
from dew.tasks.rows import raw_rows

UNSCORED = 0.1
"""A guide's token without a recorded probability has the ratio x / (x + 0.1), where x is the policy's probability."""


@dataclass(frozen=True)
class GuideAnswer:
    ids: list[int]
    logps: list[float] | None = None
    """log π_φ of each token, if known."""


class Guide(Protocol):
    def count(self, prompt: Any, wanted: int) -> int:
        """Return how many answers the guide has for a prompt, at most `wanted`."""
        return wanted

    def answer(self, prompt: Any, prompt_ids: list[int], count: int, turn: int) -> list[GuideAnswer]:
        """Return `count` answers. `turn` is the optimizer step, so that a guide can cycle through its answers."""
        ...


class RecordedGuide(Guide):
    """Lines of {"prompt", "completion"} with optional "token_ids" and "logprobs". A prompt may have several lines."""

    def __init__(self, path: str, tokenizer: Any, limit: int) -> None:
        self._by_prompt: dict[str, list[GuideAnswer]] = {}
        remedy = 'Each line is {"prompt": "...", "completion": "..."}, with "token_ids" and "logprobs" if known.'
        for where, entry in raw_rows(path, split="train"):
            try:
                if isinstance(entry, Exception):
                    raise entry
                prompt, answer = _recorded(entry, tokenizer, limit)
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
                what = f"guide={path!r}: {where} is not a recorded answer ({error})."
                raise ConfigError(Problem(what, remedy=remedy)) from None
            self._by_prompt.setdefault(_key(prompt), []).append(answer)
        if not self._by_prompt:
            raise ConfigError(Problem(f"guide={path!r} is empty.", remedy=remedy))

    def count(self, prompt: Any, wanted: int) -> int:
        return min(wanted, len(self._by_prompt.get(_key(prompt), [])))

    def answer(self, prompt: Any, prompt_ids: list[int], count: int, turn: int) -> list[GuideAnswer]:
        stock = self._by_prompt[_key(prompt)]
        return [stock[(turn * count + i) % len(stock)] for i in range(count)]


def _recorded(entry: dict[str, Any], tokenizer: Any, limit: int) -> tuple[Any, GuideAnswer]:
    """Return the prompt and the answer, cut to `limit` tokens. An EOS token without a log-probability gets π_φ = 1."""
    completion: Any = entry.get("completion")
    logps = entry.get("logprobs")
    if "token_ids" in entry:
        ids = [int(i) for i in entry["token_ids"]]
        if strange := [i for i in ids if not 0 <= i < len(tokenizer)]:
            raise ValueError(f"token id {strange[0]} is not in the policy's vocabulary of {len(tokenizer)}")
    else:
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    if logps is None:
        return entry["prompt"], GuideAnswer(ids[:limit])
    if not len(ids) - 1 <= len(logps) <= len(ids):
        raise ValueError(f'{len(logps)} logprobs for {len(ids)} tokens of this tokenizer: record "token_ids" too')
    return entry["prompt"], GuideAnswer(ids[:limit], [*map(float, logps), *[0.0] * (len(ids) - len(logps))][:limit])


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


class MixedPolicy:
    """Adds the guide's answers to each group. Only this class reads the columns that it adds to TRL's inputs:

    guided        (B,) True on the guide's answers
    guide_logps   (B, T) log π_φ, NaN where it is not known
    row_weight    (B,) weight of each answer in the loss
    """

    def __init__(self, trainer: Any, guide: Guide | None, dataset: Any = ()) -> None:
        """If `guide` is None, use the file that the config names."""
        args, self._trainer = trainer.args, trainer
        if guide is None:
            guide = RecordedGuide(args.guide, trainer._tokenizer, args.max_completion_length)
            if hasattr(dataset, "__len__") and not any(guide.count(prompt, 1) for prompt in dataset["prompt"]):
                what = f"guide={args.guide!r}: it has none of the prompts of the data,"
                why = f"e.g. {dataset[0]['prompt']!r:.80}."
                raise ConfigError(Problem(what, why, "Record prompts as they are in the data."))
        self._guide, wanted = guide, args.guide_completions
        if trainer.tools:
            raise ConfigError(Problem("guide with tools:", "a guide cannot call tools.", "Remove one of the two."))
        uniform = trainer.use_vllm or trainer.accelerator.num_processes > 1
        if lacking := [p for p in dataset["prompt"] if guide.count(p, wanted) < wanted] if uniform else []:
            what = f"guide: {len(lacking)} prompts have fewer than guide_completions={wanted} answers,"
            why = f"e.g. {lacking[0]!r:.80}. With vLLM or several processes every prompt needs that many."
            raise ConfigError(Problem(what, why, "Record more answers, or remove those prompts from the data set."))
        self._answers: list[GuideAnswer | None] = []
        """For each row of the latest generation, the guide's answer or None."""

    def generate(self, prompts: list[Any], generate: Callable[[list[Any]], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the result of TRL's `_generate`, with the guide's answers as the last ones of each group."""
        trainer = self._trainer
        size, turn, wanted = trainer.num_generations, trainer.state.global_step, trainer.args.guide_completions
        counts = [self._guide.count(prompts[first], wanted) for first in range(0, len(prompts), size)]
        own_prompts = [prompts[g * size + i] for g, k in enumerate(counts) for i in range(size - k)]
        with replaced([(trainer, "num_generations", 1)]):  # else vLLM takes `size` prompts for one group
            prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, images, *rest = generate(own_prompts)
        rows: list[GuideAnswer | None] = []
        sources: list[int] = []  # for each row, the policy's row with this answer or (for the guide's) this prompt
        first = 0
        for g, k in enumerate(counts):
            answers = self._guide.answer(prompts[g * size], prompt_ids[first], k, turn) if k else []
            if len(answers) != k:
                raise EngineError(f"guide: asked for {k} answers, got {len(answers)}.")
            rows += [*[None] * (size - k), *answers]
            sources += [*range(first, first + size - k), *[first] * k]
            first += size - k
        self._answers = rows

        def merged(column: Any, guided: Callable[[GuideAnswer], Any]) -> list[Any]:
            return [column[i] if a is None else guided(a) for i, a in zip(sources, rows, strict=True)]

        def completion(answer: GuideAnswer) -> Any:
            text = trainer._tokenizer.decode(answer.ids, skip_special_tokens=True)
            return text if isinstance(prompts[0], str) else [{"role": "assistant", "content": text}]

        return (
            [prompt_ids[i] for i in sources],
            merged(completion_ids, lambda answer: answer.ids),
            None if tool_mask is None else merged(tool_mask, lambda answer: [1] * len(answer.ids)),
            merged(completions, completion),
            # TRL excludes tokens with None from its correction for the sampler.
            None if logprobs is None else merged(logprobs, lambda answer: [None] * len(answer.ids)),
            # Additional columns of a rollout function, which has none for the guide's answers.
            {name: merged(x, lambda answer: None) if isinstance(x, list) else x for name, x in extra.items()},
            None if images is None else [images[i] for i in sources],
            *rest,
        )

    def mark(self, batch: Batch) -> Batch:
        """Add `guided` and `guide_logps`, and exclude the guide's answers from the policy's metrics."""
        ids = batch.inputs["completion_ids"]
        logps = torch.full(ids.shape, torch.nan, device=ids.device)
        for row, answer in enumerate(self._answers):
            if answer is not None and answer.logps is not None:
                logps[row, : len(answer.logps)] = torch.tensor(answer.logps)
        added = {"guided": torch.tensor([a is not None for a in self._answers], device=ids.device)}
        batch = replace(batch, inputs={**batch.inputs, **added, "guide_logps": logps})
        own = ~self._guided(batch)
        return replace(batch, answers={name: x[own] for name, x in batch.answers.items()})

    def solved_alone(self, batch: Batch) -> Tensor:
        """(N,) True on groups that only the guide solved. Credit and loss treat them as a separate batch."""
        found = outcomes(self._trainer.algorithm, batch)
        return found.signal & ~any_in_group(batch.group, found.correct & ~self._guided(batch))

    def weigh(self, batch: Batch, credit: Credit, alone: Tensor) -> tuple[Columns, Numbers]:
        """Return `divisor` and `row_weight`, and metrics. The guide's answers have weight λ (`guide_weight`); groups
        that it `alone` solved have λ₀ (`guide_failed_weight`) and their own divisor."""
        trainer, args, guided = self._trainer, self._trainer.args, self._guided(batch)
        apart = divisor(trainer.algorithm, batch, alone)
        count = divisor(trainer.algorithm, batch, ~alone & ~batch.filler) or apart or 1.0
        weight = torch.where(guided, args.guide_weight, torch.ones_like(batch.extra))
        weight = torch.where(alone, args.guide_failed_weight * count / (apart or 1.0), weight)
        columns = {"divisor": torch.tensor(count, device=weight.device)}
        columns["row_weight"] = local_rows(trainer.accelerator, weight)
        if not guided.any():
            return columns, {}
        accuracy = float(credit.correct[guided].float().mean())
        return columns, {"guide/accuracy": accuracy, "guide/rescued_share": float(alone.float().mean())}

    def parts(self, inputs: Columns, logp: Tensor, whole: Part) -> dict[str, tuple[Tensor, Part]]:
        """Split log-probabilities and rows into the policy's ("") and the guide's ("guide/"). The guide's ratio may be
        far above 1; it is limited to 1 + `clip_high` where the surrogate does not bound it."""
        guided, weight = inputs["guided"][:, None], inputs["row_weight"][:, None]
        unknown = inputs["guide_logps"].isnan()
        old = torch.where(unknown, 0, inputs["guide_logps"])
        guide_logp = torch.where(unknown, logp - (logp.exp() + UNSCORED).log(), logp)
        most = old + math.log1p(self._trainer.algorithm.clip_high)
        unbounded = inputs["advantages"] < UNBOUNDED.get(self._trainer.algorithm.surrogate, -math.inf)
        guide_logp = torch.where(unbounded, torch.minimum(guide_logp, most), guide_logp)
        free = None if whole.penalty is None else torch.zeros_like(whole.penalty)
        guides = replace(whole, mask=whole.mask & guided, old_logp=old, weight=weight, penalty=free)
        own_weight = weight if whole.weight is None else whole.weight * weight
        own = replace(whole, mask=whole.mask & ~guided, weight=own_weight)
        return {"": (logp, own), "guide/": (guide_logp, guides)}

    def _guided(self, batch: Batch) -> Tensor:
        return gather_rows(self._trainer.accelerator, batch.inputs["guided"])
