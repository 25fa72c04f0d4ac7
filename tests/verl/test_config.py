"""verl's configuration as dew reads it: the same settings and errors as elsewhere, and refusals."""

from copy import deepcopy

import pytest

from dew.algorithms import GRPO, GTPO, algorithm_classes, list_algorithms
from dew.engines.verl.config import (
    MODES,
    SET_BY_VERL,
    changed_by_verl,
    check,
    check_folder,
    dew_estimators,
    read_algorithm,
    read_run_settings,
    stock_estimator,
)
from dew.engines.verl.recorder import Recorder
from dew.errors import ConfigError, DewError
from dew.run.folder import VERLS_LATEST, RunFolder

ACTOR_DEFAULTS = {
    "policy_loss": {"loss_mode": "vanilla"}, "loss_agg_mode": "token-mean", "clip_ratio": 0.2, "clip_ratio_low": None,
    "clip_ratio_high": 0.28, "calculate_entropy": False, "use_kl_loss": False, "kl_loss_coef": 0.001,
    "strategy": "fsdp2", "fsdp_config": {"entropy_from_logits_with_chunking": True, "mixed_precision": None},
}  # fmt: skip
FILTER = {"enable": False, "metric": "reward"}
VERL = {
    "algorithm": {"adv_estimator": "gtpo", "filter_groups": FILTER, "rollout_correction": {"bypass_mode": False}},
    "actor_rollout_ref": {"actor": ACTOR_DEFAULTS, "model": {"use_remove_padding": True, "use_fused_kernels": False}},
    "data": {"max_response_length": 4096},
    "trainer": {"use_v1": True, "v1": {"trainer_mode": "dew_sync"}},
}


def verl(**changes):
    """A configuration that works, with `a__b=value` changed."""
    config = deepcopy(VERL)
    for path, value in changes.items():
        *folders, last = path.split("__")
        place = config
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return config


ACTOR = "actor_rollout_ref__actor__"


def test_settings_of_the_algorithm():
    config = verl(algorithm__dew={"alpha2": 0.2, "entropy_clip": [0.1, 2.0]})
    assert check(config) == GTPO(alpha2=0.2, entropy_clip=(0.1, 2.0), max_tokens=4096)
    (problem,) = changed_by_verl(check(verl(algorithm__adv_estimator="gspo")))
    assert problem.remedy == SET_BY_VERL["clip_low"]


LOSS = "actor_rollout_ref__actor__policy_loss__loss_mode"


def test_verls_own_estimator_is_only_recorded():
    algorithm = check(verl(algorithm__adv_estimator="rloo"), estimators=["rloo"])
    assert (algorithm.name, algorithm.max_tokens, algorithm.clip_high) == ("rloo", 4096, 0.28)
    with pytest.raises(DewError, match=r"Did you mean 'gtpo'\? Its settings are \+algorithm\.dew\.NAME=VALUE"):
        check(verl(algorithm__adv_estimator="gtpo(alpha2=0.5)"), estimators=["rloo", "gtpo"])


def test_which_algorithms_get_an_estimator_of_dews():
    stock = {name: stock_estimator(cls) for name, cls in algorithm_classes().items() if stock_estimator(cls)}
    assert stock == {"grpo": "grpo"}
    elsewhere = {"trl", "otb", "kl_cov"}  # TRL's own loss; verl's own estimator and loss
    assert {*dew_estimators(), *stock} == set(list_algorithms()) - elsewhere


def test_a_subclass_does_not_inherit_verls_own_estimator():
    """It may compute something else, and would silently train its base class."""
    mine = type("Mine", (GRPO,), {"name": "mine"})
    assert mine.verl_estimator == "grpo" and stock_estimator(mine) is None


def test_what_verl_controls_is_read_from_verl():
    filtered = {"enable": True, "metric": "acc"}
    algorithm = read_algorithm(verl(actor_rollout_ref__actor__use_kl_loss=True, algorithm__filter_groups=filtered))
    assert (algorithm.kl_coef, algorithm.dynamic_sampling) == (0.001, True)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────
FSDP, MODEL = f"{ACTOR}fsdp_config__", "actor_rollout_ref__model__"
IN_BF16 = {f"{FSDP}entropy_from_logits_with_chunking": False}
EXACT = {f"{FSDP}mixed_precision": {"param_dtype": "fp32"}}
BYPASS = {"algorithm__rollout_correction__bypass_mode": True}
BUFFER = {"reward": {"reward_kwargs": {"overlong_buffer_cfg": {"enable": True}}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[
            ({"trainer__v1__trainer_mode": mode}, f"Set trainer.v1.trainer_mode=dew_{mode}.")  # without the entropy
            for mode in ("sync", "colocate_async", "separate_async")
        ],
        ({"trainer__v1__trainer_mode": "async"}, "trainer_mode=async is not known."),
        ({"trainer__use_v1": False}, "trainer.use_v1=False"),
        (BYPASS, "bypass_mode=True"),
        *[
            ({"algorithm__filter_groups": {"enable": True, "metric": metric}}, "algorithm.filter_groups.metric=acc")
            for metric in ("reward", "seq_final_reward", None)  # not raw correctness
        ],
        ({"algorithm__dew": {"alhpa1": 1.0}}, "gtpo has no setting 'alhpa1'. Did you mean 'alpha1'?"),
        ({"algorithm__dew": {"name": "gtpo"}}, "gtpo has no setting 'name'."),
        ({"algorithm__dew": 0.2}, "algorithm.dew=0.2 is not a setting"),
        ({"algorithm__dew": {"alpha2": -0.1}}, "alpha2=-0.1: a wrong answer would be rewarded for being sure"),
        *[
            ({"algorithm__dew": {key: 1}}, f"algorithm.dew.{key}: in a verl run, verl controls this")
            for key in SET_BY_VERL
        ],
        ({"algorithm__adv_estimator": "GROP"}, "Did you mean 'grpo'?"),  # a name of verl's
        ({"algorithm__adv_estimator": "grpo", LOSS: "kl_cvo"}, "kl_cvo is not known. Did you mean 'kl_cov'?"),
        ({"algorithm__adv_estimator": "optimal_token_baseline"}, "Train without dew: python -m verl.trainer.main_ppo"),
        ({"actor_rollout_ref__rollout": {"n": 1}}, "rollout.n=1: answers to the same prompt are compared."),
        ({"algorithm__adv_estimator": "grpo", "algorithm__dew": {"alpha1": 1.0}}, "adv_estimator is grpo"),
        ({"algorithm__adv_estimator": "grpo", LOSS: "dew"}, "loss_mode=dew cannot be combined with"),
        ({LOSS: "gspo"}, "loss_mode=dew"),
        ({"algorithm__adv_estimator": "grpo_s", LOSS: "grpo_s"}, "loss_mode=grpo_s"),
        ({f"{ACTOR}loss_agg_mode": "seq-mean-token-mean"}, "loss_agg_mode=token-mean"),  # would be ignored
        ({"algorithm__norm_adv_by_std_in_grpo": False}, "Set algorithm.norm_adv_by_std_in_grpo=True"),
        *[({f"{ACTOR}{key}": 2}, "settings of gtpo are") for key in ("clip_ratio_c", "policy_loss__clip_cov_lb")],
        ({"algorithm__adv_estimator": "dr_grpo", f"{ACTOR}loss_scale_factor": 99}, "loss_scale_factor=4096"),
        ({f"{ACTOR}loss_scale_factor": 99}, "loss_scale_factor=null"),  # hydra reads None as text
        ({"algorithm__gtpo": {"alpha2": 0.2}}, "algorithm.gtpo is not read. Write +algorithm.dew."),
        *[({key: {"a": 1}}, "is not read. Write +") for key in ("algorithm__alpha2", "gtpo", "dew", "dew_run")],
        ({"algorithm__dwe": {"alpha2": 0.2}}, "algorithm.dwe is not read"),
        ({"custom_reward_function": {"path": "mine.py", "name": None}}, "custom_reward_function.path: this release"),
        ({"sandbox_fusion": {"url": "http://box"}}, "sandbox_fusion.url: this release"),
        ({"distillation": {"enabled": True}}, "distillation"),
        ({"algorithm__adv_estimator": "entropy_advantage"}, "actor_rollout_ref.actor.calculate_entropy=True"),
        (IN_BF16, "entropy_from_logits_with_chunking=True"),
        ({f"{MODEL}use_remove_padding": False}, "use_remove_padding=True"),  # verl then does not chunk
        ({"algorithm__adv_estimator": "otb"}, "otb works only on TRL. Choose another"),
        ({"algorithm__dew": {"overlong": "group"}, **BUFFER}, "both penalize length"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(DewError) as error:
        check(verl(**changes), estimators=["grpo", "optimal_token_baseline"], losses=["vanilla", "kl_cov", "dew"])
    assert message in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm__adv_estimator": "grpo_s", f"{ACTOR}loss_agg_mode": "seq-mean-token-mean", LOSS: "dew"},
        {**IN_BF16, f"{MODEL}use_fused_kernels": True},
        {**IN_BF16, **EXACT},
        {"algorithm__adv_estimator": "dr_grpo", "algorithm__norm_adv_by_std_in_grpo": False},
        {"algorithm__adv_estimator": "the user's own", "algorithm__threshold": 0.2},
        {**IN_BF16, f"{ACTOR}strategy": "megatron"},  # not FSDP's arithmetic
        *[{"trainer__v1__trainer_mode": mode} for mode in MODES],
    ],
)
def test_accepted(changes):
    check(verl(**changes))


def test_all_problems_are_listed_at_once():
    with pytest.raises(DewError) as error:
        check(verl(trainer__v1__trainer_mode="sync", **BYPASS, algorithm__dew={"x": 1}))
    assert len(error.value.problems) == 3


# ── the run's folder ────────────────────────────────────────────────────────────────────────────────────────
def test_the_folder_is_absolute_because_workers_start_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = read_run_settings(verl(algorithm__dew_run={"folder": "runs/a", "records_every": 5}))
    assert (settings.folder, settings.records_every, settings.records_groups) == (str(tmp_path / "runs/a"), 5, 4)
    assert read_run_settings(verl()) is None, "without a folder nothing is recorded"


@pytest.mark.parametrize(
    "given", [{"records_every": 5}, {"folder": "a", "x": 5}, *[{"folder": "a", "records_groups": n} for n in (0, "4")]]
)
def test_run_settings_that_cannot_work(given):
    with pytest.raises(ConfigError, match=r"dew_run|records_groups=0|records_groups='4' is not"):
        read_run_settings(verl(algorithm__dew_run=given))


def test_a_killed_run_with_checkpoints_elsewhere_is_not_replaced(tmp_path):
    folder, auto = str(tmp_path / "run"), {"trainer__resume_mode": "auto"}
    first, second = (
        verl(**auto, trainer__default_local_dir=str(tmp_path / x), algorithm__dew_run={"folder": folder},
             data__train_batch_size=4, actor_rollout_ref__rollout={"n": 2})
        for x in ("saved", "elsewhere")
    )  # fmt: skip
    recorder = Recorder(read_run_settings(first), check(first))
    recorder.start(first, steps=7, done=0)
    RunFolder(folder).append_metrics({"step": 1})
    recorder.end("failed")
    check_folder(second, folder)  # it has no checkpoint
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / VERLS_LATEST).touch()
    check_folder(first, folder)
    with pytest.raises(ConfigError, match=r"holds an earlier run.* Its checkpoints are in .*saved"):
        check_folder(second, folder)
