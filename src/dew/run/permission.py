"""What an untrusted config file may set: plain training settings, with plain values.

By default a file is trusted. With `--untrusted`, any other setting, which may run code, send data, write elsewhere or
exhaust memory, must be repeated on the command line (`--push_to_hub true`).
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dew.errors import ConfigError, Problem
from dew.run.config import Run, flat

NAMES = """
engine problems scores task task_settings verifier algorithm algorithm_kwargs outcome_reward reward_funcs
reward_weights model_name_or_path dtype attn_implementation=sdpa attn_implementation=eager dataset_name dataset_config
output_dir seed dataset_train_split dataset_test_split dataset_streaming shuffle_dataset num_generations
max_completion_length top_p mask_truncated_completions temperature top_k min_p use_vllm vllm_mode=colocate
vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_enable_sleep_mode captured_sampling exact_head less_padding
per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps steps_per_generation
generation_batch_size num_iterations num_train_epochs max_steps warmup_steps learning_rate lr_scheduler_type optim
weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon epsilon epsilon_high beta loss_type scale_rewards
importance_sampling_level bf16 fp16 use_cpu gradient_checkpointing activation_checkpointing torch_compile use_peft
lora_r lora_alpha lora_dropout lora_target_modules load_in_4bit load_in_8bit run_name logging_steps
report_to=tensorboard report_to=none save_strategy save_steps save_total_limit eval_strategy eval_steps
records_every records_groups records_keep data.train_batch_size
data.max_prompt_length data.max_response_length trainer.nnodes trainer.n_gpus_per_node trainer.total_epochs
trainer.total_training_steps trainer.save_freq trainer.test_freq trainer.v1.trainer_mode model.lora_rank
model.lora_alpha model.target_modules actor.ppo_mini_batch_size actor.optim.lr actor.ppo_epochs
actor.ppo_max_token_len_per_gpu actor.fsdp_config.dtype actor.fsdp_config.offload_policy
actor.fsdp_config.mixed_precision.param_dtype actor.fsdp_config.mixed_precision.reduce_dtype rollout.n rollout.dtype
actor.fsdp_config.mixed_precision.buffer_dtype rollout.gpu_memory_utilization rollout.tensor_model_parallel_size
rollout.load_format=safetensors
"""
ALLOWED = frozenset(NAMES.split())
"""Names, or name=value if only that value is allowed. Names with dots are verl's keys without `actor_rollout_ref.`."""
WORD, PATH = re.compile(r"[\w-]{1,200}", re.ASCII), re.compile(r"(\w[\w.-]*/)*\w[\w.-]*", re.ASCII)
ALGORITHM = re.compile(r"[\w-]{1,100}(\([\w=,. -]{0,200}\))?", re.ASCII)
PATHS = ("model_name_or_path", "dataset_name", "task", "output_dir")  # hub names, or below the current folder
LARGEST = 2**32  # the largest seed


def check_permission(run: Run, typed: Collection[str], untrusted: bool) -> None:
    """Raise an error if an untrusted file has settings that are neither allowed nor `typed` on the command line."""
    keys = {**run.to_dict(), **{f"verl.{key}": value for key, value in flat(run.verl).items()}, "verl": None}
    refused = {key: value for key, value in keys.items() if untrusted and not _allowed(key, value)}
    approved = [key for key in refused for name in typed if key == name or key.startswith(f"{name}.")]
    remedy = "Repeat the setting on the command line to approve it, or run without --untrusted."
    what = "{}: {:.80} needs your approval: it is not a plain training setting."
    problems = [Problem(what.format(k, repr(v)), remedy=remedy) for k, v in refused.items() if k not in approved]
    if problems:
        raise ConfigError(problems, source=run.source)


def _allowed(key: str, value: Any) -> bool:
    name = re.sub(r"^verl\.\+*(actor_rollout_ref\.)?", "", key)
    if key.startswith("verl.") != ("." in name):  # without a dot, hydra replaces a whole group of settings
        return False
    if key in PATHS and isinstance(value, str):
        return PATH.fullmatch(value) is not None and Path(value).resolve().is_relative_to(Path.cwd())
    if key == "algorithm" and isinstance(value, str):
        return ALGORITHM.fullmatch(value) is not None
    off = "." not in key and (value is None or value is False)
    return off or f"{name}={value}" in ALLOWED or (name in ALLOWED and _is_plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | Mapping):
        return all(map(_is_plain, [*value, *value.values()] if isinstance(value, Mapping) else value))
    if isinstance(value, str):
        return WORD.fullmatch(value) is not None
    return value is None or (isinstance(value, int | float) and abs(value) <= LARGEST)
