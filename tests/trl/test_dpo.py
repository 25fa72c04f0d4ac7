"""Preference pairs: TRL's loss with weighted tokens, its gradient, refusals, metrics, records, and resuming."""

import json

import pytest
import torch
import trl_tiny

from dew.errors import ConfigError
from dew.records import RunFolder

PAIRS = [("3+1=", "4a", "7hb1"), ("2+2=", "4ab", "22"), ("1+0=", "1cd", "0a1"), ("5+0=", "5", "05gh")]


def pairs(n=8):
    from datasets import Dataset

    return Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), PAIRS[i % 4], strict=True)) for i in range(n)])


def settings(folder, **own):
    plain = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-3, "bf16": False, "use_cpu": True}
    plain |= {"gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    return {**plain, "disable_tqdm": True, "output_dir": str(folder), "loss_type": ["sigmoid"], "beta": 0.3, **own}


def lora(policy):
    """With an adapter that is not zero, so that policy and reference differ."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


def trainer(folder, full=True, ours=True, ref=None, **own):
    from trl import DPOConfig, DPOTrainer

    from dew.engines.trl import DewDPOConfig, DewDPOTrainer

    policy = trl_tiny.model(seed=0)
    if full:
        ref = ref or trl_tiny.model(seed=5)
    else:
        policy = lora(policy)
    kind, config = (DewDPOTrainer, DewDPOConfig) if ours else (DPOTrainer, DPOConfig)
    return kind(policy, ref, config(**settings(folder, **own)), None, pairs(), processing_class=trl_tiny.tokenizer())


def loss_and_gradient(trainer):
    trainer.model.train()
    if not hasattr(trainer.model, "ref_free"):
        for name, weights in trainer.model.named_parameters():  # TRL has copied the adapter as the reference: move away
            if "lora" in name and ".default." in name:
                with torch.no_grad():
                    weights.add_(0.3)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradient = [p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad and p.grad is not None]
    return loss.detach(), torch.cat(gradient), batch


@pytest.mark.parametrize("full", [True, False], ids=["full", "lora"])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_without_weights_it_is_trls_dpo(tmp_path, loss, full):
    theirs, grad, _ = loss_and_gradient(trainer(tmp_path / "a", full, ours=False, loss_type=[loss]))
    ours, own_grad, _ = loss_and_gradient(trainer(tmp_path / "b", full, loss_type=[loss], alpha=0.0))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert grad.norm() > 1e-2
    torch.testing.assert_close(own_grad, grad, atol=1e-5, rtol=1e-5)
