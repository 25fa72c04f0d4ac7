"""An algorithm of dew's in verl's words: which estimator, which loss, which filter, and the settings of each."""

from dataclasses import fields
from typing import Any

from dew.algorithms import Algorithm
from dew.engines.verl.keys import ACTOR, SET_BY_ALGORITHM
from dew.engines.verl.reading import Reader
from dew.engines.verl.words import Overrides

NO_DUAL_CLIP = 1e9
"""verl's vanilla loss also bounds the loss of wrong answers (dual clip): off above exp(20), its largest ratio."""
OWN_ESTIMATORS = ("gtpo", "grpo_s", "forking_tokens", "entropy_advantage")
BASELINES = ("grpo", "dapo", "dr_grpo", "gspo")
ELSEWHERE = ("clip_low", "clip_high", "kl_coef", "dynamic_sampling", "max_rounds", "oversample", "max_tokens")
"""Settings of an algorithm that verl has keys of its own for."""


def objective(read: Reader, algorithm: Algorithm) -> Overrides:
    name = algorithm.name
    if name not in (*OWN_ESTIMATORS, *BASELINES):
        read.problems.append(f"algorithm={name!r}: verl has no estimator for it. Choose one of dew's own, or TRL.")
    for trl, setting in SET_BY_ALGORITHM.items():
        given, own = read.given.get(trl), getattr(algorithm, setting)
        if given is not None and given != own:
            read.problems.append(
                f"{trl}={given}, but {name} trains with {own}: write algorithm_kwargs {{{setting}: {given}}}."
            )
    found: Overrides = {
        "algorithm.adv_estimator": name if name in OWN_ESTIMATORS else "grpo",
        f"{ACTOR}.policy_loss.loss_mode": _loss_mode(algorithm),
        f"{ACTOR}.loss_agg_mode": _aggregation(algorithm),
        f"{ACTOR}.clip_ratio_low": algorithm.clip_low,
        f"{ACTOR}.clip_ratio_high": algorithm.clip_high,
        f"{ACTOR}.entropy_coeff": 0,
        f"{ACTOR}.calculate_entropy": True,
        f"{ACTOR}.entropy_from_logits_with_chunking": True,
        f"{ACTOR}.entropy_checkpointing": True,  # or the update would keep float32 copies of the logits
        f"{ACTOR}.use_kl_loss": algorithm.kl_coef > 0,
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": False,
        "algorithm.filter_groups.enable": algorithm.dynamic_sampling,
        "algorithm.filter_groups.metric": "acc",
    }
    if found[f"{ACTOR}.policy_loss.loss_mode"] == "vanilla":
        found[f"{ACTOR}.clip_ratio_c"] = NO_DUAL_CLIP
    if algorithm.kl_coef > 0:
        found |= {f"{ACTOR}.kl_loss_coef": algorithm.kl_coef, f"{ACTOR}.kl_loss_type": "low_var_kl"}
    if name == "dr_grpo":
        found |= {
            "algorithm.norm_adv_by_std_in_grpo": False,
            f"{ACTOR}.loss_scale_factor": algorithm.max_tokens,
        }
    if algorithm.dynamic_sampling and algorithm.max_rounds != type(algorithm)().max_rounds:
        read.problems.append(f"max_rounds={algorithm.max_rounds}: verl samples until the batch is full; leave it out.")
    if algorithm.dynamic_sampling and algorithm.oversample != 1:
        read.notes.append(f"oversample={algorithm.oversample:g}: verl samples its own number of prompts at a time")
    return found | (_own_settings(algorithm) if name in OWN_ESTIMATORS else _reward_manager(read, algorithm))


def _loss_mode(algorithm: Algorithm) -> str:
    """dew's own losses with dew's estimators, verl's own with verl's."""
    if algorithm.name in OWN_ESTIMATORS:
        return {"token": "gtpo", "sequence_mean": "grpo_s", "sequence_geometric": "grpo_s_geometric"}[algorithm.ratio]
    return "gspo" if algorithm.ratio == "sequence_geometric" else "vanilla"


def _aggregation(algorithm: Algorithm) -> str:
    if algorithm.name == "dr_grpo":
        return "seq-mean-token-sum-norm"
    return "token-mean" if algorithm.reduce == "tokens" else "seq-mean-token-mean"


def _beyond(algorithm: Algorithm) -> dict[str, Any]:
    """Settings that differ from the paper's, less those that verl has keys for."""
    plain: Any = type(algorithm)()
    return {
        f.name: getattr(algorithm, f.name)
        for f in fields(algorithm)
        if f.name not in ELSEWHERE and getattr(algorithm, f.name) != getattr(plain, f.name)
    }


def _own_settings(algorithm: Algorithm) -> Overrides:
    return {f"+algorithm.dew.{name}": value for name, value in _beyond(algorithm).items()}


def _reward_manager(read: Reader, algorithm: Algorithm) -> Overrides:
    """Baselines are verl's own; DAPO's overlong punishment is its reward manager's."""
    settings = _beyond(algorithm)
    soft = settings.pop("overlong", "none") == "soft"
    buffer = settings.pop("overlong_buffer", None)
    if algorithm.overlong == "group":
        settings["overlong"] = "group"
    for name, value in settings.items():
        read.problems.append(f"{name}={value!r}: verl's own {algorithm.name} has no such setting; leave it out.")
    if not soft:
        return {}
    where = "+reward.reward_kwargs.overlong_buffer_cfg"
    return {
        "reward.reward_manager.name": "dapo",
        f"{where}.enable": True,
        f"{where}.len": buffer,
        f"{where}.penalty_factor": 1.0,
        f"{where}.log": False,
        "+reward.reward_kwargs.max_resp_len": algorithm.max_tokens,
    }
