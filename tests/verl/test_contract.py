"""Every place of verl that dew leans on is still there. Needs verl (make test-verl)."""

import importlib
import inspect
import logging

import pytest

pytest.importorskip("verl", reason="verl is not installed: these run with `make test-verl`")

from hydra import compose, initialize_config_module
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from dew.engines.verl import contract, plugin
from dew.engines.verl.settings import MODES, OURS, check, read
from dew.errors import DewError, EngineError


def place(path):
    module, name = path.split(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    behind = getattr(found, "__ray_actor_class__", found)
    return inspect.unwrap(behind)


@pytest.fixture(scope="module")
def config():
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer")


def composed(*overrides):
    exact = "actor_rollout_ref.actor.entropy_from_logits_with_chunking=True"
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[exact, *overrides])


@pytest.mark.parametrize("path", contract.SIGNATURES)
def test_signature(path):
    wanted = contract.SIGNATURES[path]
    found = tuple(inspect.signature(place(path)).parameters)
    assert wanted is None or found == wanted, f"{path} now takes {found}"


def test_source():
    """Lines of several lines' formatting are compared without their white space."""
    missing = []
    for path, lines in contract.SOURCES.items():
        module, name = path.split(":")
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(getattr(found, "__ray_actor_class__", found), part)
        source = "".join(inspect.getsource(getattr(found, "__ray_actor_class__", found)).split())
        missing += [f"{path}: {line}" for line in lines if "".join(line.split()) not in source]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("key", contract.SETTINGS)
def test_key_of_the_configuration(config, key):
    *folder, last = key.split(".")
    parent = read(config, ".".join(folder))
    assert last in parent


def test_verls_own_configuration_becomes_ours_with_three_words():
    algorithm = check(composed("algorithm.adv_estimator=gtpo", "trainer.v1.trainer_mode=dew_sync"))
    assert (algorithm.name, algorithm.clip_low, algorithm.max_tokens) == ("gtpo", 0.2, 512)


def test_settings_travel_through_hydra():
    config = composed(
        "algorithm.adv_estimator=grpo_s", "trainer.v1.trainer_mode=dew_sync", "+algorithm.dew.beta2=0.2",
        "+algorithm.dew.entropy_clip=[0.1,2.0]", "actor_rollout_ref.actor.policy_loss.loss_mode=grpo_s",
    )  # fmt: skip
    algorithm = check(config)
    assert (algorithm.beta2, algorithm.entropy_clip) == (0.2, (0.1, 2.0))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.v1.trainer_mode=sync", "trainer.v1.trainer_mode=dew_sync"),
        ("algorithm.rollout_correction.bypass_mode=True", "bypass_mode=True skips"),
        ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"),
        ("+algorithm.dew.alhpa1=1", "Did you mean 'alpha1'?"),
        ("actor_rollout_ref.actor.entropy_from_logits_with_chunking=False", "most of it is rounding"),
        ("trainer.use_v1=False", "use_v1=False"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "one ratio per token"),
        ("algorithm.adv_estimator=gtp0", "gtp0 is not known"),
    ],
)
def test_what_is_refused_of_verls_own_configuration(override, told):
    config = composed("algorithm.adv_estimator=gtpo", "trainer.v1.trainer_mode=dew_sync", override)
    with pytest.raises(DewError) as error:
        check(config, known=core_algos.ADV_ESTIMATOR_REGISTRY)
    assert told in str(error.value)


def test_trainer_modes_are_registered_and_derive_from_verls():
    from dew.engines.verl import trainer  # noqa: F401

    for ours, theirs in MODES.items():
        assert issubclass(TRAINER_REGISTRY[ours], TRAINER_REGISTRY[theirs])


def test_the_entry_point_is_the_plug_in():
    from importlib.metadata import entry_points

    ours = [point for point in entry_points(group="verl.plugins") if point.name == "dew"]
    if not ours:
        pytest.skip("dew is not installed here (a checkout on PYTHONPATH): entry points come with the installation")
    assert ours[0].load() is plugin.register


@pytest.mark.parametrize("found", ["0.8.5", "0.10.0", "1.0"])
def test_another_version_of_verl_is_refused_where_it_is_used(found, monkeypatch):
    monkeypatch.setattr(contract, "version", lambda name: found)
    with pytest.raises(EngineError, match=f"verl {found} is installed; dew works with verl 0.9"):
        contract.require_verl()
    registry: dict = {}
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", registry)
    plugin.register()
    assert set(registry) == set(OURS)
    with pytest.raises(EngineError, match=f"verl {found}"):
        registry["gtpo"](token_level_rewards=None)


def test_registering_twice_does_nothing(caplog):
    before = dict(core_algos.ADV_ESTIMATOR_REGISTRY)
    with caplog.at_level(logging.DEBUG):
        plugin.register()
    assert before == core_algos.ADV_ESTIMATOR_REGISTRY
