"""Read the algorithm from verl's configuration, and find settings that cannot work.

`algorithm.adv_estimator` names the algorithm, `algorithm.dew.*` are its settings, `algorithm.dew_run.*` describes the
run's folder. Clipping, KL, group filtering and lengths are verl's keys. With verl's own estimators, dew only records.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from dew.algorithms import Algorithm, algorithm_classes, get_algorithm
from dew.errors import ConfigError, DewError, EngineError, Problem, did_you_mean, unknown, wrong_types
from dew.run.config import flat
from dew.run.folder import VERLS_LATEST, RunFolder, algorithm_of
from dew.run.settings import ACTOR, MODEL, ROLLOUT, SETTINGS

FSDP, LOSS_MODE = f"{ACTOR}.fsdp_config", f"{ACTOR}.policy_loss.loss_mode"

MODES = {"dew_sync": "sync", "dew_colocate_async": "colocate_async", "dew_separate_async": "separate_async"}
"""dew's trainer modes, and the mode of verl that each extends."""
SWITCH_ON = "Start with `python -m dew.engines.verl.main`, and set trainer.v1.trainer_mode=dew_sync."
EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
"""Comma-separated modules that verl imports in every process; main.py passes the variable on to Ray's processes."""
DEW_LOSS = "dew"
"""The `loss_mode` that selects the algorithm's own loss."""
SET_BY_VERL = {
    "clip_low": f"Set {ACTOR}.clip_ratio_low.",
    "clip_high": f"Set {ACTOR}.clip_ratio_high.",
    "kl_coef": f"Set {ACTOR}.use_kl_loss=True and {ACTOR}.kl_loss_coef.",
    "dynamic_sampling": "Set algorithm.filter_groups.enable.",
    "max_rounds": "Remove it: verl samples until the batch is full.",
    "oversample": "Remove it: verl chooses how many prompts it samples at a time.",
    "max_tokens": "Set data.max_response_length.",
}
"""Algorithm settings for which verl has keys of its own."""
VERLS_LOSS = {"clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05, "policy_loss.clip_cov_ratio": 0.0002,
              "policy_loss.clip_cov_lb": 1.0, "policy_loss.clip_cov_ub": 5.0}  # fmt: skip
"""Keys of the actor that only verl's own losses read, and their defaults."""


@dataclass(frozen=True)
class RunSettings:
    folder: str
    records_every: int = SETTINGS["records_every"].default
    records_groups: int = SETTINGS["records_groups"].default
    records_keep: int = SETTINGS["records_keep"].default


def read(config: Any, path: str, default: Any = None) -> Any:
    """Return `config.a.b.c` for path "a.b.c" in a DictConfig or dicts, or the default if a key is missing or null."""
    for key in path.split("."):
        config = config.get(key) if config is not None else None
    return default if config is None else config


def plain(x: Any) -> Any:
    if isinstance(x, Mapping) or hasattr(x, "items"):
        return {str(key): plain(value) for key, value in x.items()}
    return [plain(value) for value in x] if isinstance(x, Collection) and not isinstance(x, str) else x


def _section(config: Any, path: str) -> dict[str, Any]:
    found = plain(read(config, path, {}))
    if not isinstance(found, dict):
        raise ConfigError(Problem(f"{path}={found} is not a setting.", remedy=f"Write e.g. +{path}.NAME={found}."))
    return found


def reduction(algorithm: Algorithm) -> dict[str, Any]:
    """Return verl's keys that make its own losses and its KL term use the algorithm's mean over the batch."""
    if algorithm.fixed_divisor:
        fixed = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": algorithm.max_tokens}
        return {f"{ACTOR}.{key}": value for key, value in fixed.items()}
    return {f"{ACTOR}.loss_agg_mode": "token-mean" if algorithm.reduce == "tokens" else "seq-mean-token-mean"}


def stock_estimator(cls: type[Algorithm]) -> str | None:
    """Return verl's own estimator for this class. Not inherited, because a subclass may compute something else."""
    return vars(cls).get("verl_estimator")


def runs_on_verl(cls: type[Algorithm]) -> bool:
    """Whether verl can train it: not with TRL's loss, Σπ² or token penalties, which a plugin of verl cannot use."""
    return not (cls.engine_loss or cls.needs_sum_sq or cls.penalises)


def only_on_trl(name: str) -> Problem:
    remedy = "Choose another algorithm, or verl's own version of it if there is one (docs/verl.md)."
    return Problem(f"{name} works only on TRL.", remedy=remedy)


def dew_estimators() -> list[str]:
    """Return the names of registered algorithms whose advantages dew computes inside verl."""
    return [name for name, cls in algorithm_classes().items() if runs_on_verl(cls) and stock_estimator(cls) is None]


def read_algorithm(config: Any) -> Algorithm:
    """Return the algorithm that this configuration names, including the settings that verl controls."""
    name, given = str(read(config, "algorithm.adv_estimator")), _section(config, "algorithm.dew")
    clip = read(config, f"{ACTOR}.clip_ratio", 0.2)
    controlled = {
        "clip_low": read(config, f"{ACTOR}.clip_ratio_low", clip),
        "clip_high": read(config, f"{ACTOR}.clip_ratio_high", clip),
        "kl_coef": read(config, f"{ACTOR}.kl_loss_coef", 0.0) if read(config, f"{ACTOR}.use_kl_loss") else 0.0,
        "dynamic_sampling": bool(read(config, "algorithm.filter_groups.enable")),
        "max_tokens": read(config, "data.max_response_length"),
    }
    if name not in dew_estimators():  # one of verl's own; this represents it in metrics and records
        return type("VerlEstimator", (Algorithm,), {"name": name})(**controlled)
    what = "algorithm.dew.{}: in a verl run, verl controls this."
    if wrong := [Problem(what.format(key), remedy=SET_BY_VERL[key]) for key in given if key in SET_BY_VERL]:
        raise ConfigError(wrong)
    return get_algorithm(name, **given, **controlled)


def read_run_settings(config: Any) -> RunSettings | None:
    given = _section(config, "algorithm.dew_run")
    if not given:
        return None
    try:
        settings = RunSettings(**{**given, "folder": str(Path(given["folder"]).expanduser().absolute())})
    except (KeyError, TypeError):  # no folder, or an unknown name
        remedy = "Its settings are folder (required), records_every, records_groups and records_keep."
        raise ConfigError(Problem(f"algorithm.dew_run={given}.", remedy=remedy)) from None
    wrong: list[str | Problem | None] = [*wrong_types(settings)]
    wrong += [SETTINGS[name].problem(name, value) for name, value in vars(settings).items() if name != "folder"]
    if any(wrong):
        raise ConfigError(filter(None, wrong))
    return settings


def check_folder(config: Any, folder: str) -> None:
    """Raise an error if the folder holds a run that verl will not resume, or if verl would resume another run: one run
    would have the metrics or the weights of two. A run that ended before its first checkpoint may start again."""
    mode, where = read(config, "trainer.resume_mode"), Path(str(read(config, "trainer.default_local_dir")))
    run, saved = RunFolder(folder).run(), (where / VERLS_LATEST).is_file()
    same = run.get("engine") == "verl" and algorithm_of(run)[0] == read(config, "algorithm.adv_estimator")
    ended = run.get("status") == "done" or (Path(run.get("checkpoints") or where) / VERLS_LATEST).is_file()
    goes_on = same and (saved or not ended)
    if RunFolder(folder).used() and not (mode == "resume_path" or (mode == "auto" and goes_on)):
        what = f"algorithm.dew_run.folder={folder} holds an earlier run, which verl would not resume."
        why = f"Its checkpoints are in {run['checkpoints']}." if run.get("checkpoints") else ""
        raise ConfigError(Problem(what, why, "Choose another folder, or delete this one."))
    if mode == "auto" and saved and not same:
        what = f"verl would resume from the checkpoint in {where}, but {folder} has no such run."
        remedy = "Set another trainer.experiment_name; to train that model further, resume_mode=resume_path."
        raise ConfigError(Problem(what, remedy=remedy))


def changed_by_verl(algorithm: Algorithm) -> list[Problem]:
    """Find settings of the algorithm that a default of verl changes: 0.2 as GSPO's clip range, or no DAPO filter."""
    if algorithm.name not in dew_estimators():
        return []
    verls = {"clip_low": 0.2, "clip_high": 0.2, "dynamic_sampling": False}
    own = {field.name: field.default for field in fields(algorithm)}
    what = f"{algorithm.name} trains with {{}}={{}}, verl's default; its own default is {{}}."
    changed = {k: x for k, x in verls.items() if getattr(algorithm, k) == x != own[k]}
    return [Problem(what.format(k, x, own[k]), remedy=SET_BY_VERL[k]) for k, x in changed.items()]


def check(config: Any, *, estimators: Collection[str] = (), losses: Collection[str] = ()) -> Algorithm:
    """Return the algorithm, or raise one error with every problem. `estimators`, `losses`: names that verl knows."""
    name, algorithm = str(read(config, "algorithm.adv_estimator")), None
    credits = name in dew_estimators()
    problems = _mode_problems(config)
    if credits:
        problems += _scoring_problems(config, algorithm_classes()[name])
    try:
        algorithm = read_algorithm(config)
        problems += _loss_problems(config, algorithm) if credits else _stock_problems(config, name, estimators, losses)
        problems += _unread_keys(config, algorithm)
        read_run_settings(config)
    except DewError as error:
        problems += error.problems
    if problems or algorithm is None:
        raise EngineError(problems)
    return algorithm


def _mode_problems(config: Any) -> list[Problem]:
    mode = str(read(config, "trainer.v1.trainer_mode"))
    if not read(config, "trainer.use_v1", True):
        return [Problem("trainer.use_v1=False: verl's old trainer drops the old policy's entropy.", remedy=SWITCH_ON)]
    if mode in MODES.values():
        what = f"trainer.v1.trainer_mode={mode} drops the old policy's entropy and writes no run folder."
        return [Problem(what, remedy=f"Set trainer.v1.trainer_mode=dew_{mode}.")]
    return [] if mode in MODES else [unknown(f"trainer.v1.trainer_mode={mode} is not known.", mode, MODES)]


def _unread_keys(config: Any, algorithm: Algorithm) -> list[Problem]:
    """Find settings of dew outside its sections, and keys whose names verl has changed: nothing reads them."""
    ours, credits = ("dew", "dew_run"), algorithm.name in dew_estimators()  # an estimator of the user's may read others
    settings = {*algorithm_classes(), *(field.name for field in fields(algorithm))} if credits else set()
    given = [key for key in read(config, "algorithm") if key not in ours]
    wrong = [f"algorithm.{key}" for key in given if key in settings or did_you_mean(key, ours)]
    wrong += [key for key in config if key in settings or key in ours]
    found = [Problem(f"{key} is not read.", remedy="Write +algorithm.dew.NAME=VALUE (or dew_run).") for key in wrong]
    moved = ("reward_model", "custom_reward_function", "sandbox_fusion")
    sections = {name: plain(read(config, name, {})) for name in moved}
    if old := [key for key, value in flat(sections).items() if value not in (None, {})]:
        remedy = "Write e.g. reward.custom_reward_function.path, reward.reward_manager.name, reward.reward_kwargs."
        found.append(Problem(f"{', '.join(old)}: this release of verl does not read these keys.", remedy=remedy))
    return found


def _loss_problems(config: Any, algorithm: Algorithm) -> list[Problem]:
    """Find settings that would be ignored, or that would change the algorithm."""
    name, found, ours, divisor = algorithm.name, [], reduction(algorithm), f"{ACTOR}.loss_scale_factor"
    unread: dict[str, tuple[Any, Any]] = {  # verl's key -> its default, and the value that describes the algorithm
        LOSS_MODE: ("vanilla", DEW_LOSS),
        f"{ACTOR}.loss_agg_mode": ("token-mean", ours[f"{ACTOR}.loss_agg_mode"]),
        divisor: (None, ours.get(divisor, "null")),
        "algorithm.norm_adv_by_std_in_grpo": (True, algorithm.scale),
        **{f"{ACTOR}.{key}": (default, default) for key, default in VERLS_LOSS.items()},
    }
    for key, allowed in unread.items():
        if (given := read(config, key, allowed[0])) not in allowed:
            remedy = f"Set {key}={allowed[1]}; settings of {name} are +algorithm.dew.NAME=VALUE."
            found.append(Problem(f"{key}={given}: {name} has its own credit and loss.", remedy=remedy))
    if read(config, f"{ROLLOUT}.n") == 1:  # the default of verl
        found.append(Problem(f"{ROLLOUT}.n=1: answers to the same prompt are compared.", remedy="Use at least 2."))
    key, metric = "algorithm.filter_groups.metric", read(config, "algorithm.filter_groups.metric")
    if algorithm.dynamic_sampling and metric != "acc":
        what = f"{key}={metric} would keep groups whose answers differ only in a penalty."
        found.append(Problem(what, remedy=f"Set {key}=acc."))
    if algorithm.overlong != "none" and read(config, "reward.reward_kwargs.overlong_buffer_cfg.enable"):
        what = f"algorithm.dew.overlong={algorithm.overlong} and verl's overlong_buffer_cfg would both penalize length."
        found.append(Problem(what, remedy="Remove one of them."))
    if read(config, "distillation.enabled"):
        found.append(Problem(f"{name} and distillation both replace the actor's loss.", remedy="Use only one of them."))
    return found


def _scoring_problems(config: Any, algorithm: type[Algorithm]) -> list[Problem]:
    """Find settings with which the entropy is missing, or computed in 16 bits.

    FSDP computes H = logsumexp − Σ p·logit in the precision of the logits. In bf16, H is zero or negative for most
    tokens. verl has options to use float32.
    """
    if algorithm.needs_entropy == "no":
        return []
    name, bypass = algorithm.name, "algorithm.rollout_correction.bypass_mode"
    fused = read(config, f"{MODEL}.use_fused_kernels")
    chunked = read(config, f"{FSDP}.entropy_from_logits_with_chunking") and read(config, f"{MODEL}.use_remove_padding")
    strategy, dtype = read(config, f"{ACTOR}.strategy", "fsdp"), read(config, f"{FSDP}.mixed_precision.param_dtype")
    in_bf16 = str(strategy) in ("fsdp", "fsdp2") and str(dtype) not in ("fp32", "float32")
    found = []
    if read(config, bypass):
        what = f"{bypass}=True skips the pass that computes the entropy that {name} needs."
        found.append(Problem(what, remedy="Set it to False."))
    if in_bf16 and not chunked and not fused:
        what = "verl would compute the entropy in bf16, as a small difference of large numbers: most of it is rounding."
        remedy = f"Set {ACTOR}.entropy_from_logits_with_chunking=True with {MODEL}.use_remove_padding=True"
        found.append(Problem(what, remedy=f"{remedy}, for float32 (or {MODEL}.use_fused_kernels=True)."))
    if algorithm.needs_entropy == "current" and not read(config, f"{ACTOR}.calculate_entropy"):
        remedy = f"Set {ACTOR}.calculate_entropy=True."
        found.append(Problem(f"{name} uses the entropy of the policy being trained.", remedy=remedy))
    return found


def _stock_problems(config: Any, name: str, estimators: Collection[str], losses: Collection[str]) -> list[Problem]:
    """Find problems of one of verl's own estimators in dew's trainer modes, where dew only records the run."""
    found = []
    if name in algorithm_classes() and not runs_on_verl(algorithm_classes()[name]):
        found.append(only_on_trl(name))
    elif estimators and name not in estimators:
        own = "Its settings are +algorithm.dew.NAME=VALUE." if "(" in name else ""
        found.append(unknown(f"algorithm.adv_estimator={name} is not known.", name.partition("(")[0], estimators, own))
    if name.endswith("optimal_token_baseline"):
        what = f"algorithm.adv_estimator={name} needs Σπ², which only verl's old trainer computes."
        old = "python -m verl.trainer.main_ppo trainer.use_v1=False"
        found.append(Problem(what, remedy=f"Train without dew: {old}."))
    if read(config, "algorithm.dew"):
        found.append(Problem(f"algorithm.dew.* are settings of dew's estimators; algorithm.adv_estimator is {name}."))
    if losses and (mode := str(read(config, LOSS_MODE))) not in losses:
        found.append(unknown(f"{LOSS_MODE}={mode} is not known.", mode, losses))
    if read(config, LOSS_MODE) == DEW_LOSS:
        found.append(Problem(f"{LOSS_MODE}={DEW_LOSS} cannot be combined with verl's own estimator {name}."))
    return found


def import_modules(names: str | list[str] | None) -> None:
    """Import the user's modules, which register algorithms: verl's `external_lib`, a name or a list of names."""
    for name in filter(None, names if isinstance(names, list) else [names]):
        try:
            import_module(str(name))
        except Exception as error:  # the user's code may raise anything
            what = f"{name} cannot be imported ({type(error).__name__}: {error})."
            remedy = "Install it or put its folder on PYTHONPATH, on every node."
            raise ConfigError(Problem(what, remedy=remedy)) from None
