"""dew.watch with the trainer class that Unsloth generates. Needs `pip install unsloth`, no GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dew.run.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("unsloth") is None, reason="Unsloth is not installed")]
SCRIPT = """
import torch, unsloth
from unsloth.models.rl import _patch_trl_rl_trainers_impl
_patch_trl_rl_trainers_impl("grpo_trainer")  # as `import unsloth` does on a GPU
from trl import GRPOConfig, GRPOTrainer
import dew
import trl_tiny as tiny

def train(folder, watch):
    model = tiny.model()
    model.for_training, model.for_inference = lambda **_: model.train(), lambda **_: model.eval()
    batch = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 2}
    args = {**batch, **tiny.ON_A_CPU, "learning_rate": 1e-2, "warmup_steps": 0, "logging_steps": 1}
    args = GRPOConfig(folder, optim="adamw_torch", save_strategy="no", **args)
    made = {"model": model, "reward_funcs": tiny.outcome, "args": args, "train_dataset": tiny.prompts()}
    watch(GRPOTrainer(**made, processing_class=tiny.tokenizer())).train()
    return tiny.weights(model)

alone = train("alone", lambda trainer: trainer)
assert not torch.equal(alone, tiny.weights(tiny.model()))
assert torch.equal(alone, train("watched", lambda trainer: dew.watch(trainer, records_every=1)))
"""


def test_weights_are_those_of_the_trainer_alone(tmp_path):
    search = os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path])
    env = {**os.environ, "UNSLOTH_ALLOW_CPU": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": search}
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=env, check=True)
    run = RunFolder(tmp_path / "watched")
    assert all(line["groups/mixed_share"] > 0 and line["grad_norm"] > 0 for line in run.metrics())
    assert {group.step for group in run.records()} == {1, 2}
