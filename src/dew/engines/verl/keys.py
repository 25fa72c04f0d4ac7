"""What becomes of every setting of a recipe on verl: translated, not needed there, or refused with what to do instead.

Recipes speak TRL's language. Nothing that they say is dropped in silence: a key stands in exactly one of these tables,
and a test holds them against TRL's own list.
"""

from typing import Any

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
OPTIM, FSDP = f"{ACTOR}.optim", f"{ACTOR}.fsdp_config"

TRANSLATED: dict[str, str] = {
    # the model
    "model_name_or_path": "actor_rollout_ref.model.path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "attn_implementation": "actor_rollout_ref.model.override_config.attn_implementation",
    "dtype": "actor_rollout_ref.actor.fsdp_config.model_dtype",
    "bf16": "actor_rollout_ref.actor.fsdp_config.dtype and .mixed_precision, actor_rollout_ref.rollout.dtype",
    "fp16": "actor_rollout_ref.actor.fsdp_config.dtype and .mixed_precision, actor_rollout_ref.rollout.dtype",
    "gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "use_peft": "actor_rollout_ref.model.lora_rank",
    "lora_r": "actor_rollout_ref.model.lora_rank",
    "lora_alpha": "actor_rollout_ref.model.lora_alpha",
    "lora_target_modules": "actor_rollout_ref.model.target_modules",
    # the algorithm
    "algorithm": "algorithm.adv_estimator, actor_rollout_ref.actor.policy_loss.loss_mode and .loss_agg_mode",
    "algorithm_kwargs": "algorithm.dew.*, actor_rollout_ref.actor.clip_ratio_*, algorithm.filter_groups",
    # batches and steps
    "num_generations": "actor_rollout_ref.rollout.n",
    "per_device_train_batch_size": "data.train_batch_size",
    "steps_per_generation": "data.train_batch_size",
    "generation_batch_size": "data.train_batch_size",
    "gradient_accumulation_steps": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "num_iterations": "actor_rollout_ref.actor.ppo_epochs",
    "max_steps": "trainer.total_training_steps",
    "num_train_epochs": "trainer.total_epochs",
    # the optimizer
    "learning_rate": "actor_rollout_ref.actor.optim.lr",
    "lr_scheduler_type": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "weight_decay": "actor_rollout_ref.actor.optim.weight_decay",
    "adam_beta1": "actor_rollout_ref.actor.optim.betas",
    "adam_beta2": "actor_rollout_ref.actor.optim.betas",
    "adam_epsilon": "actor_rollout_ref.actor.optim.override_optimizer_config",
    "max_grad_norm": "actor_rollout_ref.actor.optim.clip_grad",
    "optim": "actor_rollout_ref.actor.optim.optimizer, .optimizer_impl",
    # sampling
    "max_completion_length": "data.max_response_length",
    "temperature": "actor_rollout_ref.rollout.temperature",
    "top_p": "actor_rollout_ref.rollout.top_p",
    "top_k": "actor_rollout_ref.rollout.top_k",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "vllm_gpu_memory_utilization": "actor_rollout_ref.rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "vllm_max_model_length": "actor_rollout_ref.rollout.max_model_len",
    "vllm_enable_sleep_mode": "actor_rollout_ref.rollout.free_cache_engine",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction.rollout_is",
    "vllm_importance_sampling_mode": "algorithm.rollout_correction.rollout_is, .rollout_is_threshold",
    "vllm_importance_sampling_clip_max": "algorithm.rollout_correction.rollout_is_threshold",
    "vllm_importance_sampling_clip_min": "algorithm.rollout_correction.rollout_is_threshold",
    # order and chance
    "seed": "data.seed, actor_rollout_ref.rollout.seed, actor_rollout_ref.actor.data_loader_seed and fsdp_config.seed",
    "data_seed": "data.seed",
    "shuffle_dataset": "data.shuffle",
    "full_determinism": "actor_rollout_ref.actor.fsdp_config.full_determinism and .rollout.full_determinism",
    # what a run leaves
    "output_dir": "algorithm.dew_run.folder, trainer.default_local_dir",
    "records_every": "algorithm.dew_run.records_every",
    "records_groups": "algorithm.dew_run.records_groups",
    "records_keep": "algorithm.dew_run.records_keep",
    "save_strategy": "trainer.save_freq",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.max_actor_ckpt_to_keep",
    "save_only_model": "actor_rollout_ref.actor.checkpoint.save_contents",
    "eval_strategy": "trainer.test_freq",
    "eval_steps": "trainer.test_freq",
    "eval_on_start": "trainer.val_before_train",
    "num_generations_eval": "actor_rollout_ref.rollout.val_kwargs.n",
    "report_to": "trainer.logger",
    "run_name": "trainer.experiment_name",
    "project": "trainer.project_name",
}
"""TRL's key -> where it goes on verl. Batches, steps and save cadence are converted: docs/scale.md says how."""

DEFAULTS: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
    "gradient_checkpointing": True,
    "dtype": "float32",
    "fp16": False,
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "seed": 42,
    "shuffle_dataset": True,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "report_to": "none",
    "lora_r": 16,
    "lora_alpha": 32,
    "algorithm": "gtpo",
    "records_every": 20,
    "records_groups": 4,
    "records_keep": 400,
    "vllm_tensor_parallel_size": 1,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
}
"""What a recipe means where it says nothing: TRL's own defaults, so that both engines train the same."""


def _because(why: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, why)


NOT_NEEDED: dict[str, str] = {
    **_because(
        "verl always samples with a server",
        "use_vllm", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port", "use_cache",
        "cache_implementation", "ds3_gather_for_generation", "use_transformers_continuous_batching",
        "transformers_continuous_batching_config", "use_transformers_paged",
    ),
    **_because(
        "verl shards and averages by itself",
        "deepspeed", "fsdp", "fsdp_config", "accelerator_config", "parallelism_config", "local_rank",
        "average_tokens_across_devices", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
        "ddp_static_graph", "ddp_backend", "ddp_timeout", "save_on_each_node", "tf32",
    ),
    **_because(
        "verl packs micro-batches by tokens (actor_rollout_ref.actor.ppo_max_token_len_per_gpu)",
        "per_device_eval_batch_size", "eval_accumulation_steps", "pad_to_multiple_of", "torch_empty_cache_steps",
        "train_sampling_strategy", "length_column_name",
    ),
    **_because(
        "verl and dew write every step",
        "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter",
        "include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm", "log_completions",
        "log_multimodal", "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo",
        "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "skip_memory_metrics", "debug",
    ),
    **_because(
        "verl loads rows and judges answers in its own way",
        "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
        "remove_unused_columns", "label_names", "ignore_data_skip", "dataset_config", "dataset_train_split",
        "dataset_test_split", "dataset_streaming", "prediction_loss_only", "eval_do_concat_batches",
        "eval_use_gather_object", "include_for_metrics", "batch_eval_metrics", "eval_delay", "do_train", "do_eval",
        "do_predict", "ignore_bias_buffers", "bf16_full_eval", "fp16_full_eval",
        "restore_callback_states_from_checkpoint", "enable_jit_checkpoint",
    ),
    **_because(
        "it belongs to a setting that is refused or not part of dew's algorithms",
        "guide_completions", "guide_weight", "guide_failed_weight", "guide_timeout", "hub_token", "hub_private_repo",
        "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision", "metric_for_best_model",
        "greater_is_better", "ref_model_mixup_alpha", "ref_model_sync_steps", "entropy_coef_min", "entropy_coef_max",
        "entropy_coef_delta", "entropy_target", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos",
        "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "bnb_4bit_quant_type", "use_bnb_nested_quant",
        "bnb_4bit_quant_storage", "torch_compile_backend", "torch_compile_mode", "liger_kernel_config",
        "vllm_importance_sampling_cap",
    ),
    "exact_head": "verl computes log-probabilities and entropy itself",
    "captured_sampling": "verl samples with its own rollout engine",
    **_because("verl runs reward functions in workers of its own", "reward_timeout", "reward_memory"),
    "gradient_checkpointing_kwargs": "verl checkpoints without re-entrance, always",
}  # fmt: skip
"""Keys whose value changes nothing on verl, each with why. A dry run lists those that a recipe gives."""

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_cpu": ((False,), "verl trains on GPUs: --use_cpu false, or engine: trl"),
    "dataset_name": ((None,), "write task: owner/name with task_settings {problem: ..., answer: ...} and a verifier"),
    "reward_funcs": (
        (None, []),
        "verl asks one function: name a verifier, or your own as verl: {reward.custom_reward_function.path: file.py, "
        "reward.custom_reward_function.name: function}",
    ),
    "reward_weights": ((None,), "there is one reward on verl; leave it out"),
    "reward_model_name_or_path": ((None,), "write verl: {reward.reward_model...} as verl's pages say"),
    "mask_truncated_completions": (
        (False,),
        "verl trains on truncated answers too: write false, and punish length with algorithm_kwargs {overlong: soft, "
        "overlong_buffer: 512} if need be",
    ),
    "guide": ((None,), "the mixed policy is TRL's engine's alone; leave it out"),
    "model_revision": (("main", None), "verl loads the default revision: download the other to a folder and name that"),
    "model_init_kwargs": ((None, {}), "write verl: {+actor_rollout_ref.model.override_config.KEY: VALUE}"),
    "load_in_8bit": ((False,), "verl does not train quantised weights here; leave it out"),
    "load_in_4bit": ((False,), "verl does not train quantised weights here; leave it out"),
    "lora_dropout": ((0, 0.0), "verl's LoRA has no dropout: write 0, or leave it out"),
    "lora_modules_to_save": ((None,), "verl's LoRA does not know it; leave it out"),
    "lora_target_parameters": ((None,), "verl's LoRA does not know it; leave it out"),
    "lora_task_type": (("CAUSAL_LM",), "verl's LoRA is CAUSAL_LM; leave it out"),
    "use_rslora": ((False,), "verl's LoRA does not know it: scale lora_alpha instead"),
    "use_dora": ((False,), "verl's LoRA does not know it; leave it out"),
    "lr_scheduler_kwargs": ((None, {}), "write verl: {actor_rollout_ref.actor.optim.min_lr_ratio: ...} for a cosine"),
    "optim_args": ((None,), "write verl: {actor_rollout_ref.actor.optim.override_optimizer_config: {...}}"),
    "optim_target_modules": ((None,), "verl has no such optimizer; leave it out"),
    "label_smoothing_factor": ((0, 0.0), "it has no meaning in a policy loss; leave it out"),
    "neftune_noise_alpha": ((None,), "verl does not know it; leave it out"),
    "router_aux_loss_coef": (
        (None,),
        "write verl: {+actor_rollout_ref.model.override_config.router_aux_loss_coef: ...}",
    ),
    "disable_dropout": ((False,), "write verl: {+actor_rollout_ref.model.override_config.attention_dropout: 0}"),
    "cast_lm_head_to_fp32": ((False,), "verl does not know it; leave it out"),
    "use_liger_kernel": ((False,), "write verl: {actor_rollout_ref.model.use_liger: true}"),
    "torch_compile": ((False,), "write verl: {actor_rollout_ref.actor.use_torch_compile: true}"),
    "auto_find_batch_size": ((False,), "set verl: {actor_rollout_ref.actor.ppo_max_token_len_per_gpu: ...} instead"),
    "min_p": ((None, 0, 0.0), "verl does not pass it to the sampler; leave it out"),
    "repetition_penalty": ((1, 1.0), "verl does not pass it to the sampler, and it would bias the ratio; leave it out"),
    "generation_kwargs": ((None, {}), "write verl: {+actor_rollout_ref.rollout.engine_kwargs.vllm.KEY: VALUE}"),
    "vllm_mode": (("colocate",), "verl places the sampler itself: write colocate, or leave it out"),
    "vllm_model_impl": (("vllm",), "write verl: {+actor_rollout_ref.rollout.engine_kwargs.vllm.model_impl: ...}"),
    "vllm_server_base_url": ((None,), "verl starts its own servers; leave it out"),
    "vllm_structured_outputs_regex": ((None,), "verl does not pass it to the sampler; leave it out"),
    "max_tool_calling_iterations": (
        (None,),
        "write verl: {actor_rollout_ref.rollout.multi_turn...} as verl's pages say",
    ),
    "delta": ((None,), "the loss is the algorithm's; leave it out"),
    "off_policy_mask_threshold": ((None,), "the loss is the algorithm's; leave it out"),
    "top_entropy_quantile": ((1, 1.0), "write algorithm: forking_tokens, algorithm_kwargs {keep: 0.2}"),
    "entropy_coef": ((0, 0.0), "the loss has no entropy term; algorithm: entropy_advantage rewards hesitation"),
    "use_adaptive_entropy": ((False,), "the loss has no entropy term; algorithm: entropy_advantage rewards hesitation"),
    "multi_objective_aggregation": (("sum_then_normalize",), "there is one reward on verl; leave it out"),
    "loss_type": ((None,), "set by the algorithm; leave it out"),
    "scale_rewards": ((None,), "set by the algorithm; leave it out"),
    "importance_sampling_level": ((None,), "set by the algorithm; leave it out"),
    "use_bias_correction_kl": ((None, False), "set by the algorithm; leave it out"),
    "sync_ref_model": ((False,), "verl's reference policy stays as it is; leave it out"),
    "push_to_hub": ((False,), "export the model when the run is done, and upload that"),
    "load_best_model_at_end": ((False,), "choose a checkpoint yourself with dew eval"),
    "resume_from_checkpoint": ((None, False), "dew resume FOLDER goes on with a run"),
}
"""Keys that would change the run and that verl cannot follow: values that ask for nothing, and what to do instead."""

SET_BY_ALGORITHM = {"epsilon": "clip_low", "epsilon_high": "clip_high", "beta": "kl_coef"}
"""TRL's names for settings of the algorithm; another value than the algorithm's is an error."""

OUTCOME = "outcome_reward"
"""May name the verifier, which decides in any case."""

KNOWN = (*TRANSLATED, *NOT_NEEDED, *REFUSED, *SET_BY_ALGORITHM, OUTCOME)
