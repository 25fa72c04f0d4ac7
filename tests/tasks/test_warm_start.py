"""scripts/warm_start.py, which made the bundled tiny model."""

import pytest
import torch

pytest.importorskip("transformers")
import warm_start as ws


def test_labels_cover_only_the_answer_and_its_end():
    tokenizer = ws.tiny_tokenizer()
    ids, labels = ws._encode(
        tokenizer, [{"prompt": "1,2>3:", "completion": "1+2=3"}, {"prompt": "1,2>2:", "completion": "1*2"}]
    )
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    text = tokenizer("1,2>3:1+2=3")["input_ids"]
    assert ids[0].tolist() == [*text, end]
    assert labels[0].tolist() == [ws.IGNORED] * 6 + text[6:] + [end]
    assert ids[1].tolist()[-3:] == [end, pad, pad] and labels[1].tolist()[-3:] == [end, ws.IGNORED, ws.IGNORED]


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
