"""Writes tests/support/verl_rollouts.json from the batches of a verl run: what it sampled and trained on.

    python tests/support/verl_record.py FOLDER/gtpo/batches/batch-0.pt FOLDER/grpo_s/batches/batch-0.pt

FOLDER is pytest's --basetemp of `pytest -m slow tests/verl/test_run.py`. The first batch of a run is sampled by the
bundled model, so its entropies can be recomputed.
"""

import json
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoTokenizer

from dew.algorithms import get_algorithm
from dew.engines.verl.config import SET_BY_VERL
from dew.tasks import TINY

NUMBERS = {"entropy": "entropy", "advantage": "advantages"}


def rollouts(path):
    batch, tokenizer = torch.load(path, weights_only=False), AutoTokenizer.from_pretrained(TINY)
    groups = defaultdict(list)
    for row, uid in enumerate(batch["index"]):
        groups[uid].append(row)
    found = []
    for rows in groups.values():
        prompt = tokenizer.decode(batch["prompts"][rows[0]][batch["prompt_mask"][rows[0]]])
        numbers, target = prompt.rstrip(":").split(">")
        answers = [
            {"ids": batch["responses"][row][live].tolist(), "acc": float(batch["acc"][row])}
            | {name: [float(f"{x:.8g}") for x in batch[of][row][live].tolist()] for name, of in NUMBERS.items()}
            for row, live in ((row, batch["mask"][row].bool()) for row in rows)
        ]
        numbers = [int(n) for n in numbers.split(",")]
        found.append({"prompt": prompt, "numbers": numbers, "answer": target, "answers": answers})
    return batch["algorithm"].name, {"settings": own_settings(batch["algorithm"]), "groups": found}


def own_settings(algorithm):
    """Settings that differ from the defaults."""
    plain = asdict(get_algorithm(algorithm.name))
    return {k: v for k, v in asdict(algorithm).items() if v != plain[k] and k not in SET_BY_VERL}


if __name__ == "__main__":
    made = dict(rollouts(path) for path in sys.argv[1:])
    Path(__file__).with_name("verl_rollouts.json").write_text(json.dumps(made) + "\n")
