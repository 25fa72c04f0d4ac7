"""DewConfig: TRL's GRPOConfig with settings for the algorithm and for what a run records."""

import logging
import math
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, get_args

from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from dew import list_algorithms
from dew.algorithms import DEFAULT_ALGORITHM, ENGINE_ALGORITHM, Algorithm, get_algorithm, split_algorithm
from dew.errors import ConfigError, Problem
from dew.losses import Surrogate
from dew.run.settings import ALGORITHM_NAMES, CHOOSE_ALGORITHM, SETTINGS, Batches, Setting, algorithm_settings, nearest

logger = logging.getLogger("dew")
# Of several processes, only the first logs what all of them would.
logger.addFilter(lambda record: record.levelno >= logging.ERROR or os.environ.get("RANK", "0") == "0")

LIMITS = {
    **SETTINGS,
    **dict.fromkeys(("guide_weight", "guide_failed_weight"), Setting(least=0)),
    **dict.fromkeys(("reward_timeout", "reward_memory"), Setting(above=0)),
}
"""Settings with limits: those that both engines have, and those of TRL only."""
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_generations")
"""TRL's settings of the batches, which it computes when a config is made."""
RECORDS = [SETTINGS[f"records_{name}"].default for name in ("every", "groups", "keep")]


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _of_algorithm(setting: str | None = None) -> Any:
    meaning = f"Same as algorithm_kwargs[{setting!r}]" if setting else "Selects TRL's own loss if no algorithm is named"
    return _setting(None, f"{meaning}; see docs/trl.md.")


@dataclass
class DewConfig(GRPOConfig):  # type: ignore[misc]
    """GRPOConfig with an `algorithm`, its settings (`algorithm_kwargs`), and settings for what a run records.

    The algorithm determines clipping, KL, loss and scaling, unless it is TRL's own (`trl`).
    `dew train --keys` lists every setting with its help; docs/trl.md explains those that dew adds.
    """

    _VALID_DICT_FIELDS: ClassVar = [*GRPOConfig._VALID_DICT_FIELDS, "algorithm_kwargs"]
    unnamed: ClassVar = False
    """Whether the algorithm is the default because no setting selects one."""
    for_dew: ClassVar = False
    """True while a DewTrainer is constructed with this config."""
    algorithm: str | None = _setting(
        None,
        f"One of {', '.join(list_algorithms())}, or your own: module:Class (default {DEFAULT_ALGORITHM}). "
        "Its settings may follow: NAME(setting=value,...).",
    )
    algorithm_kwargs: dict[str, Any] | str | None = _setting(None, "Settings of the algorithm, e.g. {'alpha2': 0.2}.")  # noqa: RUF009
    outcome_reward: str | None = _setting(None, "Name of the reward that decides correctness; others are added to it.")
    reward_timeout: float = _setting(600.0, "Time limit in seconds for one call of your own reward function.")
    reward_memory: float | None = _setting(None, "Memory limit in GiB of a reward by path (default: half of RAM).")
    records_every: int = _setting(RECORDS[0], "Write token records at step 1, then every N steps; 0: none.")
    records_groups: int = _setting(RECORDS[1], "Groups in each token record.")
    records_keep: int = _setting(RECORDS[2], "Maximum number of records; above it, every second is deleted. 0: all.")
    exact_head: bool = _setting(True, "Compute log-probabilities and entropies exactly in float32; false: as TRL does.")
    captured_sampling: bool = _setting(True, "Without vLLM, use dew's own sampler; false: model.generate.")
    less_padding: bool = _setting(True, "Group answers of similar length into micro-batches; false: as TRL does.")
    guide: str | None = _setting(None, "Mixed policy: a .jsonl file of recorded answers.")
    guide_completions: int = _setting(1, "Number of answers in each group that come from the guide.")
    guide_weight: float = _setting(1.0, "Weight of the guide's answers in the loss.")
    guide_failed_weight: float = _setting(1.0, "Weight of groups in which all of the policy's own answers failed.")
    overwrite_output_dir: bool = _setting(False, "Delete an earlier run in output_dir when training starts.")
    epsilon: float | None = _of_algorithm("clip_low")
    epsilon_high: float | None = _of_algorithm("clip_high")
    beta: float | None = _of_algorithm("kl_coef")
    sapo_temperature_pos: float | None = _of_algorithm("tau_pos")
    sapo_temperature_neg: float | None = _of_algorithm("tau_neg")
    loss_type: str | None = _of_algorithm()
    scale_rewards: str | None = _of_algorithm()
    importance_sampling_level: str | None = _of_algorithm()
    use_bias_correction_kl: bool | None = _of_algorithm()

    def __post_init__(self) -> None:
        problems, algorithm = self._read_algorithm() + self._adopt_trl_settings(), None
        try:
            algorithm = self.build_algorithm()
        except ConfigError as error:
            problems += error.problems
        problems += self._batch_problems()
        problems += filter(None, (limit.problem(name, getattr(self, name, None)) for name, limit in LIMITS.items()))
        problems += self.guide_problems() if self.guide is not None and algorithm is not None else []
        problems += _conflicts(self, algorithm) if algorithm is not None else []
        if algorithm is None or problems:
            raise ConfigError(problems)
        if algorithm.engine_loss:
            own = {theirs: getattr(algorithm, ours) for theirs, ours in ALGORITHM_NAMES.items()}
            if self.loss_type in get_args(Surrogate):  # epsilon_high is then the maximum ratio
                own["epsilon_high"] = 1 + own["epsilon_high"] if "clip_high" in (self.algorithm_kwargs or {}) else None
            for f in fields(GRPOConfig):
                if f.name in (*ALGORITHM_NAMES, *CHOOSE_ALGORITHM) and getattr(self, f.name) is None:
                    setattr(self, f.name, own.get(f.name, f.default))
        else:
            if self.beta and self.use_bias_correction_kl is None and GRPOConfig.use_bias_correction_kl:
                text = "beta: TRL multiplies the KL term by the ratio unless use_bias_correction_kl=False; %s does not."
                logger.warning(text, algorithm.name)
            for name, value in _trl_settings(algorithm).items():
                setattr(self, name, value)
        given: Any = self
        if given.bf16 is None and not given.fp16 and not is_torch_bf16_gpu_available():
            given.bf16 = False  # TRL's default is bf16, an error on a machine without a GPU that supports it
        super().__post_init__()
        if problems := self._generation_problems():  # after TRL has read JSON
            raise ConfigError(problems)
        self._used = {name: getattr(self, name) for name in ("algorithm", *_trl_settings(algorithm), *BATCH)}

    def build_algorithm(self) -> Algorithm:
        """Return the algorithm with its settings; its `max_tokens` is max_completion_length."""
        settings = {"max_tokens": self.max_completion_length, **algorithm_settings(self.algorithm_kwargs)}
        return get_algorithm(self.algorithm or DEFAULT_ALGORITHM, **settings)

    @property
    def place_model_on_device(self) -> Any:
        """As in transformers, where only a trainer's constructor reads it. It refuses a trainer that is not dew's."""
        if not self.for_dew and not (algorithm := self.build_algorithm()).engine_loss:
            what = f"A GRPOTrainer ignores algorithm={algorithm.name!r} and trains with TRL's own loss."
            raise ConfigError(Problem(what, remedy="Write DewTrainer(...), or GRPOConfig(...)."))
        return super().place_model_on_device

    @property
    def batches(self) -> Batches:
        return batches(self)

    def context_problem(self, prompt: int, context: int | None) -> Problem | None:
        """Return a problem if the longest answer to a prompt of so many tokens exceeds vLLM's context or the model's
        `context`."""
        given, limit = self.vllm_max_model_length if self.use_vllm else None, self.max_completion_length or 0
        context = given or context
        if context is None or prompt + limit <= context:
            return None
        owner = "vLLM (vllm_max_model_length)" if given else "the model"
        what = f"A prompt of {prompt} tokens and max_completion_length={limit} make {prompt + limit} tokens, "
        room = f"Set max_completion_length to at most {context - prompt}."
        remedy = room if prompt < context else "Remove the longest prompts."
        return Problem(f"{what}and {owner} has {context} positions.", remedy=remedy)

    def late_problems(self) -> list[Problem]:
        """Return a problem for each setting that was changed after the loss and the batches were made from it."""
        why, remedy = "It was already used when the config was made.", "Pass it to DewConfig(...)."
        now = {name: getattr(self, name) for name in self._used}
        return [Problem(f"args.{x} was set to {now[x]!r}.", why, remedy) for x in now if now[x] != self._used[x]]

    def warnings(self) -> list[Problem]:
        """Return problems that do not stop a run but are probably unintended."""
        unit = self.per_device_train_batch_size * self.batches.processes
        found = [self.batches.misaligned("steps_per_generation", unit)]
        off = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "logprobs": 0}
        used = {**vars(self), **(self.generation_kwargs or {})}
        given = ", ".join(f"{x}={used[x]}" for x, value in off.items() if used.get(x) not in (None, -1, value))
        if self.use_vllm and given:
            why = "vLLM's log-probabilities are then not those of the policy, which biases the importance ratio."
            found.append(Problem(f"{given} with vLLM:", why, "Keep the defaults."))
        if self.mask_truncated_completions and self.build_algorithm().overlong == "soft":
            why = "a masked answer has no length, so its group is compared with it as if it had no penalty."
            found.append(Problem("mask_truncated_completions with overlong='soft':", why, "Use one of the two."))
        return [problem for problem in found if problem is not None]

    def _read_algorithm(self) -> list[Problem]:
        """Set the name and a dict of settings from JSON, from text such as `gtpo(alpha2=0.5)`, or from an object."""
        try:
            given, self.algorithm_kwargs = algorithm_settings(self.algorithm_kwargs), None
            if isinstance(self.algorithm, Algorithm):
                default: Any = type(self.algorithm)()
                changed = {k: v for k, v in asdict(self.algorithm).items() if v != getattr(default, k)}
                self.algorithm, given = self.algorithm.name, {**changed, **given}
            elif self.algorithm is not None:
                self.algorithm, given = split_algorithm(self.algorithm, given)
        except ConfigError as error:
            return error.problems
        self.algorithm_kwargs = given or None
        return []

    def _adopt_trl_settings(self) -> list[Problem]:
        """Copy TRL's clipping and KL settings to algorithm_kwargs. If no algorithm is named and TRL's other loss
        settings differ from those of the default algorithm, select `trl`."""
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if self.algorithm is None:
            self.algorithm = DEFAULT_ALGORITHM
            different = _conflicts(self, get_algorithm(DEFAULT_ALGORITHM))
            self.unnamed = not different  # type: ignore[misc]
            if different:
                self.algorithm = ENGINE_ALGORITHM
                what = " ".join(problem.what for problem in different)
                logger.warning("%s Training with the algorithm %s.", what, self.algorithm)
        kwargs = algorithm_settings(self.algorithm_kwargs)
        given = {ours: getattr(self, theirs) for theirs, ours in ALGORITHM_NAMES.items()}
        if self.loss_type in get_args(Surrogate):  # epsilon_high is then the maximum ratio, and epsilon is unused
            high = given["clip_high"]
            given |= {"clip_low": None, "clip_high": None if high is None else max(high - 1, 0.0)}
        elif given["clip_high"] is None:  # as in TRL
            given["clip_high"] = kwargs.get("clip_high", given["clip_low"])
        problems = [
            Problem(f"{theirs}={given[ours]}, but algorithm_kwargs has {ours}={kwargs[ours]}.", remedy="Remove one.")
            for theirs, ours in ALGORITHM_NAMES.items()
            if given[ours] is not None and kwargs.get(ours, given[ours]) != given[ours]
        ]
        kwargs |= {name: value for name, value in given.items() if value is not None}
        self.algorithm_kwargs = kwargs or None
        return problems

    def _batch_problems(self) -> list[Problem]:
        if self.per_device_train_batch_size < 1:
            return []  # LIMITS refuses it
        if self.num_generations < 2:
            return [Problem(f"num_generations={self.num_generations}:", remedy="Give at least 2; TRL's default is 8.")]
        sampled, G, per_device = self.batches.sampled, self.num_generations, self.per_device_train_batch_size
        at_once, given = per_device * self.batches.processes, self.generation_batch_size
        if given and given % at_once:
            what = f"generation_batch_size={given} is not a multiple of {at_once}, the micro-batches of all processes."
            return [Problem(what, remedy=f"Nearest that fit: {nearest(given, at_once)}.")]
        if self.batches.fits:
            return self._eval_batch_problems()
        unit = G // math.gcd(G, sampled // per_device)
        sizes = [n for n in range(2, sampled + 1) if sampled % n == 0]
        remedy = f"Nearest that fit: per_device_train_batch_size={nearest(per_device, unit)}"
        remedy += f"; num_generations={min(sizes, key=lambda n: abs(n - G))}." if sizes else "."
        return [Problem(f"{self.batches}.", remedy=remedy)]

    def _eval_batch_problems(self) -> list[Problem]:
        processes, size = self.batches.processes, self.per_device_eval_batch_size
        G = self.num_generations_eval or self.num_generations
        if self.eval_strategy == "no" or size < 1 or size * processes % G == 0:
            return []
        what = f"per_device_eval_batch_size={size} x {processes} process{'es' * (processes > 1)}"
        remedy = f"Nearest that fit: {nearest(size, G // math.gcd(G, processes))}. Or set num_generations_eval."
        return [Problem(f"{what}: not a whole number of groups of {G}.", remedy=remedy)]

    def _generation_problems(self) -> list[Problem]:
        """Return problems with `generation_kwargs` that TRL ignores, or that end in wrong scores or other errors."""
        several = "each prompt already has num_generations answers."
        stops = "TRL stops at strings only with use_vllm=True and 'stop'."
        why = {"n": several, "num_return_sequences": several, "stop_strings": stops}
        why |= {} if self.use_vllm else {"stop": stops}
        why["temperature"] = "log-probabilities and entropies are computed at the setting `temperature`; change that."
        off = {"n": 1, "num_return_sequences": 1, "temperature": self.temperature}
        given = {x: y for x, y in (self.generation_kwargs or {}).items() if x in why and y not in (None, off.get(x))}
        return [Problem(f"generation_kwargs={{{x!r}: {given[x]!r}}}: {why[x]}", remedy=f"Remove {x!r}.") for x in given]

    def guide_problems(self) -> list[Problem]:
        """Return problems of these settings with a guide. The trainer calls it if the guide is passed as an object."""
        algorithm, per_process, G = self.build_algorithm(), self.batches.per_process, self.num_generations
        found = {
            f"guide with algorithm={self.algorithm!r}: TRL's own loss has no term for a guide.": algorithm.engine_loss,
            f"guide_completions={self.guide_completions} of num_generations={G}: guide and policy must each give at "
            "least one of a group's answers.": not 1 <= self.guide_completions < G,
            f"guide needs whole groups of {G} on each process, but it has {per_process} answers.": per_process % G,
            "guide with kl_coef: the KL term is not defined on another policy's answers.": algorithm.kl_coef,
        }
        return [Problem(what) for what, wrong in found.items() if wrong]


def batches(args: GRPOConfig) -> Batches:
    processes, per_device = int(os.environ.get("WORLD_SIZE", "1")), args.per_device_train_batch_size
    sampled_at_once = args.steps_per_generation
    if sampled_at_once is None and args.generation_batch_size is not None:
        sampled_at_once = max(1, args.generation_batch_size // (per_device * processes))
    return Batches(
        sampled=per_device * processes * (sampled_at_once or args.gradient_accumulation_steps),
        trained=per_device * processes * args.gradient_accumulation_steps,
        answers=args.num_generations,
        passes=args.num_iterations,
        processes=processes,
        micro=per_device,
    )


LOSS_TYPES = {"tokens": "dapo", "sequences": "grpo", "fixed": "dr_grpo"}
TRL_ONLY = ("delta", "off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy",
            "multi_objective_aggregation")  # fmt: skip
"""Settings of TRL's own loss, which any other loss would silently ignore."""


def _trl_settings(algorithm: Algorithm) -> dict[str, Any]:
    """Return the algorithm's settings under TRL's names, so that TRL's logs, model card and checks match the loss."""
    return {
        **{theirs: getattr(algorithm, ours) for theirs, ours in ALGORITHM_NAMES.items()},
        "loss_type": LOSS_TYPES["fixed" if algorithm.fixed_divisor else algorithm.reduce],
        "scale_rewards": "group" if algorithm.scale else "none",
        "importance_sampling_level": "token" if algorithm.ratio == "token" else "sequence",
        "use_bias_correction_kl": False,
        **{f.name: f.default for f in fields(GRPOConfig) if f.name in TRL_ONLY},
    }


def _conflicts(config: DewConfig, algorithm: Algorithm) -> list[Problem]:
    """Return TRL's loss settings that contradict the algorithm."""
    if algorithm.engine_loss:
        return []
    problems = []
    for name, own in _trl_settings(algorithm).items():
        given = getattr(config, name)
        without_kl = name == "use_bias_correction_kl" and not (config.beta or algorithm.kl_coef)
        same_loss = name == "loss_type" and given == algorithm.surrogate
        if name not in ALGORITHM_NAMES and given not in (None, own) and not without_kl and not same_loss:
            what = f"{name}={given!r}, but {algorithm.name} trains with {own!r}."
            problems.append(Problem(what, remedy=f"Remove it, or set algorithm={ENGINE_ALGORITHM!r} for TRL's loss."))
    return problems
