"""Every algorithm in the TRL engine, and what some of them need beside the entropy: log π, Σπ², penalties on tokens."""

import pytest
import torch

import trl_tiny as tiny
from dew.algorithms import get_algorithm, list_algorithms
from dew.errors import ConfigError


def ready(folder, algorithm="otb", **settings):
    return tiny.ready(folder, algorithm=algorithm, **{"algorithm_kwargs": {"dynamic_sampling": False}, **settings})


def test_every_algorithm_trains(tmp_path):
    """One generation and one gradient each, in one trainer: all differ, except where only the loss' bounds do."""
    one = ready(tmp_path)
    gradients = {}
    for name in list_algorithms():
        one.algorithm = get_algorithm(name, max_tokens=6, dynamic_sampling=False)
        batch = tiny.generation(one)
        assert ("penalty" in batch) == one.algorithm.penalises
        one.model.zero_grad()
        one._compute_loss(one.model, batch).backward()
        gradients[name] = tiny.gradient(one.model)
        assert gradients[name].isfinite().all() and gradients[name].any(), name
    # on-policy the surrogates have one gradient, and a penalty on |log w| has none
    for name in ("cispo", "kl_cov"):
        torch.testing.assert_close(gradients[name], gradients["dapo"])
    torch.testing.assert_close(gradients["sapo"], gradients["grpo"])
    for name in ("maxrl", "qae", "w_reinforce", "reinforce_pp", "steer", "otb"):
        assert not torch.allclose(gradients[name], gradients["dapo"], rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("iterations", [1, 2])  # 2: TRL makes the scoring pass
def test_credit_gets_the_sampling_policys_log_probabilities_and_sums_of_squares(tmp_path, iterations):
    one = ready(tmp_path, num_iterations=iterations, temperature=0.7)
    batch = one.sample(tiny.rows(one))
    given = batch.inputs
    ids = torch.cat([given["prompt_ids"], given["completion_ids"]], 1)
    attention = torch.cat([given["prompt_mask"], given["completion_mask"]], 1)
    T = given["completion_ids"].shape[1]
    with torch.no_grad():
        logits = one.model(input_ids=ids, attention_mask=attention).logits[:, -T - 1 : -1] / 0.7
    logq = logits.log_softmax(-1)
    logp = logq.gather(-1, given["completion_ids"][..., None])[..., 0]
    mask = batch.mask
    torch.testing.assert_close(batch.sum_sq[mask], logq.exp().square().sum(-1)[mask], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(batch.logp[mask], logp[mask], rtol=1e-4, atol=1e-5)


def test_credit_gets_the_token_ids_if_it_asks_for_them(tmp_path, monkeypatch):
    one = ready(tmp_path, "dew")
    assert one.sample(tiny.rows(one)).tokens is None
    monkeypatch.setattr(type(one.algorithm), "needs_tokens", True)
    batch = one.sample(tiny.rows(one))
    assert batch.tokens.equal(batch.inputs["completion_ids"])


def test_penalties_reach_the_loss(tmp_path):
    """One of the tokens: 10 · |log w| / tokens more than without, once the policy has moved."""
    kwargs = {"dynamic_sampling": False, "cov_coef": 10.0}
    one = ready(tmp_path, "kl_cov", num_iterations=2, algorithm_kwargs=kwargs)
    batch = tiny.generation(one)
    assert batch["penalty"].shape == batch["advantages"].shape and batch["penalty"].sum() == 10
    tiny.move(one.model, 0.05)
    with torch.no_grad():
        logp, _, _ = one._forward(one.model, batch)
        loss = one._compute_loss(one.model, batch)
        without = one._compute_loss(one.model, {**batch, "penalty": 0 * batch["penalty"]})
    w = (logp - batch["old_per_token_logps"]).abs()[batch["penalty"] > 0]
    assert w > 1e-3
    torch.testing.assert_close(loss - without, (10 * w / batch["divisor"]).squeeze(), rtol=1e-3, atol=1e-5)


def test_sums_of_squares_need_dews_operator(tmp_path):
    with pytest.raises(ConfigError, match="exact_head=False"):
        ready(tmp_path, exact_head=False)
