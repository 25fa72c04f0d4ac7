"""DewConfig: TRL's GRPOConfig, the name of an algorithm, and what a run writes down."""

import json
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from trl import GRPOConfig

from dew.algorithms import Algorithm, DrGRPO, get_algorithm
from dew.engines.trl.batches import Batches
from dew.errors import ConfigError


def _set_by_algorithm(setting: str) -> Any:
    return field(default=None, metadata={"help": f"Set by the algorithm: write algorithm_kwargs['{setting}']."})


@dataclass
class DewConfig(GRPOConfig):  # type: ignore[misc]
    """Everything that GRPOConfig has. What an algorithm defines (clipping, KL, loss, scaling) comes from it."""

    _VALID_DICT_FIELDS: ClassVar = [*GRPOConfig._VALID_DICT_FIELDS, "algorithm_kwargs"]

    algorithm: str = field(
        default="gtpo",
        metadata={"help": "gtpo, grpo_s, grpo, dapo, dr_grpo, gspo, forking_tokens, entropy_advantage or your own."},
    )
    algorithm_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Settings beyond the algorithm's own, e.g. {'alpha2': 0.2}."}
    )
    outcome_reward: str | None = field(
        default=None,
        metadata={
            "help": "Name of the reward function that decides whether an answer is correct. Needed with several; the "
            "others are added to its reward and never decide."
        },
    )
    reward_timeout: float = field(
        default=600.0, metadata={"help": "Seconds that one of your own reward functions may take for a batch."}
    )
    reward_memory: float | None = field(
        default=None,
        metadata={"help": "GiB that the process of a reward function given by path may hold; half of the machine's."},
    )
    records_every: int = field(
        default=20, metadata={"help": "Write token records every so many optimizer steps, and at the first; 0: never."}
    )
    records_groups: int = field(default=4, metadata={"help": "Groups in each token record."})
    records_keep: int = field(
        default=400,
        metadata={"help": "Token records to keep: beyond them every second one goes. 0: keep all."},
    )
    exact_head: bool = field(
        default=True,
        metadata={
            "help": "Log-probabilities and entropies by dew's operator, exact in float32 also for bf16 weights; false: "
            "by TRL's."
        },
    )
    captured_sampling: bool = field(
        default=True,
        metadata={
            "help": "On a GPU without vLLM: sample by replaying captured one-token steps, many times faster than "
            "generate; false: by generate."
        },
    )
    guide: str | None = field(
        default=None,
        metadata={
            "help": "Mixed policy: a model (path or name), an OpenAI-compatible server (http://...) or a .jsonl file "
            "of recorded completions that answers each prompt too."
        },
    )
    guide_completions: int = field(
        default=1, metadata={"help": "How many of a group's num_generations answers the guide gives."}
    )
    guide_weight: float = field(default=1.0, metadata={"help": "Weight of the guide's answers in the loss."})
    guide_failed_weight: float = field(
        default=1.0,
        metadata={"help": "Weight of the batch made of groups in which the policy's own answers all failed."},
    )
    guide_timeout: float = field(default=120.0, metadata={"help": "Seconds that a guide's server may take to answer."})

    epsilon: float | None = _set_by_algorithm("clip_low")
    epsilon_high: float | None = _set_by_algorithm("clip_high")
    beta: float | None = _set_by_algorithm("kl_coef")
    loss_type: str | None = field(default=None, metadata={"help": "Set by the algorithm."})
    scale_rewards: str | None = field(default=None, metadata={"help": "Set by the algorithm."})
    importance_sampling_level: str | None = field(default=None, metadata={"help": "Set by the algorithm."})
    use_bias_correction_kl: bool | None = field(default=None, metadata={"help": "Set by the algorithm."})

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, Algorithm):  # from Python, an object says more than a name
            self.algorithm, self.algorithm_kwargs = self.algorithm.name, _beyond_defaults(self.algorithm)
        problems, algorithm = self._algorithm_problems()
        problems += self._batch_problems() + self._guide_problems() + _unsupported(self)
        if algorithm is not None:
            problems += _conflicts(self, algorithm)
        if problems:
            raise ConfigError("\n".join(f"- {problem}" for problem in problems))
        assert algorithm is not None
        for name, value in _trl_settings(algorithm).items():
            setattr(self, name, value)
        super().__post_init__()

    def build_algorithm(self) -> Algorithm:
        """The algorithm with its settings; the generation budget is max_completion_length."""
        settings: Any = self.algorithm_kwargs or {}
        return get_algorithm(self.algorithm, **{"max_tokens": self.max_completion_length, **settings})

    @property
    def batches(self) -> Batches:
        """What is sampled at once and what an optimizer step takes of it."""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        micro = self.steps_per_generation
        if micro is None and self.generation_batch_size is not None:
            micro = max(1, self.generation_batch_size // (self.per_device_train_batch_size * processes))
        return Batches(
            per_device=self.per_device_train_batch_size,
            processes=processes,
            accumulation=self.gradient_accumulation_steps,
            micro_batches=micro or self.gradient_accumulation_steps,
            answers=self.num_generations,
        )

    def _algorithm_problems(self) -> tuple[list[str], Algorithm | None]:
        if isinstance(self.algorithm_kwargs, str):
            try:
                self.algorithm_kwargs = json.loads(self.algorithm_kwargs)
            except ValueError:
                example = '{"alpha2": 0.2}'
                return [f"algorithm_kwargs={self.algorithm_kwargs!r} is not JSON. Write e.g. '{example}'."], None
        try:
            return [], self.build_algorithm()
        except ConfigError as error:
            return str(error).splitlines(), None

    def _batch_problems(self) -> list[str]:
        if self.num_generations < 2:
            return [
                f"num_generations={self.num_generations}: credit compares the answers to one prompt with each other, "
                "so a group needs at least 2. TRL's default is 8, the GTPO paper has 16."
            ]
        problems = []
        at_once = self.per_device_train_batch_size * self.batches.processes
        if self.generation_batch_size is not None and self.steps_per_generation is None:
            rest = self.generation_batch_size % at_once
            if rest:
                low = self.generation_batch_size - rest
                return [
                    f"generation_batch_size={self.generation_batch_size} is not a multiple of {at_once} (completions "
                    f"per micro-batch on all processes). Nearest: {f'{low} or ' * (low > 0)}{low + at_once}."
                ]
        if not self.batches.fits:
            problems.append(f"{self.batches}. Nearest that fit: {'; '.join(self.batches.nearest())}.")
        if self.records_every < 0 or self.records_groups < 1 or self.records_keep < 0:
            problems.append(
                f"records_every={self.records_every}, records_groups={self.records_groups}, "
                f"records_keep={self.records_keep}: give a number of steps (0 writes none), at least one group, and "
                "how many to keep (0: all)."
            )
        if not self.reward_timeout > 0 or (self.reward_memory is not None and not self.reward_memory > 0):
            problems.append(
                f"reward_timeout={self.reward_timeout}, reward_memory={self.reward_memory}: give seconds and GiB, both "
                "more than 0."
            )
        return problems

    def _guide_problems(self) -> list[str]:
        if self.guide is None:
            return []
        problems = []
        if not 1 <= self.guide_completions < self.num_generations:
            problems.append(
                f"guide_completions={self.guide_completions} of num_generations={self.num_generations}: the guide "
                "gives at least one answer and the policy at least one of its own."
            )
        for name in ("guide_weight", "guide_failed_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                problems.append(f"{name}={getattr(self, name)}: give a number >= 0; 1 counts them like the others.")
        if self.batches.per_device * self.batches.micro_batches % self.num_generations:
            problems.append(
                f"{self.batches.per_device * self.batches.micro_batches} completions per process do not hold whole "
                f"groups of {self.num_generations}, which a guide needs. Set per_device_train_batch_size x "
                "steps_per_generation to a multiple of num_generations."
            )
        if (self.algorithm_kwargs or {}).get("kl_coef"):  # type: ignore[union-attr]
            problems.append("guide with kl_coef: the KL term is not defined on another policy's answers. Drop one.")
        return problems


def _beyond_defaults(algorithm: Any) -> dict[str, Any]:
    plain = type(algorithm)()
    return {name: value for name, value in asdict(algorithm).items() if value != getattr(plain, name)}


def _trl_settings(algorithm: Algorithm) -> dict[str, Any]:
    """What TRL calls the algorithm's settings, so that its logs, model card and checks agree with the loss."""
    by_reduction = {"tokens": "dapo", "sequences": "grpo"}
    return {
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "beta": algorithm.kl_coef,
        "loss_type": "dr_grpo" if isinstance(algorithm, DrGRPO) else by_reduction[algorithm.reduce],
        "scale_rewards": "none" if isinstance(algorithm, DrGRPO) else "group",
        "importance_sampling_level": "token" if algorithm.ratio == "token" else "sequence",
        "use_bias_correction_kl": False,
    }


DEW_NAMES = {"epsilon": "clip_low", "epsilon_high": "clip_high", "beta": "kl_coef"}


def _conflicts(config: DewConfig, algorithm: Algorithm) -> list[str]:
    """Settings that the user gave and that the algorithm defines differently."""
    problems = []
    for name, own in _trl_settings(algorithm).items():
        given = getattr(config, name)
        if name == "scale_rewards":
            given = {True: "group", False: "none"}.get(given, given)
        if given is None or given == own:
            continue
        advice = f"write algorithm_kwargs={{'{DEW_NAMES[name]}': {given}}}" if name in DEW_NAMES else "leave it out"
        problems.append(
            f"{name}={given!r}, but {algorithm.name} trains with {own!r}: {advice}, or choose another algorithm."
        )
    return problems


def _unsupported(config: DewConfig) -> list[str]:
    """Switches of TRL's loss that would silently do nothing here."""
    defaults = {f.name: f.default for f in fields(GRPOConfig)}
    advice = {
        "delta": "the loss is the algorithm's; leave it out",
        "off_policy_mask_threshold": "the loss is the algorithm's; leave it out",
        "top_entropy_quantile": "write algorithm='forking_tokens', algorithm_kwargs={'keep': 0.2}",
        "entropy_coef": "the loss has no entropy term; algorithm='entropy_advantage' rewards hesitation",
        "use_adaptive_entropy": "the loss has no entropy term; algorithm='entropy_advantage' rewards hesitation",
        "multi_objective_aggregation": "the outcome reward decides and the others are added to it; leave it out",
    }
    problems = [
        f"{name}={getattr(config, name)!r} is not part of {config.algorithm}: {what}."
        for name, what in advice.items()
        if getattr(config, name, defaults.get(name)) != defaults.get(name)
    ]
    if config.use_liger_kernel:
        problems.append(
            "use_liger_kernel=True: TRL has deprecated it, and dew reads log-probabilities and entropy from TRL's own "
            "fused head. Write model_init_kwargs={'use_kernels': True} for fast layers."
        )
    return problems
