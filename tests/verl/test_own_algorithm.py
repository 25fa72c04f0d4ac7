"""An algorithm that a user registers in a module of their own runs on verl without a change to the engine."""

import sys
from types import SimpleNamespace

import pytest
import torch

from dew.algorithms import get_algorithm
from dew.engines.verl.config import check, dew_estimators, read_algorithm
from dew.engines.verl.estimators import BatchContext, batch_context, estimator, policy_loss
from dew.engines.verl.launch import prepare
from dew.errors import ConfigError
from dew.run.config import make_run
from verl_rows import context

MODULE, NAME = "verl_own_algorithm", "first_tokens"
ACTOR = "actor_rollout_ref.actor"
REWARDS = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
MASK = torch.ones(2, 3, dtype=torch.long)


@pytest.fixture
def unregistered(algorithm_registry, monkeypatch):
    """As in a new process: nothing has imported the user's module."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    algorithm_registry.pop(NAME.replace("_", ""), None)


@pytest.fixture
def registered(unregistered):
    __import__(MODULE)


def recipe(**verl):
    keys = {"task": "countdown", "model_name_or_path": "tiny", "algorithm": NAME, "algorithm_kwargs": {"first": 1}}
    return make_run({"engine": "verl", "num_generations": 4, "lr_scheduler_type": "constant", **keys, "verl": verl})


@pytest.mark.parametrize("how", ["external_lib", "environment"])
def test_a_recipe_finds_the_module_and_trains_with_its_estimator_and_loss(unregistered, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", f"json,{MODULE}")
    launch = prepare(recipe(**({"actor_rollout_ref.model.external_lib": MODULE} if how == "external_lib" else {})))
    assert launch["algorithm.adv_estimator"] == NAME and launch[f"{ACTOR}.policy_loss.loss_mode"] == "dew"
    assert launch["algorithm.dew.first"] == 1 and launch["algorithm.filter_groups.enable"] is True


def test_a_module_that_cannot_be_imported_is_named(unregistered, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("register(undefined)")
    monkeypatch.syspath_prepend(tmp_path)
    for module, why in (("no_such_module", "No module named"), ("broken_module", "NameError: name 'register'")):
        with pytest.raises(ConfigError, match=f"{module} cannot be imported .*{why}"):
            prepare(recipe(**{"actor_rollout_ref.model.external_lib": module}))
    with pytest.raises(ConfigError, match="'first_tokens'"):
        prepare(recipe())


def test_its_settings_come_from_verls_configuration(registered):
    config = {
        "algorithm": {"adv_estimator": NAME, "dew": {"first": 1}, "rollout_correction": {"bypass_mode": True}},
        "trainer": {"v1": {"trainer_mode": "dew_sync"}},
        "data": {"max_response_length": 8},
    }
    assert NAME in dew_estimators()
    expected = get_algorithm(NAME, first=1, max_tokens=8, clip_high=0.2, dynamic_sampling=False)
    assert check(config) == read_algorithm(config) == expected


def test_estimator_and_loss_are_its_own(registered):
    """Two answers, one correct: A = ±1 / (1 + 1e-4) with the sample std 0.7071; only the first token trains."""
    with batch_context(context(NAME, None, {"first": 1})):
        advantages, _ = estimator(NAME)(token_level_rewards=REWARDS, response_mask=MASK, index=["a", "a"])
    plain = 0.5 / (0.5**0.5 + 1e-4)
    torch.testing.assert_close(advantages, torch.tensor([[plain, 0, 0], [-plain, 0, 0]]))
    logp, config = torch.zeros(2, 3), SimpleNamespace(global_batch_info={})
    with batch_context(BatchContext(algorithm=get_algorithm(NAME, factor=3.0))):
        value, metrics = policy_loss(logp, logp, torch.ones(2, 3), MASK, config=config)
    assert value.item() == pytest.approx(-3.0) and metrics["actor/dew/own/factor"] == 3.0
