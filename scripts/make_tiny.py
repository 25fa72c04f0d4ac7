"""Reproduce the bundled tiny model, evaluate it, and write its model card.

    python scripts/make_tiny.py OUT              train (a minute on a GPU), evaluate, write the card
    python scripts/make_tiny.py OUT --measure    evaluate the model in OUT and write its card

The seed determines the data, the initial weights and the batch order. On another device or with other library versions
the weights still differ by rounding, so expect scores close to those of the card, not identical files.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_start import Recipe, save, warm_start

from dew.evaluate import Scores, evaluate
from dew.tasks import Chain, Countdown, Task

TASKS: list[tuple[Task, int, int]] = [  # task, problems, maximum answer length
    (Countdown(), 512, 32),
    (Countdown(numbers=3), 256, 24),
    (Chain(steps=(8, 12)), 256, 112),
    (Chain(), 256, 160),
]
K = 16


def measure(folder: Path) -> list[tuple[Task, Scores]]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return [
        (task, evaluate(model, tokenizer, task, k=K, n_problems=n, max_new_tokens=longest))
        for task, n, longest in TASKS
    ]


def card(folder: Path, measured: list[tuple[Task, Scores]]) -> str:
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    rows = "\n".join(
        f"| `{task!r}` | {len(s.problems)} | {s['pass@1']} | {s[f'pass@{K}']} | {s[f'maj@{K}']} |"
        for task, s in measured
    )
    recipe = Recipe()
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [arithmetic, reinforcement-learning, tiny]
---
# tiny

A Llama of {parameters:,} parameters ({recipe.layers} layers, width {recipe.width}, float32) that plays two
arithmetic games, and is far from perfect at both. It exists to try, test and demonstrate reinforcement learning
offline on a CPU. It cannot do anything else.

One token is one character of `0-9 + - * = ; , > :`, and `<end>` ends an answer.

| game | prompt | answer |
|---|---|---|
| countdown: reach the target, every number once | `13,4,8,4>21:` | `13-4=9;8+4=12;12+9=21` |
| chain: apply the operations to a value | `17;+38;-9;*2:` | `17+38=55;55-9=46;46*2=92` |

## Scores

Held-out problems, {K} answers each at temperature 1, [95 % bootstrap interval over problems].
The combinations of numbers in held-out countdown problems occur in no demonstration.

| task | problems | pass@1 | pass@{K} | maj@{K} |
|---|---|---|---|---|
{rows}

Chains of more than 12 operations are longer than any in the training data.

## Training

`scripts/make_tiny.py`, seed {recipe.seed}: supervised fine-tuning on answers only; {recipe.stop:,} AdamW steps of
{recipe.countdown_batch} countdown demonstrations (50,000 of four numbers, 3,000 of three) and
{recipe.chain_batch} chain demonstrations (40,000 of 8 to 12 operations, 20,000 of 2 to 7), peak learning rate
{recipe.learning_rate}. It stops at step {recipe.stop:,} of a schedule of {recipe.steps:,} on purpose.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    if not arguments.measure:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model, tokenizer = warm_start(Recipe(), device, on_step=_report)
        save(model, tokenizer, arguments.out)
    text = card(arguments.out, measure(arguments.out))
    (arguments.out / "README.md").write_text(text)
    print(text)


def _report(step: int, loss: torch.Tensor) -> None:
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
