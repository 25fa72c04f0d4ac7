"""Every entry of golden.json and golden_outcome.json, in float64 to 1e-6 and in float32 to 1e-4."""

import pytest
import torch

from dew import Rollouts, get_algorithm
from dew.credit import entropy_advantages, forking_mask, group_overlong, grpo_advantages, soft_overlong
from dew.losses import policy_loss
from groups import GOLDEN, OUTCOME, entries, pad

precisions = [pytest.param(torch.float64, 1e-6, id="float64"), pytest.param(torch.float32, 1e-4, id="float32")]
pytestmark = pytest.mark.parametrize(("dtype", "rtol"), precisions)


def rollouts(entry, dtype):
    entropy, mask = pad(entry["input"]["entropy"], dtype=dtype)
    reward = torch.tensor(entry["input"]["reward"], dtype=dtype)
    return Rollouts.from_rows(entry["input"]["group"], mask=mask, reward=reward, entropy=entropy), mask


def close(actual, expected, rtol):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-9 if actual.dtype == torch.float64 else 1e-5)


@entries(GOLDEN + OUTCOME)
def test_gtpo(entry, dtype, rtol):
    batch, mask = rollouts(entry, dtype)
    for case in entry["gtpo"]:
        algorithm = get_algorithm("gtpo", **case["settings"])
        close(batch.to_rows(algorithm.rewards(batch))[mask], pad(case["reward"])[0][mask], rtol)
        close(batch.to_rows(algorithm.advantages(batch))[mask], pad(case["advantage"])[0][mask], rtol)


@entries(GOLDEN + OUTCOME)
def test_grpo_s(entry, dtype, rtol):
    batch, _ = rollouts(entry, dtype)
    for case in entry["grpo_s"]:
        algorithm = get_algorithm("grpo_s", **case["settings"])
        close(batch.to_rows(algorithm.rewards(batch))[:, 0], case["reward"], rtol)
        close(batch.to_rows(algorithm.advantages(batch))[:, 0], case["advantage"], rtol)


@entries(GOLDEN)
def test_grpo_and_dr_grpo(entry, dtype, rtol):
    batch, _ = rollouts(entry, dtype)
    for key, scale in (("grpo", True), ("dr_grpo", False)):
        advantages = grpo_advantages(batch.reward, batch.present, scale=scale)
        close(batch.to_rows(advantages), entry[key]["advantage"], rtol)


@entries(GOLDEN)
def test_losses(entry, dtype, rtol):
    batch, mask = rollouts(entry, dtype)
    logp, _ = pad(entry["input"]["logp"], dtype=dtype)
    old_logp, _ = pad(entry["input"]["old_logp"], dtype=dtype)

    def loss(name, **settings):
        advantages = batch.to_rows(get_algorithm(name).advantages(batch))
        return policy_loss(logp, old_logp, advantages, mask, **settings)[0]

    expected = entry["loss"]
    close(loss("gtpo"), expected["gtpo"], rtol)
    close(loss("dapo"), expected["dapo"], rtol)
    close(loss("grpo", reduce="sequences", clip_high=0.2), expected["grpo"], rtol)
    close(loss("grpo_s", ratio="sequence_mean", reduce="sequences"), expected["grpo_s"], rtol)
    geometric = loss("grpo_s", ratio="sequence_geometric", reduce="sequences")
    close(geometric, expected["grpo_s_geometric_ratio"], rtol)


@entries(GOLDEN)
def test_entropy_peers(entry, dtype, rtol):
    batch, mask = rollouts(entry, dtype)
    kept = batch.to_rows(forking_mask(batch.entropy, batch.mask))
    assert kept[mask].tolist() == [k for row in entry["forking_mask"] for k in row]
    shaped = entropy_advantages(grpo_advantages(batch.reward, batch.present), batch.entropy, batch.mask)
    close(batch.to_rows(shaped)[mask], pad(entry["entropy_advantage"])[0][mask], rtol)


@entries(GOLDEN)
def test_overlong(entry, dtype, rtol):
    batch, mask = rollouts(entry, dtype)
    charge = group_overlong(batch.lengths, batch.correct(), batch.live, gamma=entry["grop"]["gamma"])
    close(batch.to_rows(charge), entry["grop"]["penalty"], rtol)
    soft = entry["soft_overlong"]
    close(soft_overlong(mask.sum(-1), limit=soft["l_max"], buffer=soft["l_cache"]), soft["penalty"], rtol)
