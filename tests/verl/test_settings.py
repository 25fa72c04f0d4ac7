"""verl's configuration as dew reads it: the same settings and errors as elsewhere, and refusals."""

from copy import deepcopy

import pytest

from dew.algorithms import DAPO, GRPO, GRPOS, GTPO, algorithm_classes, list_algorithms
from dew.engines.verl.config import (
    SET_BY_VERL,
    check,
    dew_estimators,
    read,
    read_algorithm,
    read_run_settings,
    stock_estimator,
)
from dew.errors import ConfigError, DewError

VERL = {
    "algorithm": {
        "adv_estimator": "gtpo",
        "filter_groups": {"enable": False, "metric": "reward"},
        "rollout_correction": {"bypass_mode": False},
    },
    "actor_rollout_ref": {
        "actor": {
            "policy_loss": {"loss_mode": "vanilla"},
            "loss_agg_mode": "token-mean",
            "clip_ratio": 0.2,
            "clip_ratio_low": None,
            "clip_ratio_high": 0.28,
            "calculate_entropy": False,
            "use_kl_loss": False,
            "kl_loss_coef": 0.001,
            "strategy": "fsdp2",
            "fsdp_config": {"entropy_from_logits_with_chunking": True, "mixed_precision": None},
        },
        "model": {"use_remove_padding": True, "use_fused_kernels": False},
    },
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


def refused(**changes):
    with pytest.raises(DewError) as error:
        check(verl(**changes))
    return str(error.value)


ACTOR = "actor_rollout_ref__actor__"


def test_the_papers_algorithm_with_verls_clipping():
    assert check(verl()) == GTPO(max_tokens=4096, clip_low=0.2, clip_high=0.28)


def test_settings_of_the_algorithm():
    config = verl(algorithm__dew={"alpha2": 0.2, "entropy_clip": [0.1, 2.0]})
    assert check(config) == GTPO(alpha2=0.2, entropy_clip=(0.1, 2.0), max_tokens=4096)


LOSS = "actor_rollout_ref__actor__policy_loss__loss_mode"


@pytest.mark.parametrize("loss", ["vanilla", "dew"])
def test_names_of_an_algorithms_own_loss(loss):
    assert isinstance(check(verl(algorithm__adv_estimator="grpo_s", **{LOSS: loss})), GRPOS)


def test_verls_own_estimator_is_only_recorded():
    algorithm = check(verl(algorithm__adv_estimator="rloo"), estimators=["rloo"])
    assert (algorithm.name, algorithm.max_tokens, algorithm.clip_high) == ("rloo", 4096, 0.28)


def test_which_algorithms_get_an_estimator_of_dews():
    assert dew_estimators()[:5] == ["dew", "gtpo", "grpo_s", "forking_tokens", "entropy_advantage"]
    assert {"cispo", "sapo", "maxrl", "qae", "w_reinforce", "clip_cov", "kl_cov", "otb"} <= set(dew_estimators())
    stock = {name: stock_estimator(cls) for name, cls in algorithm_classes().items() if stock_estimator(cls)}
    assert stock == dict.fromkeys(("grpo", "dapo", "dr_grpo", "gspo"), "grpo")
    assert {*dew_estimators(), *stock} == set(list_algorithms()) - {"trl"}  # TRL's own loss


@pytest.mark.parametrize("base", [GRPO, DAPO])
def test_a_subclass_does_not_inherit_verls_own_estimator(base):
    """It may compute something else, and would silently train its base class."""
    mine = type("Mine", (base,), {"name": "mine"})
    assert mine.verl_estimator == "grpo" and stock_estimator(mine) is None


def test_what_verl_controls_is_read_from_verl():
    config = verl(
        actor_rollout_ref__actor__use_kl_loss=True, algorithm__filter_groups={"enable": True, "metric": "acc"}
    )
    algorithm = read_algorithm(config)
    assert (algorithm.kl_coef, algorithm.dynamic_sampling) == (0.001, True)


@pytest.mark.parametrize("mode", ["dew_sync", "dew_colocate_async", "dew_separate_async"])
def test_every_trainer_mode_of_dews_is_accepted(mode):
    check(verl(trainer__v1__trainer_mode=mode))


def test_reading_a_missing_key():
    assert read(verl(), "algorithm.nothing.here", 7) == 7
    assert read(verl(), "actor_rollout_ref.actor.clip_ratio_low", 0.5) == 0.5


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_trainer_mode_without_the_entropy(mode):
    assert f"Set trainer.v1.trainer_mode=dew_{mode}." in refused(trainer__v1__trainer_mode=mode)


def test_an_unknown_trainer_mode():
    assert "trainer_mode=async is not known. Choose one of: dew_sync, " in refused(trainer__v1__trainer_mode="async")


def test_sums_of_squares_in_16_bits_or_left_out():
    otb = {"algorithm__adv_estimator": "otb"}
    exact = {"actor_rollout_ref__actor__fsdp_config__mixed_precision": {"param_dtype": "fp32"}}
    assert check(verl(**otb, **exact)).needs_sum_sq
    assert check(verl(**otb, actor_rollout_ref__actor__strategy="megatron")).needs_sum_sq
    assert "param_dtype=fp32" in refused(**otb)
    assert "use_fused_kernels=True" in refused(**otb, **exact, actor_rollout_ref__model__use_fused_kernels=True)
    assert "bypass_mode=True" in refused(**otb, **exact, algorithm__rollout_correction__bypass_mode=True)


def test_the_old_trainer():
    assert "trainer.use_v1=False" in refused(trainer__use_v1=False)


def test_bypass_mode():
    assert "bypass_mode=True" in refused(algorithm__rollout_correction__bypass_mode=True)


@pytest.mark.parametrize("metric", ["reward", "seq_final_reward", None])
def test_a_filter_on_anything_but_raw_correctness(metric):
    message = refused(algorithm__filter_groups={"enable": True, "metric": metric})
    assert "algorithm.filter_groups.metric=acc" in message


def test_an_unknown_setting():
    assert "gtpo has no setting 'alhpa1'. Did you mean 'alpha1'?" in refused(algorithm__dew={"alhpa1": 1.0})


def test_a_value_that_cannot_work():
    assert "algorithm.dew=0.2 is not a setting" in refused(algorithm__dew=0.2)
    assert "alpha2=-0.1: a wrong answer would be rewarded for being sure" in refused(algorithm__dew={"alpha2": -0.1})


@pytest.mark.parametrize("key", SET_BY_VERL)
def test_settings_that_verl_controls(key):
    assert f"algorithm.dew.{key}: in a verl run, verl controls this" in refused(algorithm__dew={key: 1})


def test_an_unknown_estimator():
    with pytest.raises(DewError, match="gtp0 is not known"):
        check(verl(algorithm__adv_estimator="gtp0"), estimators=["grpo"])


def test_settings_of_dews_with_an_estimator_of_verls():
    assert "adv_estimator is grpo" in refused(algorithm__adv_estimator="grpo", algorithm__dew={"alpha1": 1.0})


@pytest.mark.parametrize(
    ("estimator", "loss"), [("gtpo", "gspo"), ("gtpo", "gtpo"), ("grpo_s", "gspo"), ("grpo_s", "grpo_s")]
)
def test_only_the_algorithms_own_loss(estimator, loss):
    message = refused(algorithm__adv_estimator=estimator, **{LOSS: loss})
    assert f"loss_mode={loss}" in message and "loss_mode=dew" in message


def test_a_reduction_that_the_loss_would_ignore():
    assert "loss_agg_mode=token-mean" in refused(actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-mean")
    check(verl(algorithm__adv_estimator="grpo_s", actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-mean"))


def test_dews_loss_with_an_estimator_of_verls():
    assert "loss_mode=dew cannot be combined with" in refused(algorithm__adv_estimator="grpo", **{LOSS: "dew"})


def test_distillation_replaces_the_same_loss():
    assert "distillation" in refused(distillation={"enabled": True})


def test_the_current_policys_entropy_must_be_computed():
    message = refused(algorithm__adv_estimator="entropy_advantage")
    assert "actor_rollout_ref.actor.calculate_entropy=True" in message


FSDP, MODEL = f"{ACTOR}fsdp_config__", "actor_rollout_ref__model__"
IN_BF16 = {f"{FSDP}entropy_from_logits_with_chunking": False}


def test_an_entropy_that_is_mostly_rounding():
    assert "entropy_from_logits_with_chunking=True" in refused(**IN_BF16)
    assert "use_remove_padding=True" in refused(**{f"{MODEL}use_remove_padding": False})  # verl then does not chunk


@pytest.mark.parametrize(
    "exact",
    [
        {f"{MODEL}use_fused_kernels": True},
        {f"{FSDP}mixed_precision": {"param_dtype": "fp32"}},
        {f"{ACTOR}strategy": "megatron"},  # not this arithmetic
    ],
)
def test_other_ways_to_an_entropy_in_float32(exact):
    check(verl(**IN_BF16, **exact))


def test_two_length_penalties():
    message = refused(
        algorithm__dew={"overlong": "group"}, reward={"reward_kwargs": {"overlong_buffer_cfg": {"enable": True}}}
    )
    assert "both penalize length" in message


def test_all_problems_are_listed_at_once():
    message = refused(
        trainer__v1__trainer_mode="sync", algorithm__rollout_correction__bypass_mode=True, algorithm__dew={"x": 1}
    )
    assert len(message.splitlines()) == 3


# ── the run's folder ────────────────────────────────────────────────────────────────────────────────────────


def test_the_folder_is_absolute_because_workers_start_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = read_run_settings(verl(algorithm__dew_run={"folder": "runs/a", "records_every": 5}))
    assert (settings.folder, settings.records_every, settings.records_groups) == (str(tmp_path / "runs/a"), 5, 4)


def test_without_a_folder_nothing_is_recorded():
    assert read_run_settings(verl()) is None


@pytest.mark.parametrize(
    "given", [{"records_every": 5}, {"folder": "a", "every": 5}, {"folder": "a", "records_groups": 0}, "runs/a"]
)
def test_run_settings_that_cannot_work(given):
    with pytest.raises(ConfigError, match="dew_run"):
        read_run_settings(verl(algorithm__dew_run=given))
