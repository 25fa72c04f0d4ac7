"""What dew leans on in verl: versions, signatures, lines of source. A release that moves one fails here, by name."""

from importlib.metadata import PackageNotFoundError, version

from dew.errors import EngineError

OLDEST, TOO_NEW = (0, 9), (0, 10)
TESTED = "0.9.1"

SIGNATURES = {
    "verl.trainer.ppo.core_algos:register_adv_est": ("name_or_enum",),
    "verl.trainer.ppo.core_algos:register_policy_loss": ("name",),
    "verl.trainer.ppo.v1.trainer_base:register_trainer": ("name",),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.__init__": ("self", "config"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.fit": ("self", "agent_loop_manager"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.on_train_begin": ("self",),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage": ("self", "batch", "metrics"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_metrics":
        ("self", "batch", "metrics", "timing_raw", "global_steps", "epoch"),
    "verl.trainer.main_ppo:run_ppo": ("config", "task_runner_class"),
    "verl.workers.utils.losses:ppo_loss": ("config", "model_output", "data", "dp_group"),
    "verl.workers.utils.padding:no_padding_2_padding": None,
}  # fmt: skip
"""What is called or overridden, with its parameters; None: only that it is there."""

SOURCES = {
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_old_log_prob": (
        '"calculate_entropy": True',
        'data.select("old_log_probs", "entropy")',
    ),
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync._compute_old_log_prob": (
        "super()._compute_old_log_prob(batch, metrics)",
    ),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage": (
        'fields = ["uid", "response_mask", "rm_scores"',
        "batch_keys=batch.keys",
        "config=self.config.algorithm",
    ),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._step_once": (
        "self._compute_old_log_prob(batch",
        "self._compute_advantage(batch",
    ),
    "verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories": (
        "if adv_estimator != core_algos.AdvantageEstimator.GRPO:",
    ),
    "verl.trainer.ppo.ray_trainer:compute_advantage": (
        '"token_level_rewards": data.batch["token_level_rewards"]',
        '"response_mask": data.batch["response_mask"]',
        'adv_kwargs["index"] = data.non_tensor_batch["uid"]',
    ),
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._dapo_filtered_keys": (
        'extra_fields.get("reward_extra_info", {})',
        "reward_extra_info[self.filter_groups_metric]",
    ),
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._agent_loop_postprocess": (
        'keys.append(f"{uid}_{session_id}_{i}")',
        'output.extra_fields["reward_extra_info"] = final_output.extra_fields["reward_extra_info"]',
    ),
    "verl.trainer.ppo.padding_utils:upsample_batch_to_divisible_size": ('template_sample["uid"] = pad_uid',),
    "verl.experimental.reward_loop.reward_manager.dapo:DAPORewardManager.run_single": (
        "reward_extra_info[key] = value",
        'reward_extra_info["acc"] = score',
    ),
    "verl.experimental.reward_loop.reward_manager.naive:NaiveRewardManager.run_single": (
        "reward_extra_info[key] = value",
        'reward_extra_info["acc"] = score',
    ),
    "verl.workers.utils.losses:ppo_loss": (
        'config.global_batch_info["dp_size"] = data["dp_size"]',
        'config.global_batch_info["batch_num_tokens"] = data["batch_num_tokens"]',
        'config.global_batch_info["global_batch_size"] = data["global_batch_size"]',
        'data["response_mask"].to(bool)',
    ),
    "verl.utils.torch_functional:entropy_from_logits_with_chunking": (
        "logits_chunk = logits[i : i + chunk_size].float()",
    ),
    "verl.utils.experimental.torch_functional:_fused_linear_for_ppo_fwd": ("logits = logits.to(torch.float32)",),
    "verl.trainer.main_ppo:TaskRunnerV1": (
        "get_trainer_cls(config.trainer.v1.trainer_mode)",
        "self.trainer.fit(self.agent_loop_manager)",
    ),
}
"""Lines that must still stand where they stood: what a signature cannot tell."""

SETTINGS = (
    "algorithm.adv_estimator", "algorithm.filter_groups.enable", "algorithm.filter_groups.metric",
    "algorithm.rollout_correction.bypass_mode", "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.actor.loss_agg_mode", "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.calculate_entropy", "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.strategy", "actor_rollout_ref.model.path",
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking",
    "actor_rollout_ref.actor.fsdp_config.entropy_from_logits_with_chunking",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.model.use_fused_kernels", "data.max_response_length",
    "data.train_files", "trainer.use_v1", "trainer.v1.trainer_mode", "trainer.v1.sync",
    "trainer.v1.colocate_async", "trainer.v1.separate_async", "trainer.n_gpus_per_node", "trainer.nnodes",
    "ray_kwargs.ray_init", "reward.reward_manager.name",
)  # fmt: skip
"""Keys of verl's configuration that dew reads."""


def require_verl() -> None:
    """One sentence instead of an error from deep inside, or of a run that trains something else."""
    try:
        found = version("verl")
    except PackageNotFoundError:
        raise EngineError(
            "verl is not installed here: pip install 'dew-rl[verl]', on every node. `dew train ... --dry-run` "
            "shows its command without it."
        ) from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers < TOO_NEW:
        raise EngineError(
            f"verl {found} is installed; dew works with verl 0.9: the trainer that carries the old policy's entropy "
            f"leans on that release's inside. pip install 'verl=={TESTED}'."
        )
