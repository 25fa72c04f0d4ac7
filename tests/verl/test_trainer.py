"""What dew's trainer modes add to verl's trainer, on a queue of tensors. Needs verl (make test-verl)."""

from copy import deepcopy
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: these run with `make test-verl`")

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from pyarrow import Table
from pyarrow.parquet import write_table
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.ray_trainer import compute_advantage

from dew.algorithms import GTPO
from dew.engines.verl import trainer
from dew.engines.verl.main import EXTERNAL, main, prepare, start
from dew.engines.verl.trainer import CreditMixin
from dew.errors import ConfigError, EngineError
from dew.run.folder import RunFolder
from verl_worker import proto

H = [[1.0, 2.0], [2.0, 1.0, 3.0], [1.0, 4.0], [1.0]]
UIDS = ["a", "a", "a", "pad"]
RIGHT, WRONG = {"acc": 1.0, "score": 1.0}, {"acc": 0.0, "score": 0.0}


def nested(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@cache
def default_config():
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer")


def config(*overrides):
    found = deepcopy(default_config())
    OmegaConf.set_struct(found, False)
    exact = ["actor_rollout_ref.actor.entropy_from_logits_with_chunking=True", "actor_rollout_ref.rollout.n=2"]
    ours = ["algorithm.adv_estimator=gtpo", "trainer.v1.trainer_mode=dew_sync", *exact]
    found.merge_with_dotlist([*ours, *overrides])
    return found


class Verls:
    """The part of verl's trainer that a batch passes through."""

    def __init__(self, config):
        self.config, self.global_steps, self.mode = config, 1, config.trainer.v1.trainer_mode

    def _compute_advantage(self, batch, metrics):
        rewards = torch.tensor([[0, 1.0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
        mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]])
        data = proto(rewards, mask, np.array(UIDS, dtype=object))
        compute_advantage(data, self.config.algorithm.adv_estimator, config=self.config.algorithm)
        batch.advantages = data.batch["advantages"]
        return batch


class Trainer(CreditMixin, Verls):
    pass


class Batch(SimpleNamespace):
    def __len__(self):
        return len(self.keys)


@pytest.fixture
def step(monkeypatch):
    """Compute advantages from a queue that holds `entropy` and the reward manager's `infos`."""

    def run(entropy=H, infos=(RIGHT, WRONG, WRONG, RIGHT), *, raw=1.0, settings=(), more=None):
        queue = TensorDict({}, batch_size=4)
        if entropy is not None:
            queue["entropy"] = nested(entropy)
        for name, rows in (more or {}).items():
            queue[name] = nested(rows)
        queue["rm_scores"] = nested([[0.0, raw], [0.0, 0.0, 0.0], [0.0, 0.0], [0.0]])
        queue["extra_fields"] = NonTensorStack(*(NonTensorData({"reward_extra_info": info}) for info in infos))

        def get(keys, partition_id, select_fields):
            return queue.select(*[name for name in select_fields if name in queue])

        monkeypatch.setattr(trainer, "tq", SimpleNamespace(kv_batch_get=get))
        batch = Batch(keys=["a_0_0", "a_1_0", "a_2_0", "pad_0_0"], partition_id="train", extra_info={})
        batch = Trainer(config(*settings))._compute_advantage(batch, {})
        assert batch.extra_info == {"dew_tokens_per_row": 7 / 4}  # 2 + 3 + 2 live tokens; the update reads it
        return batch.advantages

    return run


@pytest.mark.parametrize(("name", "mode"), [("grpo_s", "seq-mean-token-mean"), ("gtpo", "token-mean")])
def test_verls_own_terms_are_reduced_as_the_algorithm_reduces_its_loss(name, mode):
    """The KL term too, if the configuration has verl's default."""
    made = config(f"algorithm.adv_estimator={name}", "actor_rollout_ref.actor.loss_agg_mode=token-mean")
    assert Trainer(made).config.actor_rollout_ref.actor.loss_agg_mode == mode


def test_the_old_policys_entropy_reaches_the_estimator(step):
    advantages = step()
    assert (advantages[0, :2] > 0).all() and (advantages[1] < 0).all() and not advantages[3].any()
    assert advantages[1].unique().numel() > 1  # GRPO would give every token the same
    assert not torch.equal(advantages, step([*H[:2], [4.0, 1.0], [1.0]]))


def test_token_ids_reach_a_rule_that_asks_for_them(step, monkeypatch):
    seen, inner = [], GTPO._shaped
    monkeypatch.setattr(GTPO, "needs_tokens", True)
    monkeypatch.setattr(GTPO, "_shaped", lambda self, rollouts: seen.append(rollouts.tokens) or inner(self, rollouts))
    step(more={"responses": [[5, 6], [7, 8, 9], [7, 8], [0]]})
    assert [[5, 6, 0], [7, 8, 9], [7, 8, 0]] in seen[0].tolist()


@pytest.mark.parametrize(("every", "times"), [(0, 1), (1, 2)])
def test_a_batch_is_shaped_again_only_for_a_record(step, monkeypatch, tmp_path, every, times):
    calls, inner = [], GTPO._shaped
    monkeypatch.setattr(GTPO, "_shaped", lambda self, rollouts: calls.append(1) or inner(self, rollouts))
    monkeypatch.setattr(Trainer, "_record", lambda *args: {})
    step(settings=(f"algorithm.dew_run.folder={tmp_path}", f"algorithm.dew_run.records_every={every}"))
    assert len(calls) == times


def test_verl_sees_its_own_mode():
    assert Trainer(config("trainer.v1.trainer_mode=dew_colocate_async")).mode == "colocate_async"


def test_a_queue_without_the_entropy(step):
    with pytest.raises(EngineError, match="not in verl's queue"):
        step(None)


def test_correctness_on_some_answers_only(step):
    with pytest.raises(EngineError, match="for 3 of 4 answers"):
        step(infos=({"acc": 1.0}, {"acc": 0.0}, {"acc": 0.0}, {}))


def test_without_acc_the_raw_reward_decides(step):
    """Not the reward after the KL term: 1.6 is correct, and 1.0 of it is left."""
    assert torch.equal(step(infos=({}, {}, {}, {})), step())
    charged = step(infos=({}, {}, {}, {}), raw=1.6)
    assert (charged[0, :2] > 0).all() and not torch.equal(charged, step())
    assert not step(infos=({}, {}, {}, {}), raw=0.2).any()  # all wrong: a group of one outcome
    scores = [{"score": info["score"]} for info in (RIGHT, WRONG, WRONG, RIGHT)]  # before a penalty for length
    assert torch.equal(step(infos=scores, raw=0.2), step(raw=0.2)) and step(infos=scores, raw=0.2).any()


def test_a_trainer_that_does_not_call_the_estimator(step, monkeypatch):
    monkeypatch.setattr(Verls, "_compute_advantage", lambda self, batch, metrics: batch)
    with pytest.raises(EngineError, match="without calling the estimator of gtpo"):
        step()


def test_every_process_of_a_run_imports_the_plug_in(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(EXTERNAL, "mine")
    ours = config("algorithm.dew_run.folder=runs/a")
    prepare(ours)
    assert ours.algorithm.dew_run.folder == str(tmp_path / "runs/a")
    prepare(ours)  # twice changes nothing
    assert ours.ray_kwargs.ray_init.runtime_env.env_vars[EXTERNAL] == "mine,dew.engines.verl.plugin"
    RunFolder("runs/a").write_run({"engine": "verl", "algorithm": {"name": "gtpo"}})
    RunFolder("runs/a").append_metrics({"step": 1})
    prepare(ours)  # it ended before its first checkpoint
    with pytest.raises(ConfigError, match="holds an earlier run"):
        prepare(config("algorithm.adv_estimator=dapo", "algorithm.dew_run.folder=runs/a"))
    RunFolder("runs/a").write_run({"status": "done"})
    with pytest.raises(ConfigError, match="holds an earlier run, which verl would not resume"):
        prepare(ours)
    (tmp_path / "runs/a/latest_checkpointed_iteration.txt").touch()
    with pytest.raises(ConfigError, match=r"but .*/runs/b has no such run"):
        prepare(config("algorithm.dew_run.folder=runs/b", "trainer.default_local_dir=runs/a"))


def test_main_refuses_before_ray_starts(monkeypatch, tmp_path):
    monkeypatch.setattr("dew.engines.verl.main.run_ppo", lambda *_: pytest.fail("Ray was started"))
    table, ours = tmp_path / "train.parquet", "reward.custom_reward_function.path=pkg://dew.engines.verl.data"
    write_table(Table.from_pydict({"data_source": ["gsm8k", "openai/gsm8k"]}), table)
    with pytest.raises(ConfigError, match=r"'openai/gsm8k' names no verifier\. Did you mean 'gsm8k'"):
        start(config(ours, f"data.train_files={table}"))
    table.write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        start(config(ours, f"data.train_files=[{table}]"))
    with pytest.raises(EngineError, match="bypass_mode"):
        start(config("algorithm.rollout_correction.bypass_mode=True"))
    with pytest.raises(ConfigError, match="no_such_module cannot be imported"):
        start(config("actor_rollout_ref.model.external_lib=no_such_module"))


def test_main_prints_one_line_per_problem():
    wrong = config("algorithm.rollout_correction.bypass_mode=True", "trainer.v1.trainer_mode=sync")
    with pytest.raises(SystemExit) as exit:
        main.__wrapped__(wrong)
    assert [line.split("=")[0] for line in str(exit.value).splitlines()] == [
        "dew: trainer.v1.trainer_mode",
        "dew: algorithm.rollout_correction.bypass_mode",
    ]
