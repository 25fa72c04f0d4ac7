"""Sample k answers to each of n prompts with transformers, on a CPU or a GPU."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from dew.errors import ConfigError

Drawing = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts as token ids, answers to each) -> token ids of the answers, a prompt's beside each other."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. Nothing is taken over from the model's own generation settings."""

    k: int = 16
    """Answers per problem; with `greedy` there is one."""
    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False
    max_new_tokens: int = 128
    batch_size: int | None = None
    """Answers in flight at a time. Left out: 1,024 on a GPU; 256 on a CPU, where more are not faster and 64 slower."""
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value}: {advice}"
            for name, value, wrong, advice in (
                ("k", self.k, self.k < 1, "draw at least one answer."),
                (
                    "temperature",
                    self.temperature,
                    self.temperature <= 0,
                    "write greedy=True for the likeliest answer.",
                ),
                ("top_p", self.top_p, not 0 < self.top_p <= 1, "between 0 and 1; 1 keeps every token."),
                (
                    "max_new_tokens",
                    self.max_new_tokens,
                    self.max_new_tokens < 1,
                    "an answer has at least one token.",
                ),
                (
                    "batch_size",
                    self.batch_size,
                    self.batch_size is not None and self.batch_size < 1,
                    "at least one answer at a time.",
                ),
            )
            if wrong
        ]
        if problems:
            raise ConfigError("\n".join(problems))


@dataclass(frozen=True)
class Sampled:
    """One answer."""

    text: str
    tokens: int
    truncated: bool
    """True if it was cut off before it ended by itself."""


@dataclass(frozen=True)
class Samples:
    """`answers[i]` are the answers to prompt i."""

    answers: list[list[Sampled]]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for group in self.answers for answer in group) / self.seconds


def sample(model: Any, tokenizer: Any, prompts: Sequence[Any], sampling: Sampling) -> Samples:
    """Answers to every prompt (text, or a list of chat messages). The same seed gives the same answers."""
    import torch

    start = perf_counter()
    texts = [prompt_text(tokenizer, prompt) for prompt in prompts]
    plain = bool(prompts) and isinstance(prompts[0], str)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    ends = _ends(model, tokenizer)
    draw = _drawing(model, tokenizer, sampling, ends)
    was_training = model.training
    model.eval()
    answers: list[list[Sampled]] = [[] for _ in texts]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(sampling.seed)
        for rows, k in _batches(texts, sampling, on_gpu=bool(devices)):
            # A chat template has already written the special tokens.
            ids = tokenizer([texts[i] for i in rows], add_special_tokens=plain)["input_ids"]
            flat = _cut(draw(ids, k), tokenizer, ends)
            for place, i in enumerate(rows):
                answers[i] += flat[place * k : (place + 1) * k]
    model.train(was_training)
    return Samples(answers, perf_counter() - start)


def prompt_text(tokenizer: Any, prompt: Any) -> str:
    """A prompt as the model reads it."""
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template is None:
        raise ConfigError(
            "The prompts are chats, and this model's tokenizer has no chat template. Write them out: task settings "
            "{template: plain}, or qwen-boxed for Qwen's base models."
        )
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


def _batches(texts: Sequence[str], sampling: Sampling, on_gpu: bool) -> Iterator[tuple[list[int], int]]:
    """(prompts, answers to each): prompts of like length together, a prompt's answers at once if they fit."""
    k = 1 if sampling.greedy else sampling.k
    batch_size = sampling.batch_size or (1024 if on_gpu else 256)
    # Longest first on a GPU: buffers made for the first batch fit the others.
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=on_gpu)
    at_once = max(1, batch_size // k)
    for first in range(0, len(order), at_once):
        for done in range(0, k, batch_size):
            yield order[first : first + at_once], min(k - done, batch_size)


def _drawing(model: Any, tokenizer: Any, sampling: Sampling, ends: set[int]) -> Drawing:
    """Captured steps on a GPU; generate on a CPU and for models that cannot be captured."""
    from dew.decoding import Decoder, Draw, refusal

    if model.device.type != "cuda" or refusal(model) is not None:
        return lambda ids, k: _generate(model, tokenizer, ids, k, sampling)
    draw = Draw(temperature=sampling.temperature, top_p=sampling.top_p, greedy=sampling.greedy)
    decoder = Decoder(model, draw, ends=ends, pad=tokenizer.pad_token_id)
    return lambda ids, k: decoder.answers([row for row in ids for _ in range(k)], sampling.max_new_tokens)


def _generate(model: Any, tokenizer: Any, ids: list[list[int]], k: int, sampling: Sampling) -> list[list[int]]:
    inputs = tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side="left").to(model.device)
    # Every setting is given, so that none of the model's own (top_k=20, a repetition penalty) slips in.
    draw: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        draw = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    # On one CPU core a cache of fixed size is up to a quarter faster; on a GPU it would be compiled first.
    cache = {"cache_implementation": "static", "disable_compile": True} if model.device.type == "cpu" else {}
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        **draw,
        **cache,
        num_return_sequences=k,
        repetition_penalty=1.0,
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )
    return output[:, inputs["input_ids"].shape[1] :].tolist()


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    return set(ids) if isinstance(ids, list | tuple) else {ids}


def _cut(rows: list[list[int]], tokenizer: Any, ends: set[int]) -> list[Sampled]:
    lengths = [next((i + 1 for i, token in enumerate(row) if token in ends), None) for row in rows]
    texts = tokenizer.batch_decode(
        [row[:length] for row, length in zip(rows, lengths, strict=True)], skip_special_tokens=True
    )
    return [
        Sampled(text, length or len(row), truncated=length is None)
        for text, row, length in zip(texts, rows, lengths, strict=True)
    ]
