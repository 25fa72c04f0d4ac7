"""Inside real verl: its registries, its compute_advantage, its ppo_loss. Needs verl (make test-verl)."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: these run with `make test-verl`")

from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import torch_functional as verl_F
from verl.workers.utils.losses import ppo_loss

from dew.algorithms import get_algorithm
from dew.algorithms.base import Part
from dew.engines.credit import Rows, give_credit, outcomes
from dew.engines.verl import plugin
from dew.engines.verl.config import dew_estimators, reduction, stock_estimator
from dew.engines.verl.estimators import actor_loss, batch_context
from dew.engines.verl.launch import prepare
from dew.losses import policy_loss
from dew.run.config import Run
from dew.run.settings import ACTOR
from verl_rows import context, every_entry, rows, with_padding
from verl_worker import actor, model_output, proto, td, worker_batch

plugin.register()  # an installed dew is registered by verl itself; a checkout on PYTHONPATH is not


def close(actual, expected, rtol=1e-4, atol=1e-5):
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected).double(), rtol=rtol, atol=atol)


# ── estimators ──────────────────────────────────────────────────────────────────────────────────────────────
def test_verl_finds_every_estimator_and_the_loss():
    for name in dew_estimators():
        assert core_algos.get_adv_estimator_fn(name).__name__ == f"{name}_advantages"
    assert core_algos.get_policy_loss_fn("dew").__module__ == "dew.engines.verl.estimators"


@every_entry
@pytest.mark.parametrize("name", dew_estimators())
def test_verls_compute_advantage_equals_dews_credit(entry, name):
    """With verl's padding rows, against the credit that the TRL engine assigns to the same rows."""
    rewards, mask, uids, entropy = with_padding(*rows(entry, torch.float32))
    with batch_context(context(name, entropy)) as c:
        data = compute_advantage(proto(rewards, mask, uids), adv_estimator=name)
    n = len(mask) - 3
    group, outcome = (torch.tensor(entry["input"][name]) for name in ("group", "reward"))
    signals = {"entropy": entropy[:n], "logp": c.logp[:n]}
    alone = Rows(group=group, mask=mask[:n].bool(), outcome=outcome, extra=torch.zeros(n), **signals)
    expected = give_credit(c.algorithm, alone).advantages
    close(data.batch["advantages"][:n], expected, rtol=0, atol=0)
    assert not data.batch["advantages"][n:].any()


@every_entry
def test_dapos_advantage_is_verls_grpo(entry):
    """The baseline is the same on both sides, except for verl's smaller constant."""
    rewards, mask, uids, _ = rows(entry)
    with batch_context(context("entropy_advantage", None)):
        ours = compute_advantage(proto(rewards, mask, uids), adv_estimator="entropy_advantage").batch["advantages"]
    theirs = compute_advantage(proto(rewards, mask, uids), adv_estimator="grpo").batch["advantages"]
    close(ours, theirs * mask, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["dapo", "dew"])
@pytest.mark.parametrize(
    ("acc", "charge"),
    [
        ([1, 1, 1, 1], [0.1, 0.1, 0.1, 0.0]),  # a format reward
        ([0, 0, 0, 0], [0.0, 0.0, -0.5, -1.0]),  # soft overlong
        ([1, 0, 1, 1], [0.1, 0.1, 0.1, 0.0]),
    ],
)
def test_verls_filter_keeps_the_groups_that_dews_does(name, acc, charge, monkeypatch):
    """By `acc`, which the TRL engine has as the outcome reward; never by what is added to it."""
    keys = [f"u_{i}_0" for i in range(4)]
    fields = [{"reward_extra_info": {"acc": float(a), "score": a + c}} for a, c in zip(acc, charge, strict=True)]
    monkeypatch.setattr(replay_buffer.tq, "kv_batch_get", lambda **_: {"extra_fields": fields})
    buffer = SimpleNamespace(
        filter_groups_metric="acc", finished_keys={"train": {"u"}}, partitions={"train": keys},
        _dapo_classification_cache=defaultdict(dict),
    )  # fmt: skip
    dropped, _ = replay_buffer.ReplayBuffer._dapo_filtered_keys(buffer, "train")
    same_group, mask = torch.zeros(4, dtype=torch.long), torch.ones(4, 2, dtype=torch.bool)
    batch = Rows(group=same_group, mask=mask, outcome=torch.tensor(acc).float(), extra=torch.tensor(charge))
    assert outcomes(get_algorithm(name), batch).signal.all() == (not dropped)


def test_several_rows_of_a_conversation_through_verls_own_path():
    """Two conversations of two rows each: verl passes all rows, and the answers are two."""
    H = torch.tensor([[1.0, 2.0], [3.0, 4.0], [2.0, 1.0], [1.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    keys, uids = ["u_0_0", "u_0_1", "u_1_0", "u_1_1"], np.array(["u"] * 4, dtype=object)
    with batch_context(context("gtpo", H, keys=keys, acc=rewards.sum(-1))) as c:
        data = compute_advantage_for_multi_trajectories(proto(rewards, mask, uids), keys, adv_estimator="gtpo")
    [found] = c.credited
    assert found.rows.mask.shape == (2, 4) and found.credit.correct.tolist() == [True, False]
    joined = torch.stack([torch.cat(tuple(data.batch["advantages"][i : i + 2])) for i in (0, 2)])
    close(joined, found.credit.advantages, rtol=0, atol=0)


def test_verls_entropy_in_bf16_is_mostly_rounding_and_in_chunks_is_not():
    """Peaked distributions as a trained model has them: why `entropy_from_logits_with_chunking` is required."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(512, 1000, generator=g)
    logits[torch.arange(512), torch.randint(1000, (512,), generator=g)] += torch.linspace(8, 30, 512)
    logits = logits.bfloat16()
    truth = verl_F.entropy_from_logits(logits.double())
    coarse, fine = (f(logits).double() for f in (verl_F.entropy_from_logits, verl_F.entropy_from_logits_with_chunking))
    assert ((coarse - truth).abs() > 0.5 * truth).double().mean() > 0.5
    assert (fine - truth).abs().max() < 1e-4


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────
EVERY = {name: get_algorithm(name, max_tokens=7, kl_coef=0.3) for name in (*dew_estimators(), "grpo")}
EVERY["geometric"] = replace(EVERY["grpo_s"], average="geometric")


def launched(algorithm):
    """verl's configuration of a run, and the loss that its workers call, as `dew train --engine verl` sets them."""
    keys = {"kl_loss_coef": 0.3, "use_kl_loss": True, "kl_loss_type": "low_var_kl"}
    if stock_estimator(type(algorithm)) is None:
        keys |= {key.rpartition(".")[2]: value for key, value in reduction(algorithm).items()}
        return actor(**keys), partial(actor_loss, algorithm=replace(algorithm, kl_coef=0.0))
    settings = {"algorithm": algorithm.name, "max_completion_length": 7, "model_name_or_path": "tiny"}
    found = prepare(Run(settings=settings, task="countdown"))
    names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode")
    keys |= {name: value for name in names if (value := found[f"{ACTOR}.{name}"]) is not None}
    return actor(**keys, mode=found[f"{ACTOR}.policy_loss.loss_mode"]), ppo_loss


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "steps", [[[[0, 1, 2, 3]]], [[[0, 1], [2, 3]]], [[[0], [1], [2], [3]]], [[[0, 1]], [[2], [3]]]], ids=str
)
def test_the_workers_loss_is_the_algorithms_loss(name, steps):
    """Value and gradient, KL term included, of a whole generation: whatever its optimizer steps and micro-batches. Row
    3 is masked and counts as an answer."""
    algorithm = EVERY[name]
    lengths, mask, old, A, H, logp = worker_batch()
    mask[3] = False
    A = A if algorithm.ratio == "token" else A[:, :1] * mask
    ref, whole = old - 0.2 * H, logp.clone().requires_grad_()
    part = Part(mask=mask, old_logp=old, ref_logp=ref, entropy=H)
    expected, _ = algorithm.loss(whole, part, A)
    expected.backward()
    config, loss = launched(algorithm)
    parts, total = logp.clone().requires_grad_(), 0.0
    for step in steps:
        own = [row for micro in step for row in micro]
        tokens = int(mask[own].sum())
        for rows_ in step:
            data = td(rows_, lengths, mask, old, A, tokens, len(own), per_row=int(mask.sum()) / 4, ref_log_prob=ref)
            output = {"log_probs": model_output(parts[rows_], lengths[rows_])}
            if algorithm.needs_entropy == "current":
                output["entropy"] = model_output(H[rows_], lengths[rows_])
            value, _ = loss(config, output, data)
            (value / len(steps)).backward()
            total += value.item() / len(steps)
    close(torch.tensor(total), expected.detach(), atol=1e-6)
    close(parts.grad, whole.grad, atol=1e-6)
    assert whole.grad.abs().max() > 1e-3


def test_correction_weights_and_the_kl_term_reach_the_loss():
    """The weights multiply the surrogate alone; the KL term is verl's, with its k3 and its coefficient."""
    lengths, mask, old, A, H, logp = worker_batch()
    ref, weight = old - 0.1 * H, 0.5 + H
    expected, _ = policy_loss(logp, old, A, mask, ref_logp=ref, kl_coef=0.3, weight=weight)
    data = td([0, 1, 2, 3], lengths, mask, old, A, int(mask.sum()), 4, rollout_is_weights=weight, ref_log_prob=ref)
    config = actor(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="low_var_kl", loss_agg_mode="token-mean")
    scored = {"log_probs": model_output(logp, lengths)}
    value, metrics = actor_loss(config, scored, data, algorithm=get_algorithm("gtpo"))
    close(value, expected, atol=1e-6)
    assert "kl_loss" in metrics
