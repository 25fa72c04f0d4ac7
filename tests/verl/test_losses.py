"""The policy loss that verl's workers call, without verl: the algorithm's own, however the batch is split."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.algorithms import get_algorithm
from dew.algorithms.base import Part
from dew.engines.verl.estimators import BatchContext, batch_context
from dew.engines.verl.estimators import policy_loss as verl_loss
from dew.errors import EngineError

ALGORITHMS = {
    "gtpo": get_algorithm("gtpo", clip_high=0.1),
    "grpo_s": get_algorithm("grpo_s"),
    "geometric": get_algorithm("grpo_s", average="geometric"),
    "dr_grpo": get_algorithm("dr_grpo", max_tokens=8),
}


def actor(**batch):
    """The part of verl's ActorConfig that the loss reads."""
    return SimpleNamespace(global_batch_info=batch)


def loss(name, *args, entropy=None, **kwargs):
    with batch_context(BatchContext(algorithm=ALGORITHMS.get(name) or get_algorithm(name), entropy=entropy)):
        return verl_loss(*args, **kwargs)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(list(ALGORITHMS)), st.integers(1, 5), st.integers(1, 3))
def test_value_and_gradient_do_not_depend_on_the_split(seed, name, micro, processes):
    """D processes of several micro-batches each, gradients averaged over processes: the loss of the whole."""
    g = torch.Generator().manual_seed(seed)
    B, T = 2 * processes * 2, 6
    logp = -torch.rand(B, T, generator=g, dtype=torch.float64)
    old = logp + 0.3 * torch.randn(B, T, generator=g, dtype=torch.float64)
    advantages = torch.randn(B, T, generator=g, dtype=torch.float64)
    mask, weight = torch.rand(2, B, T, generator=g)
    mask = mask < 0.7
    mask[:, 0], mask[0] = True, False  # a row that trains nothing
    whole = logp.clone().requires_grad_()
    expected, _ = ALGORITHMS[name].loss(whole, Part(mask=mask, old_logp=old, weight=weight), advantages)
    expected.backward()

    parts = logp.clone().requires_grad_()
    config = actor(dp_size=processes, batch_num_tokens=int(mask.sum()), global_batch_size=B)
    total = 0.0
    for process in torch.arange(B).chunk(processes):
        for rows in process.split(micro):
            given = (old[rows], parts[rows], advantages[rows], mask[rows].long())
            value, _ = loss(name, *given, config=config, rollout_is_weights=weight[rows])
            (value / processes).backward()
            total += value.item() / processes
    torch.testing.assert_close(torch.tensor(total, dtype=torch.float64), expected.detach())
    torch.testing.assert_close(parts.grad, whole.grad)


def test_without_the_trainer_no_algorithm_is_known():
    x = torch.zeros(1, 1)
    with pytest.raises(EngineError, match="trainer_mode=dew_sync"):
        verl_loss(x, x, x, torch.ones(1, 1), config=actor())


def test_metrics_have_verls_names_and_dews():
    x = torch.zeros(1, 1)
    _, metrics = loss("grpo_s", x, x, x, torch.ones(1, 1), config=actor())
    assert {"actor/pg_clipfrac", "actor/ppo_kl", "actor/dew/ratio/mean", "actor/dew/clip/low"} <= metrics.keys()
    assert all(isinstance(value, float) for value in metrics.values())
