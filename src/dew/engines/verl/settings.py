"""verl's configuration read as one of dew's algorithms, and everything in it that cannot work.

    algorithm.adv_estimator = gtpo | grpo_s | forking_tokens | entropy_advantage
    algorithm.dew.*         = that algorithm's settings, by the names and with the checks that they have everywhere
    algorithm.dew_run.*     = the run's folder

What verl decides itself (clipping, KL, group filtering, lengths) is set in verl's own keys and read from there.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dew.algorithms import GRPO, Algorithm, get_algorithm
from dew.engines.verl.carrying import SWITCH_ON
from dew.engines.verl.losses import LOSSES
from dew.errors import ConfigError, EngineError

OURS = ("gtpo", "grpo_s", "forking_tokens", "entropy_advantage")
MODES = {"dew_sync": "sync", "dew_colocate_async": "colocate_async", "dew_separate_async": "separate_async"}
"""Trainer mode -> the mode of verl's that it is otherwise."""

ACTOR = "actor_rollout_ref.actor"
VERL_DECIDES = {
    "clip_low": f"{ACTOR}.clip_ratio_low",
    "clip_high": f"{ACTOR}.clip_ratio_high",
    "kl_coef": f"{ACTOR}.use_kl_loss=True and {ACTOR}.kl_loss_coef",
    "dynamic_sampling": "algorithm.filter_groups.enable",
    "max_rounds": "nothing: verl samples until the batch is full",
    "oversample": "nothing: verl samples its own number of prompts at a time",
    "max_tokens": "data.max_response_length",
}


@dataclass(frozen=True)
class RunSettings:
    """`algorithm.dew_run.*`"""

    folder: str
    """Where the run's metrics, alarms and token records go."""
    records_every: int = 20
    """Write token records every so many steps, and at the first; 0: never."""
    records_groups: int = 4
    """Groups in each token record."""
    records_keep: int = 400
    """Record files kept at most, spread over the run; 0: all."""

    def __post_init__(self) -> None:
        if self.records_every < 0 or self.records_groups < 1 or self.records_keep < 0:
            raise ConfigError(
                f"algorithm.dew_run: records_every={self.records_every}, records_groups={self.records_groups}, "
                f"records_keep={self.records_keep}: give a number of steps (0 writes none), at least one group and "
                "how many to keep (0: all)."
            )


def read(config: Any, path: str, default: Any = None) -> Any:
    """`read(config, "a.b.c")` of a DictConfig or of plain dictionaries; the default for a key that is not there."""
    for key in path.split("."):
        config = config.get(key) if config is not None else None
    return default if config is None else config


def algorithm_of(config: Any) -> Algorithm:
    """The algorithm that this configuration names, with what verl decides filled in. GRPO for verl's own estimators."""
    name, given = str(read(config, "algorithm.adv_estimator")), _plain(read(config, "algorithm.dew", {}))
    if name not in OURS:
        return GRPO(**_decided_by_verl(config))
    wrong = [
        f"algorithm.dew.{key}: in a verl run this is verl's to decide. Set {VERL_DECIDES[key]}."
        for key in given
        if key in VERL_DECIDES
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return get_algorithm(name, **given, **_decided_by_verl(config))


def run_settings_of(config: Any) -> RunSettings | None:
    """Where to record; None if nowhere."""
    given = _plain(read(config, "algorithm.dew_run", {}))
    if not given:
        return None
    known = list(RunSettings.__dataclass_fields__)
    unknown = [key for key in given if key not in known]
    if unknown or "folder" not in given:
        raise ConfigError(
            f"algorithm.dew_run has {', '.join(given)}: it takes {', '.join(known)}, and folder is needed, e.g. "
            "+algorithm.dew_run.folder=runs/first."
        )
    return RunSettings(**{**given, "folder": str(Path(given["folder"]).expanduser().absolute())})


def check(config: Any, known: Collection[str] = ()) -> Algorithm:
    """The algorithm, once nothing stands against it. `known`: the names of verl's own estimators."""
    problems, algorithm = [], None
    for look in (algorithm_of, run_settings_of):
        try:
            found = look(config)
            algorithm = found if isinstance(found, Algorithm) else algorithm
        except ConfigError as error:
            problems.append(str(error))
    name = str(read(config, "algorithm.adv_estimator"))
    problems += _mode_problems(config)
    if name in OURS:
        problems += _problems(config, name, algorithm)
    else:
        problems += _stranger_problems(config, name, known)
    if problems or algorithm is None:
        raise EngineError("\n".join(problems))
    return algorithm


def _mode_problems(config: Any) -> list[str]:
    mode = str(read(config, "trainer.v1.trainer_mode"))
    if not read(config, "trainer.use_v1", True):
        return [f"trainer.use_v1=False: verl's old trainer drops the old policy's entropy. {SWITCH_ON}"]
    return [] if mode in MODES else [f"trainer.v1.trainer_mode={mode} does not carry what dew needs. {SWITCH_ON}"]


def _problems(config: Any, name: str, algorithm: Algorithm | None) -> list[str]:
    """What would make the run something else than the algorithm it is called."""
    found = []
    if read(config, "algorithm.rollout_correction.bypass_mode", False):
        found.append(
            "algorithm.rollout_correction.bypass_mode=True skips the pass that computes the old policy's entropy, and "
            f"{name} is made of that entropy. Set it to False."
        )
    metric = read(config, "algorithm.filter_groups.metric")
    if read(config, "algorithm.filter_groups.enable", False) and metric != "acc":
        found.append(
            f"algorithm.filter_groups.metric={metric} would keep groups whose answers differ only in a penalty "
            "(length, format), not in being right. Set algorithm.filter_groups.metric=acc."
        )
    found += _precision_problems(config)
    if algorithm is not None:
        found += _loss_problems(config, algorithm)
        if algorithm.overlong != "none" and read(config, "reward.reward_kwargs.overlong_buffer_cfg.enable", False):
            found.append(
                f"algorithm.dew.overlong={algorithm.overlong} and verl's overlong_buffer_cfg would both charge length. "
                "Leave one of them out."
            )
        if algorithm.needs_entropy == "current":
            found += _current_entropy_problems(config, name)
    return found


def _loss_problems(config: Any, algorithm: Algorithm) -> list[str]:
    """A sequence's advantage needs a sequence's ratio, a token's a token's."""
    mode = str(read(config, f"{ACTOR}.policy_loss.loss_mode", "vanilla"))
    wanted = "grpo_s" if algorithm.ratio == "sequence_mean" else "grpo_s_geometric"
    if algorithm.name == "grpo_s":
        return (
            []
            if mode == wanted
            else [f"grpo_s has one ratio per answer. Set {ACTOR}.policy_loss.loss_mode={wanted} (it is {mode})."]
        )
    if mode not in ("vanilla", "gtpo"):
        return [f"{algorithm.name} has one ratio per token. Set {ACTOR}.policy_loss.loss_mode=gtpo (it is {mode})."]
    reduce = str(read(config, f"{ACTOR}.loss_agg_mode", "token-mean"))
    if mode == "vanilla" and reduce != "token-mean":
        return [f"{algorithm.name} counts every token the same. Set {ACTOR}.loss_agg_mode=token-mean (it is {reduce})."]
    return []


def _precision_problems(config: Any) -> list[str]:
    """FSDP: H = logsumexp − Σ p·logit in the logits' 16 bits is noise; where verl has a float32 way, it must be taken.

    Logits of 20 have steps of 1/8 in bf16, and most tokens' entropy comes out as exactly 0, or below it.
    """
    if str(read(config, f"{ACTOR}.strategy", "fsdp")) not in ("fsdp", "fsdp2"):
        return []
    fsdp, model = f"{ACTOR}.fsdp_config", "actor_rollout_ref.model"
    chunked = read(config, f"{fsdp}.entropy_from_logits_with_chunking", False)
    exact = (
        (chunked and read(config, f"{model}.use_remove_padding", False))
        or read(config, f"{model}.use_fused_kernels", False)
        or str(read(config, f"{fsdp}.mixed_precision.param_dtype")) in ("fp32", "float32")
    )
    if exact:
        return []
    return [
        "verl would compute the old policy's entropy in bf16, as a small difference of large numbers: most of it is "
        f"rounding. Set {ACTOR}.entropy_from_logits_with_chunking=True with {model}.use_remove_padding=True, which "
        f"computes it in float32 (or {model}.use_fused_kernels=True)."
    ]


def _current_entropy_problems(config: Any, name: str) -> list[str]:
    found = []
    if not read(config, f"{ACTOR}.calculate_entropy", False):
        found.append(f"{name} reads the entropy of the policy being trained. Set {ACTOR}.calculate_entropy=True.")
    if read(config, "distillation.enabled", False):
        found.append(f"{name} and verl's distillation both replace the actor's loss. Leave one of them out.")
    return found


def _stranger_problems(config: Any, name: str, known: Collection[str]) -> list[str]:
    """verl's own estimator in a trainer mode of dew's: only the run's folder is dew's then."""
    found = []
    if known and name not in known:
        found.append(f"algorithm.adv_estimator={name} is not known. dew has {', '.join(OURS)}.")
    if read(config, "algorithm.dew"):
        found.append(f"algorithm.dew.* are settings of {', '.join(OURS)}; algorithm.adv_estimator is {name}.")
    mode = str(read(config, f"{ACTOR}.policy_loss.loss_mode", "vanilla"))
    if mode in LOSSES and mode != "gtpo":
        found.append(f"{ACTOR}.policy_loss.loss_mode={mode} belongs to algorithm.adv_estimator=grpo_s, not to {name}.")
    return found


def _decided_by_verl(config: Any) -> dict[str, Any]:
    clip = read(config, f"{ACTOR}.clip_ratio", 0.2)
    return {
        "clip_low": read(config, f"{ACTOR}.clip_ratio_low", clip),
        "clip_high": read(config, f"{ACTOR}.clip_ratio_high", clip),
        "kl_coef": read(config, f"{ACTOR}.kl_loss_coef", 0.0) if read(config, f"{ACTOR}.use_kl_loss", False) else 0.0,
        "dynamic_sampling": bool(read(config, "algorithm.filter_groups.enable", False)),
        "max_tokens": read(config, "data.max_response_length"),
    }


def _plain(x: Any) -> Any:
    """Dictionaries and lists of their own: a DictConfig's are neither."""
    if isinstance(x, Mapping) or hasattr(x, "items"):
        return {str(key): _plain(value) for key, value in x.items()}
    return [_plain(value) for value in x] if isinstance(x, Collection) and not isinstance(x, str) else x
