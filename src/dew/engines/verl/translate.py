"""A recipe in TRL's words -> verl's: every key translated, told to be unused, or refused. `keys.py` has the tables.

    translate(run)   ->   Translation(overrides={"data.train_batch_size": 128, ...}, batches, algorithm, unused, notes)

What a recipe says under `verl:` are verl's own keys, nested or dotted; they win over what was translated.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dew.algorithms import Algorithm
from dew.config import Run, check_keys
from dew.engines.verl.batches import Batches
from dew.engines.verl.cadence import PROMPT_LIMIT, batches_of, cadence, length_problems
from dew.engines.verl.keys import ACTOR, DEFAULTS, FSDP, KNOWN, MODEL, NOT_NEEDED, OPTIM, ROLLOUT
from dew.engines.verl.objective import objective
from dew.engines.verl.reading import Reader
from dew.engines.verl.words import Overrides, flat, merged
from dew.errors import ConfigError
from dew.tasks import model_folder, task

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat template that adds nothing: for prompts that are written out."""
LOGGERS = ("wandb", "tensorboard", "mlflow", "swanlab", "clearml", "trackio")


@dataclass(frozen=True)
class Translation:
    overrides: Overrides
    """verl's key -> value; a leading + where verl's configuration has no such key."""
    batches: Batches
    algorithm: Algorithm
    unused: dict[str, str]
    """Keys that the recipe gives and that verl does not need, each with why."""
    notes: list[str]
    """What is not quite as on TRL."""

    def __getitem__(self, key: str) -> Any:
        return self.overrides.get(key, self.overrides.get(f"+{key}"))


def translate(run: Run, *, resume: bool = False) -> Translation:
    """The whole run in verl's words, or every reason why it cannot be."""
    check_keys(run.settings, KNOWN, source=run.source)
    own = flat(run.verl)
    reader = Reader(run, own)
    algorithm = reader.algorithm()
    parts = [_model(reader), _sampling(reader), _optimizer(reader), _data(reader), _leaves(reader, resume)]
    batches, sizes = batches_of(reader)
    parts += [objective(reader, algorithm) if algorithm is not None else {}, sizes, cadence(reader, batches)]
    reader.refuse()
    overrides = merged({key: value for part in parts for key, value in part.items()}, own)
    problems = [*reader.problems, *batches.problems(), *length_problems(overrides)]
    if problems or algorithm is None:
        listed = "\n".join(f"- {problem}" for problem in dict.fromkeys(problems))
        raise ConfigError(f"{run.source or 'configuration'} on verl:\n{listed}")
    unused = {key: NOT_NEEDED[key] for key in run.settings if key in NOT_NEEDED}
    return Translation(overrides, batches, algorithm, unused, reader.notes)


# ── the parts of a run ──────────────────────────────────────────────────────────────────────────────────────


def _model(read: Reader) -> Overrides:
    found: Overrides = {
        f"{MODEL}.path": model_folder(read("model_name_or_path", str) or ""),
        f"{MODEL}.enable_gradient_checkpointing": read("gradient_checkpointing", bool),
        f"{MODEL}.use_remove_padding": True,
        f"{ACTOR}.strategy": "fsdp2",
    }
    if read("trust_remote_code"):
        found[f"{MODEL}.trust_remote_code"] = True
    if read("attn_implementation"):
        found[f"+{MODEL}.override_config.attn_implementation"] = read("attn_implementation")
    weights = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "auto": "fp32"}
    dtype = str(read("dtype")).removeprefix("torch.")
    if dtype not in weights:
        read.problems.append(f"dtype={dtype!r}: one of {', '.join(weights)}.")
    found[f"{FSDP}.model_dtype"] = weights.get(dtype, "fp32")
    compute = "float16" if read("fp16", bool) else "float32" if read("bf16", bool) is False else "bfloat16"
    found[f"{FSDP}.dtype"] = found[f"{ROLLOUT}.dtype"] = compute
    if compute != "bfloat16":  # which FSDP computes in unless it is told otherwise here
        short = {"float32": "fp32", "float16": "fp16"}[compute]
        found[f"+{FSDP}.mixed_precision"] = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), short)
    if read("use_peft", bool):
        found[f"{MODEL}.lora_rank"] = read.count("lora_r")
        found[f"{MODEL}.lora_alpha"] = read.count("lora_alpha")
        found[f"{MODEL}.target_modules"] = read("lora_target_modules") or "all-linear"
        found[f"{ROLLOUT}.load_format"] = "safetensors"  # vLLM reads the base weights; only adapters are sent
        if "lora_dropout" not in read.given:
            read.notes.append("LoRA without dropout, which verl's has not; TRL's default is 0.05")
    if _plain(read.run):
        found[f"{MODEL}.custom_chat_template"] = PLAIN
    return found


def _plain(run: Run) -> bool:
    """Whether prompts are written out, special tokens and all, so that no chat template may be added."""
    template = getattr(task(run.task, **run.task_settings), "template", "plain") if run.task else "chat"
    return template != "chat"


def _sampling(read: Reader) -> Overrides:
    top_k = read("top_k", int)
    found: Overrides = {
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.temperature": read.number("temperature"),
        f"{ROLLOUT}.top_p": read.number("top_p"),
        f"{ROLLOUT}.top_k": top_k if top_k > 0 else -1,
        f"{ROLLOUT}.tensor_model_parallel_size": read.count("vllm_tensor_parallel_size"),
        f"{ROLLOUT}.calculate_log_probs": True,
        **_correction(read),
    }
    for name, key in (
        ("vllm_gpu_memory_utilization", "gpu_memory_utilization"),
        ("vllm_max_model_length", "max_model_len"),
        ("vllm_enable_sleep_mode", "free_cache_engine"),
    ):
        if read(name) is not None:
            found[f"{ROLLOUT}.{key}"] = read(name)
    if read("full_determinism"):
        found[f"{FSDP}.full_determinism"] = found[f"{ROLLOUT}.full_determinism"] = True
    return found


def _correction(read: Reader) -> Overrides:
    """TRL's correction for what the sampler's arithmetic differs; a bound of verl's reads low_high where it masks."""
    where = "algorithm.rollout_correction"
    if not read("vllm_importance_sampling_correction", bool):
        return {f"{where}.rollout_is": None}
    level, _, how = str(read("vllm_importance_sampling_mode")).partition("_")
    if level not in ("token", "sequence") or how not in ("truncate", "mask"):
        read.problems.append("vllm_importance_sampling_mode: token_truncate, token_mask, sequence_truncate or _mask.")
    high, low = read.number("vllm_importance_sampling_clip_max"), read.number("vllm_importance_sampling_clip_min")
    if how == "truncate" and low is not None:
        read.problems.append(f"vllm_importance_sampling_clip_min={low}: verl truncates from above only; leave it out.")
    threshold: Any = f"{low or 1e-9}_{high}" if how == "mask" else high
    return {f"{where}.rollout_is": level, f"{where}.rollout_is_threshold": threshold}


def _optimizer(read: Reader) -> Overrides:
    schedule = str(read("lr_scheduler_type"))
    key = f"{OPTIM}.lr_scheduler_type"
    schedules = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
    if schedule not in schedules and key not in read.own:
        default = " (the default)" if read.given.get("lr_scheduler_type") is None else ""
        read.problems.append(
            f"lr_scheduler_type={schedule!r}{default}: verl has constant, constant_with_warmup and cosine. Write one."
        )
    found: Overrides = {
        f"{OPTIM}.lr": read.number("learning_rate"),
        key: schedules.get(schedule, "constant"),
        f"{OPTIM}.weight_decay": read.number("weight_decay"),
        f"{OPTIM}.betas": [read.number("adam_beta1"), read.number("adam_beta2")],
        f"{OPTIM}.clip_grad": read.number("max_grad_norm"),
    }
    if read.number("adam_epsilon") != DEFAULTS["adam_epsilon"]:
        found[f"{OPTIM}.override_optimizer_config"] = {"eps": read.number("adam_epsilon")}
    optim = str(read("optim"))
    if optim in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"):
        found |= {f"{OPTIM}.optimizer": "AdamW8bit", f"{OPTIM}.optimizer_impl": "bitsandbytes.optim"}
    elif optim not in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        read.problems.append(
            f"optim={optim!r}: verl has AdamW (leave it out) and adamw_8bit here. For another write verl: "
            f"{{{OPTIM}.optimizer: NAME, {OPTIM}.optimizer_impl: MODULE}}."
        )
    return found


def _data(read: Reader) -> Overrides:
    folder = _folder(read)
    seed = read("seed", int)
    found: Overrides = {
        "data.train_files": str(folder / "data" / "train.parquet"),
        "data.val_files": str(folder / "data" / "val.parquet"),
        "data.max_prompt_length": PROMPT_LIMIT,
        "data.max_response_length": read.count("max_completion_length"),
        "data.filter_overlong_prompts": False,  # dew leaves them out when it writes the file, and says so
        "data.shuffle": read("shuffle_dataset", bool),
        "data.seed": read("data_seed", int) or seed,
        f"{ROLLOUT}.seed": seed,
        f"{ACTOR}.data_loader_seed": seed,
        f"{FSDP}.seed": seed,
        "reward.custom_reward_function.path": "pkg://dew.engines.verl.rewards",
        "reward.custom_reward_function.name": "compute_score",
    }
    if read("chat_template_kwargs"):
        found["data.apply_chat_template_kwargs"] = read("chat_template_kwargs")
    return found


def _folder(read: Reader) -> Path:
    return Path(read("output_dir", str) or "trainer_output").absolute()


def _leaves(read: Reader, resume: bool) -> Overrides:
    folder = _folder(read)
    trackers = read("report_to")
    trackers = [trackers] if isinstance(trackers, str) else list(trackers or [])
    unknown = [name for name in trackers if name not in (*LOGGERS, "none")]
    if unknown:
        read.problems.append(f"report_to={unknown[0]!r}: verl knows {', '.join(LOGGERS)} and none.")
    found: Overrides = {
        "+algorithm.dew_run.folder": str(folder),
        "+algorithm.dew_run.records_every": read("records_every", int),
        "+algorithm.dew_run.records_groups": read.count("records_groups"),
        "+algorithm.dew_run.records_keep": read("records_keep", int),
        "trainer.v1.trainer_mode": "dew_sync",
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.resume_mode": "auto" if resume else "disable",
        "trainer.logger": ["console", *(name for name in trackers if name != "none")],
        "trainer.project_name": read("project") or "dew",
        "trainer.experiment_name": read("run_name") or folder.name,
    }
    if read("save_total_limit", int) is not None:
        found["trainer.max_actor_ckpt_to_keep"] = read.count("save_total_limit")
    if read("save_only_model"):
        found[f"{ACTOR}.checkpoint.save_contents"] = ["model"]
    return found
