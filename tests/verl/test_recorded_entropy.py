"""benchmarks/verl_records.py: recorded entropies against dew's kernel on the same tokens."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dew.run.folder import RunFolder
from dew.run.records import AnswerRecord, GroupRecord
from dew.tasks import TINY

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
verl_records = pytest.importorskip("verl_records", reason="benchmarks/ is not here")


def test_entropies_of_the_model_itself_agree_and_a_changed_one_shows(tmp_path):
    """Recorded from the model's own logits in float32; then one of three entropies is 0.5 too large."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    prompt, answer = "1 2 3 = 6:", "1+2"
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    ids = torch.tensor([before + after])
    with torch.no_grad():
        logp = model(ids).logits[0, len(before) - 1 : -1].log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp.gather(-1, ids[0, len(before) :, None])[:, 0]

    def write(entropy, step):
        record = AnswerRecord(
            [tokenizer.decode([i]) for i in after], True, 1.0, entropy=entropy.tolist(), logp=chosen.tolist()
        )
        RunFolder(tmp_path).write_records(step, [GroupRecord(step, 0, tokenizer.decode(before), [record])], 0)

    write(entropy, 1)
    found, left_out = verl_records.compare(tmp_path, str(TINY), 1, "cpu", 1.0)
    assert left_out == 0 and len(found["verl"][1]) == len(after)
    for name, rtol in (("dew float32", 1e-4), ("dew bf16", 0.2)):
        torch.testing.assert_close(found["verl"][0], found[name][0], rtol=rtol, atol=rtol)
        torch.testing.assert_close(found["verl"][1], found[name][1], rtol=rtol, atol=rtol)
    write(entropy + torch.eye(len(after))[0] / 2, 2)
    found, _ = verl_records.compare(tmp_path, str(TINY), 2, "cpu", 1.0)
    off = (found["verl"][1] - found["dew float32"][1]).abs()
    assert off[0] == pytest.approx(0.5, abs=1e-3) and off[1:].max() < 1e-3
    assert len(verl_records.table(found).splitlines()) == 5
