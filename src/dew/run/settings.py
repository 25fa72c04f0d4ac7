"""The settings that both engines have, under TRL's names, and the batch sizes that follow from them.

On TRL, settings are used as they are: TRL's dataclasses check the types, this table checks the numbers. For verl, they
are translated to verl's keys (engines/verl/launch.py). TRL counts answers and optimizer steps, verl prompts and
generations; `Batches` has both.
"""

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dew.errors import ConfigError, Problem, did_you_mean

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction.rollout_is"


@dataclass(frozen=True)
class Setting:
    """A setting's key on verl, its default on TRL, and its limits."""

    verl: str = ""
    """verl's key, with a leading + if verl's config does not have it. Empty: engines/verl/launch.py converts it."""
    default: Any = None
    """TRL's default. With None, verl's key is not set."""
    steps: bool = False
    """Whether it counts optimizer steps, which are converted to generations for verl if positive."""
    same: tuple[Any, ...] | None = None
    """If given, the setting is not translated: verl's key, if there is one, must be set too, unless the value is one of
    these."""
    least: float | None = None
    above: float | None = None
    """Lower limits of a number: inclusive (`least`) and exclusive (`above`)."""

    def problem(self, name: str, value: Any) -> Problem | None:
        """Return a problem if the value is text, or a number below its limit or not finite."""
        limit = self.above if self.least is None else self.least
        if limit is None or not isinstance(value, int | float | str):
            return None
        if not isinstance(value, str) and limit <= value < math.inf and value != self.above:
            return None
        return Problem(f"{name}={value!r}.", remedy=f"Give a number {'>' if self.least is None else '>='} {limit:g}.")


SETTINGS = {
    "model_name_or_path": Setting(),
    "trust_remote_code": Setting(f"{MODEL}.trust_remote_code"),
    "gradient_checkpointing": Setting(f"{MODEL}.enable_gradient_checkpointing", True),
    "algorithm": Setting(),
    "algorithm_kwargs": Setting(),
    # sampling
    "num_generations": Setting(default=8),
    "max_completion_length": Setting("data.max_response_length", 512, least=1),
    "chat_template_kwargs": Setting("+data.apply_chat_template_kwargs"),
    "temperature": Setting(f"{ROLLOUT}.temperature", 1.0, above=0),
    "top_p": Setting(f"{ROLLOUT}.top_p", 1.0, above=0),
    "top_k": Setting(default=0),
    "min_p": Setting(same=(0.0,)),
    "repetition_penalty": Setting(same=(1.0,)),
    "vllm_tensor_parallel_size": Setting(default=1),
    "vllm_gpu_memory_utilization": Setting(f"{ROLLOUT}.gpu_memory_utilization"),
    "vllm_importance_sampling_correction": Setting(CORRECTION, same=(True,)),
    "vllm_importance_sampling_mode": Setting(CORRECTION, same=("sequence_mask",)),
    "vllm_importance_sampling_clip_max": Setting(f"{CORRECTION}_threshold", same=(3.0,)),
    "vllm_importance_sampling_clip_min": Setting(f"{CORRECTION}_threshold", same=()),
    # batches
    "per_device_train_batch_size": Setting(default=8, least=1),
    "gradient_accumulation_steps": Setting(default=1, least=1),
    "steps_per_generation": Setting(least=1),
    "num_iterations": Setting(default=1, least=1),
    "generation_batch_size": Setting("data.train_batch_size", same=(), least=1),
    # optimizer
    "learning_rate": Setting(f"{ACTOR}.optim.lr", 1.0e-6, least=0),
    "lr_scheduler_type": Setting(f"{ACTOR}.optim.lr_scheduler_type", same=("constant", "constant_with_warmup")),
    "weight_decay": Setting(f"{ACTOR}.optim.weight_decay", same=(0.0,), least=0),
    "optim": Setting(f"{ACTOR}.optim.optimizer", same=("adamw_torch", "adamw_torch_fused")),
    "adam_beta1": Setting(f"{ACTOR}.optim.betas", same=(0.9,)),
    "adam_beta2": Setting(f"{ACTOR}.optim.betas", same=(0.999,)),
    "max_grad_norm": Setting(f"{ACTOR}.optim.clip_grad", same=(1.0,)),
    "seed": Setting("data.seed", 42),
    # length of the run
    "num_train_epochs": Setting(default=3, above=0),
    "max_steps": Setting("trainer.total_training_steps", -1, steps=True),
    "warmup_steps": Setting(f"{ACTOR}.optim.lr_warmup_steps", 0, steps=True),
    "save_steps": Setting("trainer.save_freq", 500, steps=True),
    "eval_steps": Setting("trainer.test_freq", -1, steps=True),
    "save_total_limit": Setting("trainer.max_actor_ckpt_to_keep"),
    # the run's folder
    "output_dir": Setting(default="trainer_output"),
    "records_every": Setting("+algorithm.dew_run.records_every", 20, least=0),
    "records_groups": Setting("+algorithm.dew_run.records_groups", 4, least=1),
    "records_keep": Setting("+algorithm.dew_run.records_keep", 400, least=0),
    # rewards and adapters
    "reward_funcs": Setting("reward.custom_reward_function.path", same=([],)),
    **dict.fromkeys(("generation_kwargs", "reward_model_name_or_path", "reward_weights", "guide"), Setting(same=({},))),
    "use_peft": Setting(f"{MODEL}.lora_rank", same=(False,)),
    "lora_r": Setting(f"{MODEL}.lora_rank", same=()),
    "lora_alpha": Setting(f"{MODEL}.lora_alpha", same=()),
    "lora_target_modules": Setting(f"{MODEL}.target_modules", same=()),
}

ALGORITHM_NAMES = {"epsilon": "clip_low", "epsilon_high": "clip_high", "beta": "kl_coef",
                   "sapo_temperature_pos": "tau_pos", "sapo_temperature_neg": "tau_neg"}  # fmt: skip
"""TRL's names for settings of the algorithm."""
SAME = {"activation_checkpointing": "gradient_checkpointing"}
"""New names of settings in transformers -> their names in the table."""
CHOOSE_ALGORITHM = ("loss_type", "importance_sampling_level", "scale_rewards", "use_bias_correction_kl")
"""TRL's settings that describe an algorithm. If none is named, the TRL engine uses them to choose one."""


def misspelled(keys: Iterable[str]) -> list[Problem]:
    """Find keys that are almost one in the table. A test checks that no two settings of TRL have names this similar."""
    guesses = {key: did_you_mean(key, SETTINGS, cutoff=0.92) for key in keys if key not in SETTINGS}
    return [Problem(f"{key} is not a setting.", remedy=guess) for key, guess in guesses.items() if guess]


def algorithm_settings(value: Any) -> dict[str, Any]:
    """Return `algorithm_kwargs` as a dict, also if it is JSON text."""
    given = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            given = json.loads(value)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        remedy = """Write e.g. '{"alpha2": 0.2}'."""
        raise ConfigError(Problem(f"algorithm_kwargs={value!r} is not a mapping in YAML or JSON.", remedy=remedy))
    return dict(given)


def nearest(n: int, multiple_of: int, unit: int = 1) -> str:
    low = n // multiple_of * multiple_of
    return " or ".join(str(x // unit) for x in (low, low + multiple_of) if x)


@dataclass(frozen=True)
class Batches:
    """Sizes of a generation and of an optimizer step, summed over all processes."""

    sampled: int
    """Answers per generation, sampled at once."""
    trained: int
    answers: int
    """G, the number of answers per prompt."""
    passes: int = 1
    """How many times each generation is trained on."""
    processes: int = 1
    """One per GPU."""
    micro: int = 0
    """Answers per micro-batch on one process (TRL's per_device_train_batch_size). 0 on verl, which counts tokens."""

    @property
    def prompts(self) -> int:
        return self.sampled // self.answers

    @property
    def optimizer_steps(self) -> float:
        return self.passes * self.sampled / self.trained

    @property
    def per_process(self) -> int:
        """Answers that each process samples at once."""
        return self.sampled // self.processes

    @property
    def fits(self) -> bool:
        return self.sampled % self.answers == 0

    def __str__(self) -> str:
        processes = f"{self.processes} process{'es' * (self.processes > 1)}"
        if not self.fits:
            factors = f"{self.micro} per device x {processes} x {self.per_process // max(1, self.micro)} micro-batches"
            return f"{factors} = {self.sampled} answers at once: not a whole number of groups of {self.answers}"
        steps, micro = self.optimizer_steps, f" in micro-batches of {self.micro}" if self.micro else ""
        return (
            f"{self.prompts} prompt{'s' * (self.prompts > 1)} x {self.answers} answers = {self.sampled} answers per "
            f"generation on {processes}; {self.trained} answer{'s' * (self.trained > 1)} per optimizer step{micro}, "
            f"{steps:g} optimizer step{'s' * (steps != 1)} per generation"
        )

    def misaligned(self, setting: str, unit: int) -> Problem | None:
        """Return a problem unless a generation has a whole number of optimizer steps. `unit`: answers per `setting`."""
        if self.sampled % self.trained == 0:
            return None
        what = f"{self}: optimizer steps do not line up with generations."
        return Problem(what, remedy=f"Nearest: {setting}={nearest(self.sampled, self.trained, unit)}.")

    def check_rows(self, data: Any, reduce: str = "per_device_train_batch_size or steps_per_generation") -> None:
        """Raise an error if there are too few prompts for one generation: the engines would train on nothing."""
        rows = len(data) if hasattr(data, "__len__") and not isinstance(data, Mapping) else math.inf
        if rows < self.prompts:
            what = f"The data has {rows} problems, fewer than the {self.prompts} prompts of a generation."
            raise ConfigError(Problem(what, remedy=f"Give at least {self.prompts} problems, or reduce {reduce}."))
