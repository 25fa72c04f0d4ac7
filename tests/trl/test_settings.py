"""Settings that users combine: LoRA, accumulation, mini-batches, gradient checkpointing, bf16, the hook of the docs."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from trl import GRPOConfig

import trl_tiny as tiny
from dew import get_algorithm
from dew.engines.credit import Rows, give_credit
from dew.engines.trl import DewConfig
from dew.errors import ConfigError
from dew.run.folder import RunFolder


def test_lora_trains_the_adapter_alone(tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, task_type="CAUSAL_LM")
    settings = {"algorithm_kwargs": {"kl_coef": 0.1}, "max_steps": 6, "num_generations": 8}
    trainer = tiny.trainer(tmp_path, others={"peft_config": lora}, **settings)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora_" in name for name in changed)
    first = RunFolder(tmp_path).metrics()[0]
    assert first["kl/ref"] == pytest.approx(0.0, abs=1e-6), "a fresh adapter is the base model"
    assert first["ratio/max"] == 1.0
    trainer.save_model(str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match=r"it has no name.*With beta, save the model"):
        tiny.trainer(tmp_path, policy=tiny.model(), beta=0.1)
    with pytest.raises(ConfigError, match="is an adapter, not a whole model"):
        tiny.trainer(tmp_path, policy=str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match=r"all of its parameters are frozen.*is_trainable=True"):
        tiny.trainer(tmp_path / "frozen", policy=PeftModel.from_pretrained(tiny.model(), tmp_path / "adapter"))


def test_the_docs_list_every_setting_with_its_default():
    table = (Path(__file__).parents[2] / "docs" / "trl.md").read_text().partition("### Settings")[2].partition("###")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.M))
    inherited = {f.name for f in fields(GRPOConfig)}
    defaults = {f.name: f.default for f in fields(DewConfig) if f.name not in inherited}
    assert documented.keys() == defaults.keys()
    for name, default in defaults.items():
        if default is not None:
            assert documented[name] == (str(default).lower() if isinstance(default, bool) else f"{default:g}"), name


@tiny.runs_trls_loss
def test_the_hook_of_the_docs_works_in_a_plain_grpo_trainer(tmp_path):
    """docs/trl.md shows a subclass that shapes advantages with dew.credit; as printed, they are those of `gtpo`."""
    text = (Path(__file__).parents[2] / "docs" / "trl.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "class Shaped" in block]
    names = {}
    exec(code, names)
    settings = {"per_device_train_batch_size": 48, "num_generations": 4, "max_completion_length": 6, **tiny.ON_A_CPU}
    args = GRPOConfig(str(tmp_path), max_steps=1, num_iterations=2, mask_truncated_completions=True, **settings)
    given = (tiny.model(), tiny.outcome, args, tiny.prompts())
    trainer = names["ShapedTrainer"](*given, processing_class=tiny.tokenizer())
    trainer.model.train()
    batch = tiny.generation(trainer)
    columns = {"mask": batch["completion_mask"].bool(), "entropy": trainer.entropy, "outcome": trainer.rewards[:, 0]}
    rows = Rows(group=torch.arange(48) // 4, extra=torch.zeros(48), **columns)
    torch.testing.assert_close(batch["advantages"], give_credit(get_algorithm("gtpo"), rows).advantages)
    trainer.train()
