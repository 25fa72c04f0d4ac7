"""Inside real verl: its registries, its compute_advantage, its ppo_loss. Needs verl (make test-verl)."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: these run with `make test-verl`")

from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_F
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from dew.credit import entropy_advantages
from dew.engines.credit import Rows, give_credit
from dew.engines.verl import plugin
from dew.engines.verl.carrying import carrying
from dew.engines.verl.losses import LOSSES, entropy_shaped_loss
from dew.engines.verl.settings import OURS
from dew.errors import EngineError
from dew.losses import policy_loss
from groups import pad
from verl_rows import carried, rows, with_padding

plugin.register()  # an installed dew is registered by verl itself; a checkout on PYTHONPATH is not
GOLDEN = json.loads((Path(__file__).parents[1] / "support" / "golden.json").read_text())
every_entry = pytest.mark.parametrize("entry", GOLDEN, ids=[f"{len(e['input']['reward'])} answers" for e in GOLDEN])


def close(actual, expected, rtol=1e-4, atol=1e-5):
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected).double(), rtol=rtol, atol=atol)


def proto(rewards, mask, uids):
    return DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": uids}
    )


# ── estimators ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", OURS)
def test_verl_finds_every_estimator(name):
    assert core_algos.get_adv_estimator_fn(name).__name__ == f"{name}_advantages"


@pytest.mark.parametrize("name", LOSSES)
def test_verl_finds_every_loss(name):
    assert core_algos.get_policy_loss_fn(name).__name__ == f"{name}_loss"


@every_entry
@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_golden_values_through_verls_registry(entry, name):
    rewards, mask, uids, entropy = rows(entry)
    for case in entry[name]:
        with carrying(carried(name, entropy, case["settings"])):
            advantages, _ = core_algos.get_adv_estimator_fn(name)(rewards, mask, index=uids, config=None)
        expected = case["advantage"]
        if name == "gtpo":
            close(advantages[mask.bool()], pad(expected)[0][mask.bool()])
        else:
            close(advantages[:, 0], expected)


@every_entry
@pytest.mark.parametrize("name", OURS)
def test_verls_compute_advantage_gives_what_the_engines_give(entry, name):
    """With verl's padding rows among them, against the credit that the TRL engine gives the same rows."""
    rewards, mask, uids, entropy = with_padding(*rows(entry, torch.float32))
    with carrying(carried(name, entropy)) as c:
        data = compute_advantage(proto(rewards, mask, uids), adv_estimator=name)
    n = len(mask) - 3
    expected = give_credit(
        c.algorithm,
        Rows(
            group=torch.tensor(entry["input"]["group"]),
            mask=mask[:n].bool(),
            outcome=torch.tensor(entry["input"]["reward"]),
            extra=torch.zeros(n),
            entropy=entropy[:n],
            guided=torch.zeros(n, dtype=torch.bool),
        ),
    ).advantages
    close(data.batch["advantages"][:n], expected, rtol=0, atol=0)
    assert not data.batch["advantages"][n:].any()


@every_entry
def test_dapos_advantage_is_verls_grpo(entry):
    """The baseline that ours are compared with is the same on both sides, but for verl's smaller constant."""
    rewards, mask, uids, _ = rows(entry)
    with carrying(carried("entropy_advantage", None)):
        ours = compute_advantage(proto(rewards, mask, uids), adv_estimator="entropy_advantage").batch["advantages"]
    theirs = compute_advantage(proto(rewards, mask, uids), adv_estimator="grpo").batch["advantages"]
    close(ours, theirs * mask, rtol=1e-3, atol=1e-5)


def test_several_rows_of_a_conversation_through_verls_own_path():
    """Two conversations of two rows each: verl hands all rows over, and the answers are two."""
    H = torch.tensor([[1.0, 2.0], [3.0, 4.0], [2.0, 1.0], [1.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    keys, uids = ["u_0_0", "u_0_1", "u_1_0", "u_1_1"], np.array(["u"] * 4, dtype=object)
    with carrying(carried("gtpo", H, keys=keys, acc=rewards.sum(-1))) as c:
        data = compute_advantage_for_multi_trajectories(proto(rewards, mask, uids), keys, adv_estimator="gtpo")
    [found] = c.found
    assert found.rows.mask.shape == (2, 4) and found.credit.correct.tolist() == [True, False]
    joined = torch.stack([torch.cat(tuple(data.batch["advantages"][i : i + 2])) for i in (0, 2)])
    close(joined, found.credit.advantages, rtol=0, atol=0)


def test_a_group_split_over_workers_gets_what_it_gets_whole():
    """verl balances lengths over workers, so rows of a group lie apart in the batch."""
    entry = GOLDEN[-1]
    given = rows(entry)
    with carrying(carried("gtpo", given[3])):
        whole = compute_advantage(proto(*given[:3]), adv_estimator="gtpo").batch["advantages"]
    n = len(whole)
    order = [i for worker in range(3) for i in range(worker, n, 3)]
    rewards, mask, uids, entropy = (x[order] for x in given)
    with carrying(carried("gtpo", entropy)):
        split = compute_advantage(proto(rewards, mask, uids), adv_estimator="gtpo").batch["advantages"]
    close(split, whole[order], rtol=0, atol=1e-7)


def test_verls_entropy_in_bf16_is_mostly_rounding_and_in_chunks_is_not():
    """Peaked distributions as a trained model has them: why `entropy_from_logits_with_chunking` is demanded."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(512, 1000, generator=g)
    logits[torch.arange(512), torch.randint(1000, (512,), generator=g)] += torch.linspace(8, 30, 512)
    logits = logits.bfloat16()
    truth = verl_F.entropy_from_logits(logits.double())
    coarse, fine = (f(logits).double() for f in (verl_F.entropy_from_logits, verl_F.entropy_from_logits_with_chunking))
    assert ((coarse - truth).abs() > 0.5 * truth).double().mean() > 0.5
    assert (fine - truth).abs().max() < 1e-4


def test_verls_own_trainer_is_refused():
    rewards, mask, uids, _ = rows(GOLDEN[0])
    with pytest.raises(EngineError, match=r"trainer\.v1\.trainer_mode=dew_sync"):
        compute_advantage(proto(rewards, mask, uids), adv_estimator="gtpo")


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────


def nested(x, lengths):
    return torch.nested.as_nested_tensor([row[:n] for row, n in zip(x, lengths, strict=True)], layout=torch.jagged)


def actor(loss_mode):
    return ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2,
        clip_ratio_high=0.28, policy_loss={"loss_mode": loss_mode},
    )  # fmt: skip


def worker_batch(seed=0, B=4, P=2, T=5):
    """A mini-batch as verl's workers hold it: prompts of P tokens, ragged answers, log-probabilities of both."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    lengths[0] = T
    mask = torch.arange(T) < lengths[:, None]
    old, A, H = (torch.rand(B, T, generator=g) for _ in range(3))
    old, A = -old * mask, (A - 0.5) * mask
    logp = (old + 0.4 * torch.randn(B, T, generator=g)) * mask
    return lengths, mask, old, A, H * mask, logp


def model_output(x, lengths, P=2):
    """verl's log-probabilities stand one to the left, over prompt and answer."""
    whole = [torch.cat([x.new_zeros(P - 1), row[:n], x.new_zeros(1)]) for row, n in zip(x, lengths, strict=True)]
    return torch.nested.as_nested_tensor(whole, layout=torch.jagged)


def td(rows_, lengths, mask, old, A, whole_tokens, whole_rows, dp=1, P=2):
    part = TensorDict(
        {
            "prompts": nested(torch.ones(len(rows_), P, dtype=torch.long), [P] * len(rows_)),
            "responses": nested(torch.ones(len(rows_), mask.shape[1], dtype=torch.long), lengths[rows_]),
            "response_mask": nested(mask[rows_].long(), lengths[rows_]),
            "old_log_probs": nested(old[rows_], lengths[rows_]),
            "advantages": nested(A[rows_], lengths[rows_]),
        },
        batch_size=len(rows_),
    )
    part["attention_mask"] = nested(torch.ones(len(rows_), mask.shape[1] + P, dtype=torch.long), lengths[rows_] + P)
    for name, value in (("dp_size", dp), ("batch_num_tokens", whole_tokens), ("global_batch_size", whole_rows)):
        tu.assign_non_tensor_data(part, name, value)
    return part


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0], [1], [2], [3]]])
def test_verls_ppo_loss_with_our_policy_loss_is_dews_loss(name, split):
    """Value and gradient, whatever the micro-batches."""
    lengths, mask, old, A, _, logp = worker_batch()
    ratio, reduce = LOSSES[name]
    whole = logp.clone().requires_grad_()
    expected, _ = policy_loss(whole, old, A, mask, ratio=ratio, reduce=reduce)
    expected.backward()
    parts, total = logp.clone().requires_grad_(), 0.0
    for micro in split:
        data = td(micro, lengths, mask, old, A, int(mask.sum()), len(mask))
        value, metrics = ppo_loss(actor(name), {"log_probs": model_output(parts[micro], lengths[micro])}, data)
        value.backward()
        total += value.item()
        assert "actor/dew/clip/high" in metrics
    close(torch.tensor(total), expected.detach(), atol=1e-6)
    close(parts.grad, whole.grad, atol=1e-6)


def test_the_entropy_shaped_loss_is_the_papers():
    """A + min(α·H, |A|/κ) with the entropy that the update itself computes."""
    lengths, mask, old, A, H, logp = worker_batch()
    shaped = entropy_advantages(A, H, mask, alpha=0.4, kappa=2.0)
    expected, _ = policy_loss(logp, old, shaped, mask)
    assert not torch.allclose(shaped, A)
    data = td([0, 1, 2, 3], lengths, mask, old, A, int(mask.sum()), len(mask))
    output = {"log_probs": model_output(logp, lengths), "entropy": model_output(H, lengths)}
    loss_fn = partial(entropy_shaped_loss, actor("gtpo"), alpha=0.4, kappa=2.0)
    value, metrics = loss_fn(model_output=output, data=data, dp_group=None)
    close(value, expected, atol=1e-6)
    assert metrics["actor/dew/credit/bonus"] == pytest.approx(float((shaped - A)[mask].mean()), rel=1e-5)
    with pytest.raises(EngineError, match="calculate_entropy=True"):
        loss_fn(model_output={"log_probs": output["log_probs"]}, data=data)
