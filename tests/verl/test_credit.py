"""verl's rows to advantages, without verl: golden values, padding rows, conversations, refusals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dew import Rollouts, get_algorithm
from dew.credit import grpo_advantages
from dew.engines.verl.config import dew_estimators
from dew.engines.verl.estimators import batch_context, estimator
from dew.errors import EngineError
from groups import batches, pad
from verl_rows import context, every_entry, rows, with_padding


def estimate(name, rewards, mask, uids, entropy, changed=None, **more):
    with batch_context(context(name, entropy, changed, **more)) as c:
        advantages, returns = estimator(name)(token_level_rewards=rewards, response_mask=mask, index=uids)
    assert returns is advantages
    return advantages, c


def close(actual, expected):
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected).double(), rtol=1e-4, atol=1e-5)


# ── golden ──────────────────────────────────────────────────────────────────────────────────────────────────
@every_entry
@pytest.mark.parametrize("name", dew_estimators())
def test_every_algorithm_gives_what_it_gives_alone(entry, name):
    rewards, mask, uids, entropy = rows(entry)
    advantages, c = estimate(name, rewards, mask, uids, entropy)
    grouped = Rollouts.from_rows(list(uids), mask=mask.bool(), reward=rewards.sum(-1), entropy=entropy, logp=c.logp)
    close(advantages, grouped.to_rows(c.algorithm.advantages(grouped)))


def test_acc_decides_correctness_and_penalties_are_extra():
    """Two answers, scores +1 / −1 with acc 1 / 0; the right one is charged 0.8 for length and stays right.

    GTPO, equal entropies: r̃⁺ = 1 + .1 − .8 = .3, r̃⁻ = −(1 + .1) = −1.1. A score of −1 is no charge.
    """
    rewards = torch.tensor([[0.0, 0.2], [0.0, -1.0]], dtype=torch.float64)
    mask, H = torch.ones(2, 2, dtype=torch.long), torch.ones(2, 2, dtype=torch.float64)
    acc, score = torch.tensor([1.0, 0.0]), torch.tensor([1.0, -1.0])
    _, c = estimate("gtpo", rewards, mask, ["a", "a"], H, acc=acc, score=score, recorded=True)
    [found] = c.credited
    close(found.credit.shaped, [[0.3, 0.3], [-1.1, -1.1]])
    close(found.credit.extra, [-0.8, 0.0])
    assert found.credit.correct.tolist() == [True, False]


def test_a_score_with_a_format_reward_in_it():
    """Score = acc + 0.1 for the format, and 0.5 off for the length of the last one: all of it is extra."""
    acc, form = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0.1, 0.0, 0.1, 0.0])
    rewards, mask = (acc + form + torch.tensor([0, 0, 0, -0.5]))[:, None], torch.ones(4, 1, dtype=torch.long)
    advantages, c = estimate("dapo", rewards, mask, ["a"] * 4, None, acc=acc, score=acc + form)
    [found] = c.credited
    close(found.credit.extra, [0.1, 0.0, 0.1, -0.5])
    close(advantages[:, 0], grpo_advantages(rewards[:, 0]))
    assert found.credit.correct.tolist() == [True, True, False, False]


# ── several rows, padding rows, workers ─────────────────────────────────────────────────────────────────────
@settings(max_examples=25)
@given(batches(), st.randoms(use_true_random=False))
def test_neither_padding_rows_nor_the_order_of_rows_matter(batch, random):
    """A group spread over workers, in any order and with padding rows between, gets what it gets whole."""
    ids, outcomes, entropies = batch
    H, live = pad(entropies, fill=0.0)
    H = H + 0.01 * live
    rewards = torch.zeros_like(H)
    rewards[:, 0] = torch.tensor(outcomes)
    given_rows = (rewards, live.long(), np.array([str(i) for i in ids], dtype=object), H)
    plain, _ = estimate("gtpo", *given_rows)
    r, m, u, h = with_padding(*given_rows)
    order = list(range(len(r)))
    random.shuffle(order)
    shuffled, _ = estimate("gtpo", r[order], m[order], u[order], h[order])
    back = torch.empty_like(shuffled)
    back[order] = shuffled
    close(back[: len(plain)], plain)
    assert not back[len(plain) :].any()


@pytest.mark.parametrize("name", ["dew", "gtpo", "grpo_s"])
def test_the_rows_of_a_conversation_are_one_answer(name):
    whole = [[1.0, 2.0, 3.0, 4.0], [2.0, 1.0], [0.5, 0.5, 2.5]]
    split = [[1.0, 2.0], [3.0, 4.0], [2.0, 1.0], [0.5], [0.5, 2.5]]
    keys = ["u_0_0", "u_0_1", "u_1_0", "u_2_0", "u_2_1"]
    order = [4, 1, 2, 0, 3]  # as verl's balancing leaves them
    H, mask = pad(whole, fill=0.0)
    rewards = torch.zeros_like(H)
    rewards[0, 0] = 1.0
    expected, _ = estimate(name, rewards, mask.long(), ["u"] * 3, H)
    h, m = pad(split, fill=0.0)
    r = torch.zeros_like(h)
    r[:2, 0] = 1.0  # every row of a conversation carries the outcome of the whole
    found, _ = estimate(
        name, r[order], m.long()[order], ["u"] * 5, h[order], keys=[keys[i] for i in order],
        acc=r.sum(-1)[order],
    )  # fmt: skip
    rows = {keys[i]: found[place] for place, i in enumerate(order)}
    close(torch.cat([rows["u_0_0"], rows["u_0_1"]]), expected[0])
    close(rows["u_1_0"], expected[1, :2])
    close(torch.cat([rows["u_2_0"][:1], rows["u_2_1"]]), expected[2, :3])


def test_the_limit_of_the_length_is_that_of_a_row():
    """Limit 4, buffer 2: rows of 2, 3 and 4 tokens cost 0, 0.5 and 1. The last row of the first answer has 2."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    rewards, changed = torch.zeros(4, 4), {"overlong": "soft", "overlong_buffer": 2, "max_tokens": 4}
    rewards[:3, 0] = 1.0
    keys = ["u_0_0", "u_0_1", "u_1_0", "u_2_0"]
    advantages, c = estimate("dapo", rewards, mask, ["u"] * 4, None, changed, keys=keys, acc=rewards.sum(-1))
    close(advantages[[0, 2, 3], 0], grpo_advantages(torch.tensor([1.0, 0.5, -1.0])))
    close(c.credited[0].credit.extra, [0, -0.5, -1])


def test_turns_are_the_runs_of_the_response_mask():
    """compare="turn" compares H = 1, 3, 2 of the first turns (mean 2) and H = 2, 6 of the second ones (mean 4)."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    H = torch.tensor([[1.0, 3, 9, 9, 2, 9], [2, 9, 6, 9, 9, 9], [1, 1, 1, 1, 1, 1]], dtype=torch.float64)
    rewards = torch.tensor([[1.0], [1], [0]], dtype=torch.float64).expand(3, 6) / 6
    by_turn = {"compare": "turn", "alpha1": 0.0, "alpha2": 1.0}
    advantages, _ = estimate("dew", rewards, mask, ["u"] * 3, H, by_turn)
    A, wrong = advantages[1, 0], advantages[2, 0]  # the token with H = 2 has the mean of its turn, so weight 1
    close(advantages[0], A * torch.tensor([0.5, 1.5, 0, 0, 0.5, 0]))
    close(advantages[1], A * torch.tensor([1.0, 0, 1.5, 0, 0, 0]))
    close(advantages[2], wrong.expand(6))


def test_a_masked_answer_still_counts_in_its_groups_baseline():
    """Rejection sampling masks a row altogether; DAPO's mean is over the three answers, as in the TRL engine."""
    rewards = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    mask = torch.tensor([[1], [1], [0]])
    advantages, _ = estimate("forking_tokens", rewards, mask, ["a"] * 3, torch.ones(3, 1).double(), {"keep": 1.0})
    batch = Rollouts.from_rows([0, 0, 0], mask=mask.bool(), reward=rewards[:, 0], entropy=torch.ones(3, 1).double())
    close(advantages, batch.to_rows(get_algorithm("dapo").advantages(batch)))


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────
LIVE = torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("entropy", "message"),
    [
        (None, "bypass_mode"),
        (torch.zeros(2, 3), "exactly 0 on every token"),
        (torch.tensor([[0.0, 0, 0], [0, 0, 1.0]]), "exactly 0"),  # the last one is masked
        *[
            (torch.tensor([[1.0, 1, 1], [1, bad, 1]]), "NaN, infinite or negative")
            for bad in (math.nan, math.inf, -1.0)
        ],
    ],
)
def test_what_is_not_an_entropy_is_refused(entropy, message):
    mask = LIVE.clone()
    mask[1, 2] = 0
    with pytest.raises(EngineError) as error:
        estimate("gtpo", torch.zeros(2, 3), mask, ["a", "a"], entropy)
    assert message in str(error.value)


def test_a_context_ends_with_its_batch_and_without_the_trainer_the_error_names_the_setting():
    estimate("gtpo", torch.zeros(2, 3), LIVE, ["a", "a"], torch.ones(2, 3))
    with pytest.raises(EngineError, match=r"drops the old.*trainer\.v1\.trainer_mode=dew_sync"):
        estimator("gtpo")(token_level_rewards=torch.zeros(2, 3), response_mask=LIVE, index=["a", "a"])
