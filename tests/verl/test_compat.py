"""Every part of verl that dew depends on is still there. Needs verl (make test-verl)."""

import importlib
import inspect

import pytest

pytest.importorskip("verl", reason="verl is not installed: these run with `make test-verl`")

from hydra import compose, initialize_config_module
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from dew.engines.verl import plugin
from dew.engines.verl.config import MODES, check, read

SOURCES = {
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_old_log_prob": (
        '"calculate_entropy": True',
        'data.select("old_log_probs", "entropy")',
    ),
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync._compute_old_log_prob": (
        "super()._compute_old_log_prob(batch, metrics)",
    ),
    "verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories": (
        "if adv_estimator != core_algos.AdvantageEstimator.GRPO:",
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
    "verl.utils.torch_functional:entropy_from_logits_with_chunking": (
        "logits_chunk = logits[i : i + chunk_size].float()",
    ),
    "verl.utils.experimental.torch_functional:_fused_linear_for_ppo_fwd": ("logits = logits.to(torch.float32)",),
}
"""Lines of source that dew depends on, and whose change no error would show."""

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


DEFAULTS = {
    "actor_rollout_ref.model.use_remove_padding": True, "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
    "actor_rollout_ref.actor.optim.betas": [0.9, 0.999], "actor_rollout_ref.actor.optim.clip_grad": 1.0,
    "actor_rollout_ref.actor.entropy_coeff": 0, "actor_rollout_ref.actor.fsdp_config.dtype": "bfloat16",
    "actor_rollout_ref.rollout.dtype": "bfloat16", "actor_rollout_ref.rollout.calculate_log_probs": True,
    "algorithm.use_kl_in_reward": False, "algorithm.rollout_correction.bypass_mode": False, "data.shuffle": True,
    "reward.custom_reward_function.name": "compute_score", "data.filter_overlong_prompts": False,
    "trainer.save_freq": -1, "trainer.test_freq": -1,
}  # fmt: skip
"""Values that `dew train --engine verl` relies on and leaves out of the command."""


def place(path):
    """The class or function, behind Ray's wrapper if it has one."""
    module, name = path.split(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(getattr(found, "__ray_actor_class__", found), part)
    return inspect.unwrap(getattr(found, "__ray_actor_class__", found))


def composed(*overrides):
    exact = "actor_rollout_ref.actor.entropy_from_logits_with_chunking=True"
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[exact, *overrides])


def test_source():
    """Compared without white space: a formatter may have broken the lines."""
    missing = []
    for path, lines in SOURCES.items():
        source = "".join(inspect.getsource(place(path)).split())
        missing += [f"{path}: {line}" for line in lines if "".join(line.split()) not in source]
    assert not missing, "\n".join(missing)


def test_keys_of_the_configuration():
    config = composed()
    above = {key: key.rpartition(".") for key in SETTINGS}
    assert [key for key, (folder, _, name) in above.items() if name not in read(config, folder)] == []


def test_defaults():
    config = composed()
    assert {key: read(config, key) for key in DEFAULTS} == DEFAULTS


def test_settings_travel_through_hydra():
    config = composed(
        "algorithm.adv_estimator=grpo_s", "trainer.v1.trainer_mode=dew_sync", "+algorithm.dew.beta2=0.2",
        "+algorithm.dew.entropy_clip=[0.1,2.0]", "actor_rollout_ref.rollout.n=2",
    )  # fmt: skip
    algorithm = check(config)
    assert (algorithm.beta2, algorithm.entropy_clip) == (0.2, (0.1, 2.0))


def test_trainer_modes_are_registered_and_derive_from_verls():
    from dew.engines.verl import trainer  # noqa: F401

    for ours, theirs in MODES.items():
        assert issubclass(TRAINER_REGISTRY[ours], TRAINER_REGISTRY[theirs])


def test_the_entry_point_is_the_plug_in():
    from importlib.metadata import entry_points

    ours = [point for point in entry_points(group="verl.plugins") if point.name == "dew"]
    if not ours:
        pytest.skip("dew is not installed here (a checkout on PYTHONPATH): entry points come with the installation")
    assert ours[0].load() is plugin.register
