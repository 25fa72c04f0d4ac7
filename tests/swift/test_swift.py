"""ms-swift's own loss on a batch with dew's credit equals `Algorithm.loss` (`make test-swift`)."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("swift.rlhf_trainers", reason="needs ms-swift, in an environment of its own: make test-swift")

from accelerate import Accelerator
from swift.rl_core.data import GRPOBatch
from swift.trainers import TrainerFactory
from swift.utils import import_external_file

import dew_swift as swift
from dew import Rollouts, get_algorithm
from dew.algorithms.base import Part
from dew.errors import ConfigError

G, LENGTHS, STARTS = 4, [3, 2, 4, 1, 2, 5, 3, 2], [0, 1, 2, 0, 3, 0, 1, 2]
REWARDS = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])[:, None]


def policy(seed):
    """Log-probabilities and entropies of two micro-batches of four answers, windows of 6 columns."""
    random = torch.Generator().manual_seed(seed)
    return [(-torch.rand(4, 6, generator=random), torch.rand(4, 6, generator=random) + 0.1) for _ in range(2)]


def masks():
    columns = torch.arange(6)
    rows = [(columns >= s) & (columns < s + n) for s, n in zip(STARTS, LENGTHS, strict=True)]
    return torch.stack(rows).view(2, 4, 6)


def trainer(monkeypatch, name, **changed):
    """A trainer of ms-swift without a model: its methods run, the forward pass is `policy`."""
    monkeypatch.setenv("DEW_ALGORITHM", name)
    found = object.__new__(swift.DewGRPOTrainer)
    args = {"max_completion_length": 6, "delta": None, "log_entropy": False, "top_entropy_quantile": 1.0}
    settings = {
        "args": SimpleNamespace(**args, per_device_train_batch_size=4, gradient_accumulation_steps=1),
        "model": SimpleNamespace(training=True), "accelerator": Accelerator(cpu=True), "loss_type": "dapo",
        "template": SimpleNamespace(sequence_parallel_size=1, padding_free=False), "num_generations": G,
        "epsilon_low": 0.2, "epsilon_high": 0.28, "importance_sampling_level": "token", "use_liger_loss": False,
        "dynamic_num_samples": False, "reward_func_names": ["outcome"], "reward_weights": torch.ones(1),
        "_rewards_per_func": REWARDS, "overlong_filter": False, "compute_entropy": False, "beta": 0.0,
        "kl_in_reward": False, "rollout_importance_sampling_mode": None, "log_rollout_offpolicy_metrics": False,
        "disable_rollout_importance_sampling": False, "_has_teacher": False, "off_policy_sequence_mask_delta": None,
        "sdar_loss_coef": 0.0, "chord_sft_iterator": None, "model_accepts_loss_kwargs": True,
        "compute_loss_func": None,
    }  # fmt: skip
    for key, value in (settings | changed).items():
        setattr(found, key, value)
    found.algorithm = swift.algorithm_of(found)
    return found


@pytest.mark.parametrize("name", ["gtpo", "dew"])
def test_advantages_and_loss_are_those_of_the_algorithm(monkeypatch, name):
    if name == "dew":
        monkeypatch.setenv("DEW_ALGORITHM_KWARGS", '{"dynamic_sampling": false}')
    found, old, new = trainer(monkeypatch, name), policy(0), policy(1)
    truncated, lengths = torch.zeros(4, dtype=torch.bool), torch.full((4,), 6)
    total = torch.tensor(float(sum(LENGTHS)))
    batches = [
        GRPOBatch(mask, truncated, lengths, old_per_token_logps=logp, num_items_in_batch=total)
        for mask, (logp, _) in zip(masks(), old, strict=True)
    ]
    encoded = [{"model_inputs": {"number": i}, "grpo_batch": batch} for i, batch in enumerate(batches)]
    source = old
    found._get_per_token_logps_and_entropies = lambda model, inputs, *_, **__: source[inputs["number"]]
    swift.set_advantages(found, encoded)

    def aligned(x):  # from the first token of each answer on
        rows = [row[s : s + n] for row, s, n in zip(x.reshape(8, 6), STARTS, LENGTHS, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, True).view(2, G, -1)

    mask = aligned(masks().flatten(0, 1).int()).bool()
    logp, entropy = (torch.stack(x) for x in zip(*old, strict=True))
    rollouts = Rollouts(mask=mask, reward=REWARDS.view(2, G), entropy=aligned(entropy), logp=aligned(logp))
    expected = get_algorithm(name).advantages(rollouts)
    advantages = torch.stack([batch.advantages for batch in batches])
    torch.testing.assert_close(aligned(advantages), expected)
    assert expected.any() and not advantages[~masks()].any()

    source = new
    losses = [found._compute_loss_and_metrics(None, {"number": i}, batch)[0] for i, batch in enumerate(batches)]
    part = Part(mask=mask.flatten(0, 1), old_logp=aligned(logp).flatten(0, 1))
    current = aligned(torch.stack([x for x, _ in new])).flatten(0, 1)
    loss, stats = found.algorithm.loss(current, part, expected.flatten(0, 1))
    torch.testing.assert_close(sum(losses), loss)
    assert stats["clip/high"] > 0 and stats["clip/low"] > 0


def test_settings_that_contradict_the_algorithm_are_listed_together(monkeypatch):
    with pytest.raises(ConfigError) as error:
        trainer(monkeypatch, "gtpo", loss_type="grpo", epsilon_high=0.2, use_liger_loss=True)
    for text in ("--loss_type dapo", "--epsilon_high 0.28", "use_liger_kernel"):
        assert text in str(error.value)
    with pytest.raises(ConfigError, match="Give it weight 1"):
        trainer(monkeypatch, "gtpo", reward_weights=torch.tensor([0.5]))
    with pytest.raises(ConfigError, match=r"(?s)use --beta.*kl_in_reward"):
        trainer(monkeypatch, "gtpo(kl_coef=0.1)", kl_in_reward=True, beta=0.1)
    with pytest.raises(ConfigError, match="ms-swift lacks"):
        trainer(monkeypatch, "grpo_s")


def test_graded_rewards_are_one_warning(monkeypatch, caplog):
    graded = REWARDS * torch.linspace(0.6, 1, 8)[:, None]
    found = trainer(monkeypatch, "gtpo(alpha2=0.5)", _rewards_per_func=graded)
    found._get_per_token_logps_and_entropies = lambda model, inputs, *_, **__: policy(0)[inputs["number"]]
    truncated, lengths = torch.zeros(4, dtype=torch.bool), torch.full((4,), 6)
    for _ in range(2):
        batches = [GRPOBatch(mask, truncated, lengths) for mask in masks()]
        swift.set_advantages(found, [{"model_inputs": {"number": i}, "grpo_batch": b} for i, b in enumerate(batches)])
    assert caplog.text.count("different values") == 1 and "DEW_ALGORITHM: gtpo(alpha2=0.5,pool=outcome)" in caplog.text


def test_the_plug_in_is_the_trainer_that_ms_swift_builds():
    import_external_file(swift.__file__)
    assert TrainerFactory.get_trainer_cls(SimpleNamespace(rlhf_type="grpo")).__name__ == "DewGRPOTrainer"
