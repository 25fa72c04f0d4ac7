"""Sample k answers to each of n prompts with transformers or vLLM."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Any

from dew.errors import ConfigError, EngineError, Problem, wrong_types
from dew.tasks.rows import is_prompt


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. The model's own generation settings are ignored."""

    k: int = 16
    """Answers per problem; with `greedy`, always one."""
    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False
    max_new_tokens: int = 128
    batch_size: int | None = None
    """Answers sampled at a time. None: 1,024 on a GPU; 256 on a CPU, where more is not faster and 64 is slower."""
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {"k": self.k, "max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size}
        wrong = wrong_types(self)
        if not wrong:
            wrong += [f"{name}={n}: must be at least 1." for name, n in counts.items() if n is not None and n < 1]
            if not 0 < self.temperature < inf:
                wrong.append(f"temperature={self.temperature}: must be above 0 and finite. For 0, use greedy.")
            if not 0 < self.top_p <= 1:
                wrong.append(f"top_p={self.top_p}: must be above 0 and at most 1.")
            if not 0 <= self.seed < 2**64:
                wrong.append(f"seed={self.seed}: must be at least 0 and below 2^64.")
        if wrong:
            raise ConfigError(wrong)

    @property
    def answers(self) -> int:
        return 1 if self.greedy else self.k


@dataclass(frozen=True)
class Sampled:
    text: str
    tokens: int
    truncated: bool
    """True if it reached the maximum length."""


def sample(model: Any, tokenizer: Any, prompts: Sequence[Any], sampling: Sampling) -> list[list[Sampled]]:
    """Sample k answers to each prompt (text, or a list of chat messages). The same seed gives the same answers."""
    import torch

    from dew.decoding import evaluating, uncompiled

    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    if is_vllm(model):
        return _sample_with_vllm(model, ids, sampling)
    set_pad_token(tokenizer)
    ends = end_tokens(model, tokenizer)
    devices, k = [model.device] if model.device.type == "cuda" else [], sampling.answers
    # Batch prompts of similar length; on a GPU the longest first, so that their buffers fit the others.
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=bool(devices))
    with torch.random.fork_rng(devices), torch.no_grad(), evaluating(model), uncompiled(model):
        torch.manual_seed(sampling.seed)
        rows = _draw(model, tokenizer, sampling, ends, [ids[i] for i in order for _ in range(k)])
        flat = _cut(rows, tokenizer, ends)
    answers = {i: flat[place * k : (place + 1) * k] for place, i in enumerate(order)}
    return [answers[i] for i in range(len(ids))]


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer."""
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)


def set_pad_token(tokenizer: Any) -> None:
    """Pad with the end token where there is no other, as TRL does."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        what = "The tokenizer has neither an end-of-sequence token nor a padding token."
        raise ConfigError(Problem(what, remedy="Set its eos_token, e.g. in tokenizer_config.json."))


def check_prompt(tokenizer: Any, prompt: Any) -> None:
    """Raise if the prompt is neither text nor chat messages, or the tokenizer has no template for these."""
    if not is_prompt(prompt):
        what = f"A prompt is {prompt!r:.80}, neither text nor a list of chat messages."
        raise ConfigError(Problem(what, remedy="Convert the column to text, and remove rows without a prompt."))
    if not isinstance(prompt, str) and tokenizer.chat_template is None:
        what = "The prompts are chat messages, and the tokenizer has no chat template."
        how = "`dew eval`: --settings '{template: plain}'; `dew lab`: --settings '{task_settings: {template: plain}}'"
        remedy = "Write prompts as text, or set tokenizer.chat_template. With a data set of dew, write "
        raise ConfigError(Problem(what, remedy=f"{remedy}task_settings: {{template: plain}} ({how})."))


def prompt_text(tokenizer: Any, prompt: Any) -> str:
    """The prompt as text, with the chat template applied to messages."""
    check_prompt(tokenizer, prompt)
    if isinstance(prompt, str):
        return prompt
    try:
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, chat_template=None)
    except Exception as error:  # a template raises its own, or fails on what it does not expect
        what = f"The chat template cannot read the prompt {prompt!r:.120}: {error}."
        remedy = "Give messages with a role that it knows, and their content as text."
        raise ConfigError(Problem(what, remedy=remedy)) from error


def with_template_settings(tokenizer: Any, settings: Any) -> Any:
    """Return the tokenizer with these arguments of its chat template, TRL's `chat_template_kwargs`."""
    if not isinstance(settings, Mapping):
        return tokenizer
    found = copy(tokenizer)
    found.apply_chat_template = partial(tokenizer.apply_chat_template, **settings)
    return found


def prompt_ids(tokenizer: Any, prompt: Any) -> list[int]:
    text = prompt_text(tokenizer, prompt)
    return tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]  # chat templates add their own


def _draw(model: Any, tokenizer: Any, sampling: Sampling, ends: Sequence[int], ids: list[list[int]]) -> list[list[int]]:
    """The token ids of an answer to each prompt, by dew's decoder or else `generate`."""
    from dew.decoding import Decoder, Draw, refusal

    size = sampling.batch_size or (1024 if model.device.type == "cuda" else 256)
    size = size // sampling.answers * sampling.answers or size  # all answers to a prompt together, if they fit
    if refusal(model):
        starts = range(0, len(ids), size)
        return [row for i in starts for row in _generate(model, tokenizer, sampling, ids[i : i + size])]
    draw = Draw(temperature=sampling.temperature, top_p=sampling.top_p, greedy=sampling.greedy)
    decoder = Decoder(model, draw, ends=ends, pad=tokenizer.pad_token_id)
    return decoder.answers(ids, sampling.max_new_tokens, at_once=size)


def _generate(model: Any, tokenizer: Any, sampling: Sampling, ids: list[list[int]]) -> list[list[int]]:
    inputs = tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side="left").to(model.device)
    # Set everything explicitly, because the model may have its own defaults (top_k=20, a repetition penalty).
    draw: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        draw = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        **draw,
        repetition_penalty=1.0,
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )
    return output[:, inputs["input_ids"].shape[1] :].tolist()


def _cut(rows: list[list[int]], tokenizer: Any, ends: Sequence[int]) -> list[Sampled]:
    lengths = [next((i + 1 for i, token in enumerate(row) if token in ends), None) for row in rows]
    answers = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    found = zip(texts, rows, lengths, strict=True)
    return [Sampled(text, length or len(row), truncated=length is None) for text, row, length in found]


def load_vllm(folder: str, **settings: Any) -> Any:
    """A `vllm.LLM`, which `evaluate` accepts in place of a transformers model."""
    try:
        from vllm import LLM
    except ImportError:
        remedy = 'Install "trl[vllm]" into a separate environment: vLLM pins its own transformers.'
        raise EngineError(Problem("engine vllm: vLLM is not installed.", remedy=remedy)) from None
    return LLM(model=folder, **settings)


def is_vllm(model: Any) -> bool:
    return hasattr(model, "llm_engine")


def _sample_with_vllm(llm: Any, ids: list[list[int]], sampling: Sampling) -> list[list[Sampled]]:
    from vllm import SamplingParams

    settings = {
        "n": sampling.answers,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
    }
    random = Random(sampling.seed)  # vLLM seeds answer i with seed + i: neighbouring seeds would repeat answers
    params = [SamplingParams(**settings, seed=random.getrandbits(48)) for _ in ids]
    results = llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
    return [
        [Sampled(one.text, len(one.token_ids), one.finish_reason == "length") for one in result.outputs]
        for result in results
    ]
