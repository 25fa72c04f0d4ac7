"""DewConfig: TRL's GRPOConfig, the name of an algorithm, and what a run records."""

import json
import math
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from trl import GRPOConfig

from dew.algorithms import Algorithm, algorithms_for, get_algorithm, list_algorithms
from dew.errors import ConfigError, Problem


@dataclass(frozen=True)
class Batches:
    """The five numbers that set the batch sizes, and what follows from them."""

    per_device: int
    """per_device_train_batch_size: completions of one micro-batch on one process."""
    processes: int
    accumulation: int
    """gradient_accumulation_steps: micro-batches in one optimizer step."""
    micro_batches: int
    """steps_per_generation: micro-batches that are sampled at once."""
    answers: int
    """num_generations: G, the size of a group."""

    @property
    def completions(self) -> int:
        """Completions sampled at once, on all processes."""
        return self.per_device * self.processes * self.micro_batches

    @property
    def fits(self) -> bool:
        return self.completions % self.answers == 0

    def __str__(self) -> str:
        factors = f"{self.per_device} per device x {self.processes} process{'es' * (self.processes > 1)}"
        micro_batches = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        sampled = f"{factors} x {micro_batches} = {self.completions} completions at once"
        if not self.fits:
            return f"{sampled}, which is not a whole number of groups of {self.answers}"
        steps = self.micro_batches / self.accumulation
        return (
            f"{sampled} = {self.completions // self.answers} prompts x {self.answers} answers; "
            f"{self.per_device * self.processes * self.accumulation} completions per optimizer step, "
            f"{steps:g} optimizer step{'s' * (steps != 1)} per generation"
        )

    def check_rows(self, rows: int) -> None:
        """TRL samples whole generations only: with fewer prompts than one takes, it would stop at step 0."""
        prompts = self.completions // self.answers
        if rows < prompts:
            what = f"{rows} problems, but a generation of {self.completions} completions takes {prompts}."
            remedy = f"Give at least {prompts} problems, or reduce per_device_train_batch_size or steps_per_generation."
            raise ConfigError(Problem(what, remedy=remedy))

    def nearest(self) -> list[str]:
        """Settings that fit, each by changing a single number."""
        together = self.micro_batches == self.accumulation  # steps_per_generation follows accumulation
        micro_batches = "gradient_accumulation_steps" if together else "steps_per_generation"
        found = []
        for setting, value in (("per_device_train_batch_size", self.per_device), (micro_batches, self.micro_batches)):
            unit = self.answers // math.gcd(self.answers, self.completions // value)
            found.append(f"{setting}={' or '.join(str(n * unit) for n in (value // unit, value // unit + 1) if n > 0)}")
        sizes = [n for n in range(2, self.completions + 1) if self.completions % n == 0]
        if sizes:
            found.append(f"num_generations={min(sizes, key=lambda n: abs(n - self.answers))}")
        return found


FINITE = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "temperature", "top_p")
AT_LEAST = {"records_every": 0, "records_groups": 1, "records_keep": 0, "guide_weight": 0, "guide_failed_weight": 0}
"""The smallest value of each number."""


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _set_by_algorithm(setting: str | None = None) -> Any:
    return _setting(None, f"Set by the algorithm{f': use algorithm_kwargs[{setting!r}]' if setting else ''}.")


@dataclass
class DewConfig(GRPOConfig):  # type: ignore[misc]
    """All settings of GRPOConfig. What the algorithm defines (clipping, KL, loss, scaling) is set from it."""

    _VALID_DICT_FIELDS: ClassVar = [*GRPOConfig._VALID_DICT_FIELDS, "algorithm_kwargs"]

    algorithm: str = _setting("gtpo", f"One of {', '.join(list_algorithms())}, or an algorithm that you registered.")
    algorithm_kwargs: dict[str, Any] | str | None = _setting(None, "Its settings, e.g. {'alpha2': 0.2}.")  # noqa: RUF009
    outcome_reward: str | None = _setting(None, "Name of the reward that decides correctness; others are added to it.")
    reward_timeout: float = _setting(600.0, "Maximum seconds that your own reward function may take for a batch.")
    reward_memory: float | None = _setting(None, "Maximum GiB of a reward function given by path (default: half).")
    records_every: int = _setting(20, "Write token records at the first step and every this many; 0 disables them.")
    records_groups: int = _setting(4, "Groups in each token record.")
    records_keep: int = _setting(400, "Maximum number of records; beyond it every second one is deleted. 0 keeps all.")
    exact_head: bool = _setting(True, "Compute log-probabilities and entropies exactly in float32; false: with TRL.")
    captured_sampling: bool = _setting(True, "On a GPU without vLLM, sample with captured steps; false: with generate.")
    less_padding: bool = _setting(True, "Train on answers of similar length together, by tokens; false: as TRL does.")
    guide: str | None = _setting(None, "Mixed policy: model, OpenAI-compatible server or .jsonl file.")
    guide_completions: int = _setting(1, "How many of the num_generations answers in a group come from the guide.")
    guide_weight: float = _setting(1.0, "Weight of the guide's answers in the loss.")
    guide_failed_weight: float = _setting(1.0, "Weight of groups in which all of the policy's own answers failed.")
    guide_timeout: float = _setting(120.0, "Maximum seconds to wait for an answer of the guide's server.")

    epsilon: float | None = _set_by_algorithm("clip_low")
    epsilon_high: float | None = _set_by_algorithm("clip_high")
    beta: float | None = _set_by_algorithm("kl_coef")
    loss_type: str | None = _set_by_algorithm()
    scale_rewards: str | None = _set_by_algorithm()
    importance_sampling_level: str | None = _set_by_algorithm()
    use_bias_correction_kl: bool | None = _set_by_algorithm()

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, Algorithm):  # Python code may pass an object instead of a name
            self.algorithm, self.algorithm_kwargs = self.algorithm.name, _non_defaults(self.algorithm)
        problems, algorithm = self._algorithm_problems()
        problems += self._batch_problems() + self._number_problems() + _unsupported(self)
        problems += self.guide_problems() if self.guide is not None else []
        if algorithm is not None:
            problems += _conflicts(self, algorithm)
        if algorithm is None or problems:
            raise ConfigError(problems)
        for name, value in _trl_settings(algorithm).items():
            setattr(self, name, value)
        super().__post_init__()

    def build_algorithm(self) -> Algorithm:
        """The algorithm with its settings; the generation budget is max_completion_length."""
        settings: Any = self.algorithm_kwargs or {}
        return get_algorithm(self.algorithm, **{"max_tokens": self.max_completion_length, **settings})

    @property
    def batches(self) -> Batches:
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

    def _algorithm_problems(self) -> tuple[list[Problem], Algorithm | None]:
        if isinstance(self.algorithm_kwargs, str):
            try:
                self.algorithm_kwargs = json.loads(self.algorithm_kwargs)
            except ValueError:
                what = f"algorithm_kwargs={self.algorithm_kwargs!r} is not JSON."
                return [Problem(what, remedy="""Write e.g. '{"alpha2": 0.2}'.""")], None
        try:
            return [], self.build_algorithm()
        except ConfigError as error:
            return error.problems, None

    def _batch_problems(self) -> list[Problem]:
        if self.num_generations < 2:
            why = "Advantages compare the answers to one prompt with each other."
            return [Problem(f"num_generations={self.num_generations}:", why, "Give at least 2; TRL's default is 8.")]
        if not self.batches.fits:
            return [Problem(f"{self.batches}.", remedy=f"Nearest that fit: {'; '.join(self.batches.nearest())}.")]
        return []

    def _number_problems(self) -> list[Problem]:
        problems = [
            Problem(f"{name}={getattr(self, name)}:", remedy=f"give a number >= {least}.")
            for name, least in AT_LEAST.items()
            if not least <= getattr(self, name) < math.inf
        ]
        problems += [
            Problem(f"{name}={getattr(self, name)}:", "not a finite number.")
            for name in FINITE
            if isinstance(getattr(self, name), float) and not math.isfinite(getattr(self, name))
        ]
        if not self.reward_timeout > 0 or (self.reward_memory is not None and not self.reward_memory > 0):
            what = f"reward_timeout={self.reward_timeout}, reward_memory={self.reward_memory}:"
            problems.append(Problem(what, remedy="give seconds and GiB, both more than 0."))
        return problems

    def guide_problems(self) -> list[Problem]:
        """What a guide cannot work with; for one that is given as an object, the trainer asks."""
        problems = []
        if not 1 <= self.guide_completions < self.num_generations:
            what = f"guide_completions={self.guide_completions} of num_generations={self.num_generations}:"
            problems.append(Problem(what, "guide and policy must each give at least one of a group's answers."))
        per_process = self.batches.per_device * self.batches.micro_batches
        if per_process % self.num_generations:
            what = f"{per_process} completions per process are not whole groups of {self.num_generations},"
            remedy = "Set per_device_train_batch_size x steps_per_generation to a multiple of num_generations."
            problems.append(Problem(what, "which a guide needs.", remedy))
        if (self.algorithm_kwargs or {}).get("kl_coef"):  # type: ignore[union-attr]
            why = "the KL term is not defined on another policy's answers."
            problems.append(Problem("guide with kl_coef:", why, "Use one of them."))
        return problems


def _non_defaults(algorithm: Any) -> dict[str, Any]:
    default = type(algorithm)()
    return {name: value for name, value in asdict(algorithm).items() if value != getattr(default, name)}


LOSS_TYPES = {"tokens": "dapo", "sequences": "grpo", "fixed": "dr_grpo"}
"""TRL's `loss_type` by what the loss is divided by."""


def _trl_settings(algorithm: Algorithm) -> dict[str, Any]:
    """The algorithm's settings under TRL's names, so that TRL's logs, model card and checks agree with the loss."""
    return {
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "beta": algorithm.kl_coef,
        "loss_type": LOSS_TYPES["fixed" if algorithm.fixed_divisor else algorithm.reduce],
        "scale_rewards": "group" if algorithm.scale else "none",
        "importance_sampling_level": "token" if algorithm.ratio == "token" else "sequence",
        "use_bias_correction_kl": False,
    }


DEW_NAMES = {"epsilon": "clip_low", "epsilon_high": "clip_high", "beta": "kl_coef"}


def _conflicts(config: DewConfig, algorithm: Algorithm) -> list[Problem]:
    """Settings that the user gave and that the algorithm defines differently."""
    problems = []
    for name, own in _trl_settings(algorithm).items():
        given = getattr(config, name)
        if name == "scale_rewards":
            given = {True: "group", False: "none"}.get(given, given)
        if given is None or given == own:
            continue
        advice = f"Write algorithm_kwargs={{'{DEW_NAMES[name]}': {given}}}" if name in DEW_NAMES else "Remove it"
        what = f"{name}={given!r}, but {algorithm.name} trains with {own!r}."
        problems.append(Problem(what, remedy=f"{advice}, or choose another algorithm."))
    return problems


NOT_SUPPORTED = ("delta", "off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy",
                 "multi_objective_aggregation", "use_liger_kernel")  # fmt: skip
"""Settings of TRL that would silently do nothing: the algorithm defines the loss and how rewards are combined."""


def _unsupported(config: DewConfig) -> list[Problem]:
    defaults = {f.name: f.default for f in fields(GRPOConfig)}
    problems = []
    for name in NOT_SUPPORTED:
        if getattr(config, name, defaults.get(name)) != defaults.get(name):
            others = "".join(f", or write algorithm={other!r}" for other in algorithms_for(name))
            what = f"{name}={getattr(config, name)!r} is not supported by {config.algorithm}."
            problems.append(Problem(what, remedy=f"Remove it{others}."))
    return problems
