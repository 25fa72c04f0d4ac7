"""What dew relies on in TRL: a release that changes one of these fails here first."""

import inspect
import sys
from types import ModuleType

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

import trl_tiny as tiny
from dew.engines.compat import FUSED_HEAD, HEAD_OUTPUTS, IMAGE_KEYS, answers_of
from dew.engines.trl import DewTrainer
from dew.errors import EngineError

BATCH_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")
"""Keys that `_generate_and_score_completions` always returns."""

GENERATED = ("prompt_ids", "completion_ids", "tool_mask", "completions", "logprobs", "extra_fields", "images",
             "tool_images")  # fmt: skip
"""The eight values that `_generate` returns, in this order."""

OPTIONAL_KEYS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "tool_mask",
                 "importance_sampling_ratio")  # fmt: skip
"""Keys that `_generate_and_score_completions` returns when applicable, with one row per completion."""

OVERRIDDEN = ("train", "_get_train_sampler", "_load_optimizer_and_scheduler", "_generate_and_score_completions",
              "_generate", "_generate_single_turn", "_get_per_token_logps_and_entropies", "_compute_loss",
              "training_step", "_get_grad_norm", "evaluation_loop", "log", "_save_checkpoint")  # fmt: skip
"""The methods that `DewTrainer` overrides. All but `_compute_loss` call TRL's own and work on what it returns."""


def changed(what):
    return f"TRL has changed: {what}. See dew/engines/compat.py and what reads it."


def test_the_overridden_methods_are_trls():
    own = {name for name, x in vars(DewTrainer).items() if callable(x) and hasattr(GRPOTrainer, name)} - {"__init__"}
    assert own == set(OVERRIDDEN), changed("GRPOTrainer's methods, or this list is not complete")


def test_the_fused_head_has_its_name_and_outputs():
    assert hasattr(utils, FUSED_HEAD), changed(f"trl.trainer.utils.{FUSED_HEAD} is gone")
    fields = list(utils.FusedCausalLMOutput.__dataclass_fields__)
    assert fields[1 : 1 + len(HEAD_OUTPUTS)] == list(HEAD_OUTPUTS), changed("the outputs of the fused head")


def test_the_head_takes_the_arguments_that_are_passed():
    found = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    expected = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]
    assert found[:7] == expected, changed("arguments of _get_per_token_logps_and_entropies")
    assert set(IMAGE_KEYS) <= set(found), changed("image arguments of _get_per_token_logps_and_entropies")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    settings = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, **tiny.ON_A_CPU}
    args = GRPOConfig(str(tmp_path_factory.mktemp("plain")), num_iterations=2, **settings)
    trainer = GRPOTrainer(tiny.model(), tiny.has_a, args, tiny.prompts(), processing_class=tiny.tokenizer())
    trainer.model.train()
    return trainer


@tiny.runs_trls_loss
def test_the_batch_has_the_keys_and_shapes(plain):
    calls = []
    inner = plain._get_per_token_logps_and_entropies
    plain._get_per_token_logps_and_entropies = lambda *a, **k: calls.append(inner(*a, **k)) or calls[-1]
    batch = plain._generate_and_score_completions(tiny.rows(plain))
    assert set(BATCH_KEYS) <= set(batch), changed("keys of the batch")
    assert set(batch) <= {*BATCH_KEYS, *OPTIONAL_KEYS, *IMAGE_KEYS}, changed("a new key of the batch")
    assert batch["advantages"].shape == (8,), changed("shape of advantages")
    assert batch["num_items_in_batch"].ndim == 0, changed("num_items_in_batch")
    assert len(calls) == 1 and len(calls[0]) == 3, changed(
        "the pass over the old log-probabilities, or its three values"
    )
    assert batch["old_per_token_logps"] is calls[0][0], changed(
        "the old log-probabilities are no longer returned unchanged"
    )


def test_generate_returns_eight_values_in_order(plain):
    values = plain._generate(["1+1="] * 4)
    assert len(values) == len(GENERATED), changed(f"_generate returns {len(values)} values")
    named = dict(zip(GENERATED, values, strict=True))
    assert len(named["prompt_ids"]) == len(named["completion_ids"]) == len(named["completions"]) == 4
    assert isinstance(named["completions"][0], str) and isinstance(named["completion_ids"][0], list)
    assert named["tool_mask"] is None and named["logprobs"] is None


def test_rewards_come_back_gathered_one_column_each(plain):
    parts = plain._calculate_rewards(tiny.rows(plain), ["1+1="] * 8, ["a"] * 8, [[3]] * 8)
    assert parts.shape == (8, 1), changed("_calculate_rewards")


def test_token_advantages_pass_the_shuffle_and_the_split():
    batch = {"x": torch.arange(8).reshape(4, 2), "divisor": torch.tensor(3.0), "guided": torch.arange(4)}
    parts = split_tensor_dict(shuffle_sequence_dict(batch), 2)
    assert all((part["x"][:, 0] == 2 * part["guided"]).all() and part["divisor"] == 3 for part in parts)


def test_the_logs_and_state_that_are_read_exist(plain):
    for name in ("_logs", "_metrics", "_pending_extra_logs", "_step", "_buffered_inputs", "reward_func_names",
                 "reward_weights", "eos_token_ids", "_tokenizer", "num_generations", "num_generations_eval",
                 "aux_loss_enabled", "shuffle_dataset", "temperature", "use_vllm", "tools"):  # fmt: skip
        assert hasattr(plain, name), changed(f"GRPOTrainer.{name} is gone")
    assert {"prompt", "completion", "rewards", "advantages", "extra"} <= set(plain._logs), changed("_logs")
    sampler = plain._get_train_sampler()
    assert hasattr(sampler, "generator") and hasattr(sampler, "num_samples"), changed("RepeatSampler")


def test_another_number_of_generated_values_is_an_error():
    with pytest.raises(EngineError, match="9 values from _generate"):
        answers_of([None] * (len(GENERATED) + 1))


def test_unsloth_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    with pytest.raises(EngineError, match=r"Unsloth is imported.*loss would silently not run.*peft_config"):
        tiny.trainer(tmp_path)
