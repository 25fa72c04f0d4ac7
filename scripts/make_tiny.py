"""Reproduce a bundled tiny model, evaluate it, and write its model card.

    python scripts/make_tiny.py tiny OUT               train (a minute on a GPU), evaluate, write the card
    python scripts/make_tiny.py tiny6 OUT              the same for the model of six numbers (ten minutes on a CPU)
    python scripts/make_tiny.py tiny OUT --measure     evaluate the model in OUT and write its card

The seed determines the data, the initial weights and the batch order. On another device or with other library versions
the weights still differ by rounding, so expect scores close to those of the card, not identical files.
"""

import argparse
from pathlib import Path

import torch
from chain import Chain, chain
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_start import RECIPES, Recipe, save, warm_start

from dew.compare import Scores, evaluate
from dew.rewards import Verifier, verifier
from dew.tasks import Countdown, Task

TASKS: dict[str, list[tuple[Task, int, int]]] = {  # task, problems, maximum answer length
    "tiny": [
        (Countdown(), 512, 32),
        (Countdown(numbers=3), 256, 24),
        (Chain(steps=(8, 12)), 256, 112),
        (Chain(), 256, 160),
    ],
    "tiny6": [(Countdown(numbers=6, largest=9), 512, 48)],
}
K = 16

GAMES = """| game | prompt | answer |
|---|---|---|
| countdown: reach the target, every number once | `13,4,8,4>21:` | `13-4=9;8+4=12;12+9=21` |
| chain: apply the operations to a value | `17;+38;-9;*2:` | `17+38=55;55-9=46;46*2=92` |"""
SIX = """| game | prompt | answer |
|---|---|---|
| countdown: reach the target, every number once | `3,3,2,3,5,7>74:` | `3*2=6;7*3=21;21*3=63;63+6=69;69+5=74` |"""


def judge(task: Task) -> Verifier:
    return chain if isinstance(task, Chain) else verifier(task.name)


def measure(name: str, folder: Path) -> list[tuple[Task, Scores]]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return [
        (task, evaluate(model, tokenizer, task, judge(task), k=K, n_problems=n, max_new_tokens=longest))
        for task, n, longest in TASKS[name]
    ]


def card(name: str, folder: Path, measured: list[tuple[Task, Scores]]) -> str:
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    rows = "\n".join(
        f"| `{task!r}` | {len(s.problems)} | {s['pass@1']} | {s[f'pass@{K}']} | {s[f'maj@{K}']} |"
        for task, s in measured
    )
    recipe = RECIPES[name]
    plays, games, further, data = (
        ("countdown with six numbers, and is far from perfect at it", SIX, "", six_data(recipe))
        if name == "tiny6"
        else (
            "two arithmetic games, and is far from perfect at both",
            GAMES,
            "The library has no task `chain`; `scripts/chain.py` implements it. Chains of more than 12 operations are\n"
            "longer than any in the training data.\n\n",
            both_data(recipe),
        )
    )
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [arithmetic, reinforcement-learning, tiny]
---
# {name}

A Llama of {parameters:,} parameters ({recipe.layers} layers, width {recipe.width}, float32) that plays
{plays}. It exists to try, test and demonstrate reinforcement learning
offline on a CPU. It cannot do anything else.

One token is one character of `0-9 + - * = ; , > :`, and `<end>` ends an answer.

{games}

## Scores

Held-out problems, {K} answers each at temperature 1, [95% interval over problems].
The combinations of numbers in held-out countdown problems occur in no demonstration.

| task | problems | pass@1 | pass@{K} | maj@{K} |
|---|---|---|---|---|
{rows}

{further}## Training

{data}
"""


def both_data(recipe: Recipe) -> str:
    (countdown, _), (chain, _) = recipe.streams
    return f"""`scripts/make_tiny.py tiny`, seed {recipe.seed}: supervised fine-tuning on answers only;
{recipe.stop:,} AdamW steps of {countdown} countdown demonstrations (50,000 of four numbers, 3,000 of three) and
{chain} chain demonstrations (40,000 of 8 to 12 operations, 20,000 of 2 to 7), peak learning rate
{recipe.learning_rate}. It stops at step {recipe.stop:,} of a schedule of {recipe.steps:,} on purpose."""


def six_data(recipe: Recipe) -> str:
    ((batch, _),) = recipe.streams
    return f"""`scripts/make_tiny.py tiny6`, seed {recipe.seed}: the bundled `tiny`, then {recipe.stop:,} AdamW steps of
{batch} of 60,000 demonstrations with six numbers, on answers only, peak learning rate {recipe.learning_rate}.
It stops early on purpose."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    if not arguments.measure:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model, tokenizer = warm_start(RECIPES[arguments.name], device, on_step=_report)
        save(model, tokenizer, arguments.out)
    text = card(arguments.name, arguments.out, measure(arguments.name, arguments.out))
    (arguments.out / "README.md").write_text(text)
    print(text)


def _report(step: int, loss: torch.Tensor) -> None:
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
