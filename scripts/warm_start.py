"""Supervised fine-tuning of the bundled tiny models, small Llamas, on the games. Used by make_tiny.py.

It stops early on purpose: the model knows the format of an answer and most of the arithmetic, so some answers are
correct and some are not, and reinforcement learning can improve it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path

import torch
from chain import Chain
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dew.tasks import Countdown, Row, Task, model_folder

CHARACTERS = "0123456789+-*=;,>:"
SPECIAL = ("<pad>", "<end>", "<unk>")
POSITIONS = 512
IGNORED = -100


def demonstrations(task: Task, n: int, *, seed: int = 0) -> list[Row]:
    """Training problems with their worked solutions as {prompt, completion}."""
    return [{"prompt": row["prompt"], "completion": row["solution"]} for row in task.rows(n, seed=seed)]


def short_countdowns(seed: int) -> list[Row]:
    """Mostly four numbers, some three."""
    return demonstrations(Countdown(), 50_000, seed=seed) + demonstrations(Countdown(numbers=3), 3_000, seed=seed) * 3


def chains(seed: int) -> list[Row]:
    """Up to twelve steps, so longer ones remain to be learned."""
    return demonstrations(Chain(steps=(8, 12)), 40_000, seed=seed) + demonstrations(
        Chain(steps=(2, 7)), 20_000, seed=seed
    )


def six_numbers(seed: int) -> list[Row]:
    """Up to 9, where the tiny model makes fewer mistakes."""
    return demonstrations(Countdown(numbers=6, largest=9), 60_000, seed=seed)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the result, except for the library versions. The defaults made `tiny`."""

    start: str | None = None
    """The model to continue from; None: random weights of the size below."""
    layers: int = 3
    width: int = 128
    heads: int = 4
    inner: int = 352
    steps: int = 2500
    """Length of the learning rate schedule."""
    stop: int = 1700
    """Step at which training stops."""
    learning_rate: float = 2e-3
    warmup: int = 100
    streams: tuple[tuple[int, Callable[[int], list[Row]]], ...] = ((256, short_countdowns), (64, chains))
    """Demonstrations per step and where they come from; the loss is the mean over the streams."""
    seed: int = 0


RECIPES = {
    "tiny": Recipe(),
    "tiny6": Recipe(start="tiny", steps=600, stop=600, learning_rate=1.5e-3, warmup=30, streams=((64, six_numbers),)),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and <end>; no special tokens are added automatically."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def tiny_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained Llama of the recipe's size."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.width,
            intermediate_size=recipe.inner,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def warm_start(
    recipe: Recipe,
    device: str = "cpu",
    on_step: Callable[[int, Tensor], None] | None = None,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train a tiny model on demonstrations, with the loss on completions only."""
    torch.manual_seed(recipe.seed)
    tokenizer = tiny_tokenizer()
    model = tiny_model(recipe, tokenizer)
    if recipe.start is not None:
        model = LlamaForCausalLM.from_pretrained(model_folder(recipe.start))
    model.to(device).train()
    streams = [_batches(_encode(tokenizer, rows(recipe.seed)), size, recipe.seed) for size, rows in recipe.streams]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01, betas=(0.9, 0.98))
    for step in range(recipe.stop):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(recipe, step)
        loss = torch.zeros((), device=device)
        for ids, labels in (next(stream) for stream in streams):
            loss = loss + model(input_ids=ids.to(device), labels=labels.to(device)).loss / len(streams)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_step:
            on_step(step + 1, loss.detach())
    return model.eval(), tokenizer


def _learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then cosine decay to a tenth."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * (0.1 + 0.9 * (1 + cos(pi * progress)) / 2)


def _encode(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Right-padded ids and labels; a causal model needs no attention mask for padding on the right."""
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    answers = [[*ids, tokenizer.eos_token_id] for ids in tokenizer([row["completion"] for row in rows])["input_ids"]]
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids, labels = [], []
    for p, a in zip(prompts, answers, strict=True):
        rest = length - len(p) - len(a)
        ids.append(p + a + [tokenizer.pad_token_id] * rest)
        labels.append([IGNORED] * len(p) + a + [IGNORED] * rest)
    return torch.tensor(ids), torch.tensor(labels)


def _batches(data: tuple[Tensor, Tensor], size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless shuffled batches, each cut to its longest row."""
    ids, labels = data
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(ids), generator=generator).split(size)[: len(ids) // size]:
            width = int((labels[chosen] != IGNORED).any(0).nonzero().max()) + 1
            yield ids[chosen, :width], labels[chosen, :width]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save both for `from_pretrained(folder)`."""
    model.generation_config.max_new_tokens = 160
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that transformers 4 does not know; both know this one.
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
