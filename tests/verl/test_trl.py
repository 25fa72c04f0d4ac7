"""verl and TRL give the same rollouts the same advantages.

verl_rollouts.json is what a run of verl sampled with the bundled model and trained on
(tests/support/verl_record.py). Here the TRL engine gets the same completions, scores them, computes the
entropies with a pass of its own, and assigns credit.
"""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: verl's environment has none, the default one does")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_tiny as tiny
from dew.engines.credit import Signals
from dew.engines.trl import DewTrainer
from dew.rewards import verifier
from dew.tasks import TINY

ROLLOUTS = json.loads((Path(__file__).parents[1] / "support" / "verl_rollouts.json").read_text())


def replaying(groups):
    """A rollout function that returns what verl sampled."""

    def rollout(prompts, trainer):
        completions = [answer["ids"] for group in groups for answer in group["answers"]]
        assert len(prompts) == len(completions)
        encode = trainer.processing_class
        return {"prompt_ids": encode(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}

    return rollout


def trainer_for(algorithm, settings, groups, folder):
    """The TRL engine with the bundled model, ready to score a generation."""
    size, count = len(groups[0]["answers"]), len(groups)
    data = Dataset.from_list([{key: group[key] for key in ("prompt", "numbers", "answer")} for group in groups])
    trainer = DewTrainer(
        AutoModelForCausalLM.from_pretrained(TINY),
        verifier("countdown"),
        tiny.config(
            folder, algorithm=algorithm, algorithm_kwargs=settings, num_generations=size,
            per_device_train_batch_size=size * count, max_completion_length=48, records_every=0,
        ),
        data,
        processing_class=AutoTokenizer.from_pretrained(TINY),
        rollout_func=replaying(groups),
    )  # fmt: skip
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def recorded(answers, name, width):
    """(N, width) verl's value of each token, 0 after an answer's end."""
    return torch.tensor([answer[name] + [0.0] * (width - len(answer[name])) for answer in answers])


@pytest.mark.parametrize("algorithm", ROLLOUTS)
def test_the_trl_engine_gives_what_verl_trained_on(algorithm, tmp_path, monkeypatch):
    groups = ROLLOUTS[algorithm]["groups"]
    answers = [answer for group in groups for answer in group["answers"]]
    trainer = trainer_for(algorithm, ROLLOUTS[algorithm]["settings"], groups, tmp_path)
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    width = batch["completion_ids"].shape[1]
    verls = recorded(answers, "advantage", width)
    assert batch["completion_mask"].sum(-1).tolist() == [len(answer["ids"]) for answer in answers]
    assert batch["verdict"].tolist() == [int(answer["acc"]) for answer in answers] and verls.abs().sum() > 1

    # With its own forward pass: nearly the same. verl's formula cancels in float32, dew's operator does not; it shows
    # in 1/H on the most certain tokens of wrong answers (H near 1e-5).
    torch.testing.assert_close(batch["advantages"], verls, rtol=0.02, atol=0.02)

    # With verl's entropies: the same.
    monkeypatch.setattr(trainer, "_old_policy", lambda batch: Signals(entropy=recorded(answers, "entropy", width)))
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    torch.testing.assert_close(batch["advantages"], verls, rtol=1e-5, atol=1e-5)
