"""Three steps against a real vLLM in the trainer's own process. `make test-vllm` installs what it needs.

TRL's "colocate" mode hands weights over in memory, so it can be tried on a CPU. Its "server" mode sends them by NCCL
and cannot be tried without a GPU.
"""

import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

import trl_tiny as tiny
from dew.engines.trl import DewTrainer
from dew.rewards import verifier
from dew.tasks import TINY, task

pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`, which installs locks/vllm.txt")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import vllm_sync

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture(scope="module", params=["full", "lora"])
def trained(tmp_path_factory, request):
    """A trainer after three steps, with what vLLM sampled and what the loss was given at each."""

    class Watched(DewTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            if self.model.training:
                seen.append({k: x.clone() for k, x in batch.items() if isinstance(x, torch.Tensor)})
            return batch

    vllm_sync.on_a_cpu()
    seen = []
    batch = {"num_generations": 8, "per_device_train_batch_size": 32, "max_completion_length": 28, "max_steps": STEPS}
    sampler = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2, "vllm_max_model_length": 64}
    best = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    best |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_groups/rounds"}  # equal: the first
    sampler |= {"use_vllm": True, "learning_rate": 1e-2}  # large: a sampler left behind would be far off after a step
    args = tiny.config(tmp_path_factory.mktemp("run"), **batch, **sampler, **best)
    adapter = None
    if request.param == "lora":
        adapter = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    data = Dataset.from_list(task("countdown").rows(64))
    trainer = Watched(str(TINY), verifier("countdown"), args, data, data.select(range(4)), peft_config=adapter)
    start = vllm_sync.policy_weight(trainer)
    trainer.train()
    return trainer, seen, start


def test_what_vllm_sampled_is_what_the_policy_would_have(trained):
    """The sampler's log-probabilities are the policy's, up to its bfloat16: at every step, not only at the first."""
    _, seen, _ = trained
    assert len(seen) == STEPS
    for batch in seen:
        mask = batch["completion_mask"].bool()
        difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask].abs()
        assert difference.mean() < 0.05


def test_the_correction_is_in_force(trained):
    """The importance-sampling ratio is near 1, not exactly 1, and the loss is weighted by it."""
    trainer, seen, _ = trained
    batch = next(b for b in seen if b["advantages"].any())
    ratio = batch["importance_sampling_ratio"]
    assert (ratio != 1).any() and ((ratio - 1).abs() < 0.5).all()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    without = trainer._compute_loss(trainer.model, {**batch, "importance_sampling_ratio": torch.ones_like(ratio)})
    halved = trainer._compute_loss(trainer.model, {**batch, "importance_sampling_ratio": torch.full_like(ratio, 0.5)})
    torch.testing.assert_close(halved, without / 2)


def test_vllm_holds_the_weights_of_the_step(trained):
    trainer, _, start = trained  # with the best checkpoint's weights: those of step 1
    assert trainer.state.best_global_step == 1 and trainer.evaluate()["eval_sampler/kl"] < 0.02
    theirs, ours = vllm_sync.sampler_weight(trainer), vllm_sync.policy_weight(trainer)
    torch.testing.assert_close(theirs, ours.to(torch.bfloat16).float(), rtol=1e-2, atol=1e-4)
    assert (theirs - start).abs().mean() > 3 * (theirs - ours).abs().mean()


def test_weights_that_do_not_reach_vllm_show_in_the_divergence(trained):
    trainer, *_ = trained
    kl = trainer._metrics["train"]["sampler/kl"]
    rows = [dict(trainer.train_dataset[i]) for i in range(4) for _ in range(8)]
    trainer.model.train()
    trainer.vllm_generation.sync_weights()
    trainer._last_loaded_step = trainer.state.global_step  # the step at which TRL synced
    trainer.sample(rows)
    with torch.no_grad():
        for weight in (p for p in trainer.model.parameters() if p.requires_grad):
            weight.add_(0.5 * weight.std() * torch.randn_like(weight))
    trainer.sample(rows)
    trainer.vllm_generation.sync_weights()
    trainer.sample(rows)
    synced, stale, again = kl[-3:]
    assert max(synced, again) < 0.02 and stale > 5 * max(synced, again)
