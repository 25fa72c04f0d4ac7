"""The policy loss that verl's workers call, without verl: the algorithm's own, however the batch is split."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.algorithms import get_algorithm
from dew.engines.verl.estimators import BatchContext, batch_context
from dew.engines.verl.estimators import policy_loss as verl_loss
from dew.errors import EngineError
from dew.losses import policy_loss
from groups import pad

GOLDEN = json.loads((Path(__file__).parents[1] / "support" / "golden.json").read_text())
ALGORITHMS = {
    "gtpo": get_algorithm("gtpo"),
    "grpo_s": get_algorithm("grpo_s"),
    "grpo_s_geometric_ratio": get_algorithm("grpo_s", average="geometric"),
}


def actor(**batch):
    """The part of verl's ActorConfig that the loss reads."""
    return SimpleNamespace(global_batch_info=batch)


def loss(name, *args, entropy=None, **kwargs):
    with batch_context(BatchContext(algorithm=ALGORITHMS.get(name) or get_algorithm(name), entropy=entropy)):
        return verl_loss(*args, **kwargs)


@pytest.mark.parametrize("entry", GOLDEN, ids=[f"{len(e['input']['reward'])} answers" for e in GOLDEN])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_golden_values(entry, name):
    logp, mask = pad(entry["input"]["logp"], fill=0.0)
    old, _ = pad(entry["input"]["old_logp"], fill=0.0)
    if name == "gtpo":
        advantages = pad(entry["gtpo"][0]["advantage"], fill=0.0)[0]
    else:
        advantages = torch.tensor(entry["grpo_s"][0]["advantage"])[:, None] * mask
    value, _ = loss(name, old, logp, advantages, mask.long(), config=actor())
    torch.testing.assert_close(value, torch.tensor(entry["loss"][name], dtype=value.dtype), rtol=1e-6, atol=1e-9)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(list(ALGORITHMS)), st.integers(1, 5), st.integers(1, 3))
def test_value_and_gradient_do_not_depend_on_the_split(seed, name, micro, processes):
    """D processes of several micro-batches each, gradients averaged over processes: the loss of the whole."""
    g = torch.Generator().manual_seed(seed)
    B, T = 2 * processes * 2, 6
    logp = -torch.rand(B, T, generator=g, dtype=torch.float64)
    old = logp + 0.3 * torch.randn(B, T, generator=g, dtype=torch.float64)
    advantages = torch.randn(B, T, generator=g, dtype=torch.float64)
    mask = torch.rand(B, T, generator=g) < 0.7
    mask[:, 0] = True
    algorithm = ALGORITHMS[name]
    whole = logp.clone().requires_grad_()
    expected, _ = policy_loss(whole, old, advantages, mask, ratio=algorithm.ratio, reduce=algorithm.reduce)
    expected.backward()

    parts = logp.clone().requires_grad_()
    config = actor(dp_size=processes, batch_num_tokens=int(mask.sum()), global_batch_size=B)
    total = 0.0
    for process in torch.arange(B).chunk(processes):
        for rows in process.split(micro):
            value, _ = loss(name, old[rows], parts[rows], advantages[rows], mask[rows].long(), config=config)
            (value / processes).backward()
            total += value.item() / processes
    torch.testing.assert_close(torch.tensor(total, dtype=torch.float64), expected.detach())
    torch.testing.assert_close(parts.grad, whole.grad)


def test_correction_weights_multiply_the_surrogate():
    logp = torch.full((1, 2), -1.0)
    ones = torch.ones(1, 2)
    value, _ = loss(
        "grpo_s", logp, logp, ones, ones.long(), config=actor(), rollout_is_weights=torch.tensor([[0.5, 1.5]])
    )
    assert value.item() == -1.0
    value, _ = loss("grpo_s", logp, logp, ones, ones.long(), config=actor(), rollout_is_weights=0.5 * ones)
    assert value.item() == -0.5


def test_clipping_is_the_algorithms():
    """A ratio of 1.25 and A = 1: unclipped up to 1.28, the paper's bound."""
    old, one = torch.zeros(1, 1), torch.ones(1, 1)
    logp = torch.full((1, 1), 1.25).log()
    assert loss("grpo_s", old, logp, one, one.long(), config=actor())[0].item() == pytest.approx(-1.25)
    with batch_context(BatchContext(algorithm=get_algorithm("grpo_s", clip_high=0.2))):
        assert verl_loss(old, logp, one, one.long(), config=actor())[0].item() == pytest.approx(-1.2)


def test_a_divisor_of_the_algorithms_own():
    """Dr. GRPO divides by the generation budget: 2 tokens of -1 / (8 tokens x 1 answer)."""
    zero, one = torch.zeros(1, 2), torch.ones(1, 2)
    config = actor(dp_size=1, batch_num_tokens=2, global_batch_size=1)
    with batch_context(BatchContext(algorithm=get_algorithm("dr_grpo", max_tokens=8))):
        assert verl_loss(zero, zero, one, one.long(), config=config)[0].item() == pytest.approx(-2 / 8)


def test_without_the_trainer_no_algorithm_is_known():
    x = torch.zeros(1, 1)
    with pytest.raises(EngineError, match="trainer_mode=dew_sync"):
        verl_loss(x, x, x, torch.ones(1, 1), config=actor())


def test_padding_rows_add_nothing():
    logp = torch.full((3, 2), -1.0)
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [5.0, 5.0]])
    for name in ALGORITHMS:
        value, _ = loss(
            name, logp, logp, advantages, mask, config=actor(dp_size=1, batch_num_tokens=4, global_batch_size=2)
        )
        assert value.item() == 0.0


def test_metrics_have_verls_names_and_dews():
    x = torch.zeros(1, 1)
    _, metrics = loss("grpo_s", x, x, x, torch.ones(1, 1), config=actor())
    assert {"actor/pg_clipfrac", "actor/ppo_kl", "actor/dew/ratio/mean", "actor/dew/clip/low"} <= metrics.keys()
    assert all(isinstance(value, float) for value in metrics.values())
