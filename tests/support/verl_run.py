"""Whole runs of verl on the tiny model: data, overrides, and the process that runs them."""

import os
import subprocess
import sys
from pathlib import Path

from dew.tasks import TINY, task

HERE = Path(__file__).parent
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write_data(folder: Path, problems: int = 64) -> Path:
    """Countdown problems in verl's format."""
    import pandas

    rows = task("countdown").rows(problems)
    path = folder / "train.parquet"
    pandas.DataFrame(
        {
            "data_source": "countdown",
            "prompt": [[{"role": "user", "content": row["prompt"]}] for row in rows],
            "reward_model": [{"style": "rule", "ground_truth": row["answer"]} for row in rows],
            "extra_info": [{"index": i, "numbers": row["numbers"]} for i, row in enumerate(rows)],
        }
    ).to_parquet(path)
    return path


def overrides(data: Path, folder: Path, *, workers: int = 2, steps: int = 2, answers: int = 4, prompts: int = 4):
    """Two simulated GPUs, four problems of four answers a step, everything small."""
    return [
        f"data.train_files={data}", f"data.val_files={data}", f"data.train_batch_size={prompts}",
        "data.max_prompt_length=32", "data.max_response_length=48", "data.dataloader_num_workers=0",
        "data.filter_overlong_prompts=False", "data.val_max_samples=2",
        f"actor_rollout_ref.model.path={TINY}", "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"actor_rollout_ref.model.custom_chat_template=\"{TEMPLATE}\"",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.optim.lr=1e-4", "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.rollout.name=cpu", "actor_rollout_ref.rollout.mode=async",
        f"actor_rollout_ref.rollout.n={answers}", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1", "reward.custom_reward_function.path=pkg://dew.engines.verl.data",
        "trainer.device=cpu", f"trainer.n_gpus_per_node={workers}", "trainer.nnodes=1", "trainer.logger=[console]",
        "trainer.val_before_train=False", "trainer.test_freq=-1", f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=50", "trainer.save_freq=-1", f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.resume_mode=disable",
        "ray_kwargs.ray_init.num_cpus=32", f"+ray_kwargs.ray_init.num_gpus={workers}",
        "+ray_kwargs.ray_init.include_dashboard=False", "+ray_kwargs.ray_init.object_store_memory=200000000",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"hydra.run.dir={folder / 'hydra'}", "hydra.output_subdir=null",
    ]  # fmt: skip


def with_rollout_apart(folder: Path) -> list[str]:
    """One more simulated GPU, for a separate rollout replica that gets the weights through a file."""
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    return [
        "trainer.v1.trainer_mode=dew_separate_async", "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "++ray_kwargs.ray_init.num_gpus=3",
        "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1",
        f"{engine}.backend=file", f"{engine}.custom_backend_module=verl_cpu_rollout",
        f"+{engine}.engine_kwargs.file.folder={folder / 'weights'}",
    ]  # fmt: skip


def run_verl(folder: Path, settings: list[str], timeout: int = 1500) -> subprocess.CompletedProcess:
    """`python -m dew.engines.verl.main` in its own process; its Ray ends with it. Batches go to folder/batches."""
    (folder / "batches").mkdir(parents=True, exist_ok=True)
    paths = [str(HERE), str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "DEW_DUMP": str(folder / "batches"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0", "HYDRA_FULL_ERROR": "1",
    }  # fmt: skip
    with (folder / "log.txt").open("a") as log:
        done = subprocess.run(
            [sys.executable, "-m", "dew.engines.verl.main", *settings],
            cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=timeout, check=False,
        )  # fmt: skip
    return done
