"""verl and TRL give the same rollouts the same advantages.

verl_rollouts.json is what a run of verl sampled with the shipped model and trained on (tests/verl_record.py). Here the
TRL engine gets the same completions, judges them, computes the entropies with a pass of its own, and gives credit.
"""

import json
from pathlib import Path

import pytest
import torch

import trl_tiny as tiny
from dew.rewards import verifier
from dew.tasks.shipped import TINY

ROLLOUTS = json.loads(Path(__file__).with_name("verl_rollouts.json").read_text())


def replaying(groups):
    """A rollout function that hands out what verl sampled."""

    def rollout(prompts, trainer):
        completions = [answer["ids"] for group in groups for answer in group["answers"]]
        assert len(prompts) == len(completions)
        encode = trainer.processing_class
        return {"prompt_ids": encode(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}

    return rollout


@pytest.mark.parametrize("algorithm", ROLLOUTS)
def test_the_trl_engine_gives_what_verl_trained_on(algorithm, tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dew.engines.trl import DewTrainer

    groups = ROLLOUTS[algorithm]
    size, count = len(groups[0]["answers"]), len(groups)
    data = Dataset.from_list([{key: group[key] for key in ("prompt", "numbers", "answer")} for group in groups])
    trainer = DewTrainer(
        AutoModelForCausalLM.from_pretrained(TINY),
        verifier("countdown"),
        tiny.config(
            tmp_path, algorithm=algorithm, num_generations=size, per_device_train_batch_size=size * count,
            max_completion_length=48, records_every=0,
        ),
        data,
        processing_class=AutoTokenizer.from_pretrained(TINY),
        rollout_func=replaying(groups),
    )  # fmt: skip
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))

    answers = [answer for group in groups for answer in group["answers"]]
    assert any(answer["acc"] for answer in answers)
    moved = 0.0
    for row, answer in enumerate(answers):
        length = len(answer["ids"])
        assert batch["completion_mask"][row].sum() == length
        expected = torch.tensor(answer["advantage"])
        torch.testing.assert_close(batch["advantages"][row, :length], expected, rtol=2e-3, atol=2e-3)
        moved += float(expected.abs().sum())
    assert moved > 1
