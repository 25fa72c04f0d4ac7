import pytest
import torch
from hypothesis import given

from dew import DewError, Rollouts
from groups import batches, pad


def from_rows(ids, rewards, rows):
    entropy, mask = pad(rows)
    return Rollouts.from_rows(ids, mask=mask, reward=torch.tensor(rewards), entropy=entropy), entropy, mask


# ---- golden ------------------------------------------------------------------------------------
def test_rows_are_grouped_in_order_of_first_appearance():
    batch, *_ = from_rows(list(torch.tensor([7, 3, 7, 3, 3])), [0.0, 1, 2, 3, 4], [[1]] * 5)
    assert batch.rows.tolist() == [[0, 2, -1], [1, 3, 4]] and batch.reward.tolist() == [[0, 2, 0], [1, 3, 4]]
    assert batch.present.tolist() == [[True, True, False], [True, True, True]]
    assert batch.lengths.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_correct_means_outcome_above_the_threshold():
    batch, *_ = from_rows([0, 0, 0], [0.5, 0.6, 1.0], [[1]] * 3)
    assert batch.correct().tolist() == [[False, True, True]]
    assert batch.correct(threshold=0.8).tolist() == [[False, False, True]]


# ---- properties --------------------------------------------------------------------------------
@given(batches())
def test_rows_round_trip(batch):
    ids, rewards, rows = batch
    grouped, entropy, mask = from_rows(ids, rewards, rows)
    torch.testing.assert_close(grouped.to_rows(grouped.entropy), entropy, equal_nan=True)
    assert grouped.to_rows(grouped.mask).equal(mask) and grouped.to_rows(grouped.reward).tolist() == rewards
    assert int(grouped.present.sum()) == len(ids)


@given(batches())
def test_as_one_group_has_every_row(batch):
    grouped, entropy, _ = from_rows(*batch)
    one = grouped.as_one_group()
    assert one.mask.shape[0] == 1
    torch.testing.assert_close(one.to_rows(one.entropy), entropy, equal_nan=True)


# ---- edges -------------------------------------------------------------------------------------
def test_groups_without_rows():
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    batch = Rollouts(mask=mask, reward=torch.zeros(2, 3))
    assert batch.present.all() and batch.to_rows(mask).shape == (6, 4)
    assert batch.as_one_group().rows.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_rewards_are_numbers():
    yes = torch.tensor([True, False])
    batch = Rollouts.from_rows([0, 0], mask=MASK, reward=yes, extra=yes)
    assert (batch.reward + batch.extra).tolist() == [[2.0, 0.0]]


def test_an_empty_answer_is_present_but_not_live():
    batch, *_ = from_rows([0, 0], [0.0, 1], [[1.0], []])
    assert batch.present.tolist() == [[True, True]] and batch.live.tolist() == [[True, False]]


MASK, REWARD = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Rollouts(mask=MASK, reward=REWARD), r"expected \(P, G, T\)"),
        (lambda: Rollouts(mask=MASK[None].float(), reward=REWARD[None]), "torch.bool"),
        (
            lambda: Rollouts(mask=MASK[None], reward=torch.zeros(3), entropy=torch.zeros(1, 2, 4)),
            r"entropy has shape \(1, 2, 4\), expected \(P, G, T\) = \(1, 2, 3\)\.\nreward has shape \(3,\)",
        ),
        (lambda: Rollouts.from_rows([0], mask=MASK, reward=REWARD), "1 group ids for 2 rows"),
        (lambda: Rollouts.from_rows([[{}], [{}]], mask=MASK, reward=REWARD), "group id is of type list"),
        (lambda: Rollouts.from_rows([REWARD, REWARD], mask=MASK, reward=REWARD), "group id is of type list"),
        (lambda: Rollouts.from_rows([0, 0], mask=MASK, reward=[0, 1]), r"reward is of type list.*as_tensor\(reward\)"),
        (lambda: Rollouts.from_rows([0, 0], mask=MASK[0], reward=REWARD), r"expected \(B, T\)"),
        (lambda: Rollouts.from_rows([0, 0], mask=MASK, reward=torch.zeros(3)), r"reward has shape \(3,\), expected"),
        (lambda: Rollouts.from_rows([0, 0], mask=MASK, reward=REWARD[:, None]), r"shape \(2, 1\), expected \(B,\)"),
        (lambda: Rollouts.from_rows("ab", mask=MASK.cumsum(0) == 1, reward=REWARD), r"'b' has no live.*\(1 such"),
        (lambda: Rollouts.from_rows(REWARD[:, None], mask=~MASK, reward=REWARD), r"group 0\.0 has no live"),
        (lambda: Rollouts.from_rows([0, 0], mask=MASK, reward=REWARD / 0), r"reward is nan at \(0, 0\) \(2 such"),
        (lambda: Rollouts.from_rows([0, 0], mask=MASK, reward=REWARD, extra=1 / REWARD), "extra is inf"),
        (lambda: Rollouts.from_rows([0, 0], mask=MASK, reward=REWARD, logp=MASK + 1.5), "logp is 2.5 .*log_softmax"),
        (lambda: Rollouts.from_rows([], mask=MASK[:0], reward=REWARD[:0]), "no rows"),
        (lambda: Rollouts(mask=MASK[None], reward=REWARD[None]).to_rows(torch.zeros(3, 1)), "to_rows got shape"),
    ],
)
def test_invalid_shapes(call, says):
    with pytest.raises(DewError, match=says):
        call()
