"""scripts/warm_start.py, which made the bundled tiny model."""

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from dew.tasks import Countdown

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import warm_start as ws


def test_demonstrations_come_from_the_training_problems():
    rows = Countdown().rows(5)
    assert ws.demonstrations(Countdown(), 5) == [
        {"prompt": row["prompt"], "completion": row["solution"]} for row in rows
    ]


def test_labels_cover_only_the_answer_and_its_end():
    tokenizer = ws.tiny_tokenizer()
    ids, labels = ws._encode(
        tokenizer, [{"prompt": "1,2>3:", "completion": "1+2=3"}, {"prompt": "1,2>2:", "completion": "1*2"}]
    )
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    text = tokenizer("1,2>3:1+2=3")["input_ids"]
    assert ids[0].tolist() == [*text, end]
    assert labels[0].tolist() == [ws.IGNORED] * 6 + text[6:] + [end]
    assert ids[1].tolist()[-3:] == [end, pad, pad] and labels[1].tolist()[-3:] == [
        end,
        ws.IGNORED,
        ws.IGNORED,
    ]


def test_every_epoch_has_all_rows_in_a_new_order():
    ids = torch.arange(12).view(12, 1)
    shown = [i for batch, _ in islice(ws._batches((ids, ids), 3, seed=0), 8) for i in batch.flatten().tolist()]
    first, second = shown[:12], shown[12:]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_batches_are_cut_to_the_longest_answer():
    ids = torch.ones(2, 5, dtype=torch.long)
    labels = torch.tensor([[ws.IGNORED, 1, 1, ws.IGNORED, ws.IGNORED]] * 2)
    (batch, _), *_ = islice(ws._batches((ids, labels), 2, seed=0), 1)
    assert batch.shape == (2, 3)


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    recipe = ws.Recipe(steps=1000, warmup=10, learning_rate=1.0)
    rates = [ws._learning_rate(recipe, step) for step in range(1001)]
    assert rates[0] == 0.1 and max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[1000] == pytest.approx(0.1)


def test_training_is_reproducible_and_learns(tmp_path):
    few = [{"prompt": "1,2>3:", "completion": "1+2=3"}, {"prompt": "1,3>3:", "completion": "1*3=3"}]
    streams = ((2, lambda seed: few),) * 2
    recipe = ws.Recipe(layers=1, width=16, heads=2, inner=16, stop=30, warmup=1, streams=streams)
    losses: list[list[float]] = [[], []]
    for run in losses:
        model, tokenizer = ws.warm_start(recipe, on_step=lambda step, loss, run=run: run.append(loss.item()))
    assert losses[0] == losses[1] and losses[0][-1] < 0.8 * losses[0][0]
    ws.save(model, tokenizer, tmp_path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)("1,2>3:", return_tensors="pt")
    assert torch.equal(again(**ids).logits, model(**ids).logits)
    more = ws.Recipe(start=str(tmp_path), stop=1, steps=1, streams=streams)
    ws.warm_start(more, on_step=lambda step, loss: losses[0].append(loss.item()))
    assert losses[0][-1] < losses[0][-2]  # continues from the saved weights
