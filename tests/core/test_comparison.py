"""What a token is compared with (`compare`): the comparison by tenths, and what holds for all of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dew import get_algorithm
from dew.credit import gtpo_rewards
from dew.ops import masked_mean, same_labels
from groups import COMPARE, groups, pad


def weights(correct, entropy, batched=False, **settings):
    """|r̃| with α₁ = 0 and α₂ = 1: the weights themselves, as ragged lists."""
    H, mask = pad(entropy)
    given = [x[None] if batched else x for x in (torch.tensor(correct), H, mask)]
    r = gtpo_rewards(*given, alpha1=0.0, alpha2=1.0, **settings).view(mask.shape)
    assert not r[~mask].any()
    return [row[live].abs().tolist() for row, live in zip(r, mask, strict=True)]


# ---- golden: worked by hand ---------------------------------------------------------------------
@pytest.mark.parametrize("batched", [False, True])
def test_golden(batched):
    # tenths 0 2 5 7 in both correct answers, 0 3 6 in the wrong one, where each token is alone
    entropy = [[1, 2, 3, 4], [2, 4, 6, 8], [1, 1 / 2, 1 / 4]]
    found = weights([True, True, False], entropy, batched, compare="relative")
    for row, expected in zip(found, [[2 / 3] * 4, [4 / 3] * 4, [1, 1, 1]], strict=True):
        assert row == pytest.approx(expected)


def test_golden_tenths():
    # tenths of 7 tokens: 0 1 2 4 5 7 8, of 4 tokens: 0 2 5 7; H = 1 and 3 where both have one, else a token is alone
    long, short = weights([True, True], [[1] * 7, [3] * 4], compare="relative")
    assert pytest.approx([0.5, 1, 0.5, 1, 0.5, 0.5, 1]) == long and short == pytest.approx([1.5] * 4)


def test_tenths_are_of_the_tokens_that_the_policy_wrote():
    # without the tool's output the first answer has 2 tokens, in tenths 0 and 5, as the second has
    H = torch.tensor([[1.0, 9, 2], [3, 5, 9]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    r = gtpo_rewards(torch.tensor([True, True]), H, mask, compare="relative", alpha1=0.0, alpha2=1.0)
    torch.testing.assert_close(r, torch.tensor([[1 / 2, 0, 4 / 7], [3 / 2, 10 / 7, 0]]).double())


# ---- properties ---------------------------------------------------------------------------------
@given(groups(min_entropy=2**-10), COMPARE)
def test_credit_is_conserved_on_each_side(group, compare):
    """Every comparison splits the tokens of a side into sets, and the weights of each set have mean 1."""
    found = weights(*group, compare=compare)
    for side in (True, False):
        rows = [row for row, correct in zip(found, group[0], strict=True) if correct == side]
        assert sum(map(sum, rows)) == pytest.approx(sum(map(len, rows)), rel=1e-6)


@given(groups(min_entropy=2**-10), COMPARE, st.randoms())
def test_order_does_not_matter(group, compare, random):
    correct, entropy = group
    order = list(range(len(correct)))
    random.shuffle(order)
    found = weights(correct, entropy, compare=compare)
    shuffled = weights([correct[i] for i in order], [entropy[i] for i in order], compare=compare)
    for i, row in zip(order, shuffled, strict=True):
        assert row == pytest.approx(found[i], rel=1e-6)


def test_labels_are_of_one_group():
    labels = same_labels(torch.tensor([[[0, 7], [7, 0]]]).expand(3, 2, 2))
    assert labels.tolist() == [[[0, 1], [1, 0]], [[2, 3], [3, 2]], [[4, 5], [5, 4]]]


def test_the_mean_of_a_label_without_values_is_0():
    found = masked_mean(torch.tensor([3.0, 5.0, 7.0]), torch.tensor([True, True, False]), torch.tensor([0, 0, 1]))
    assert found.tolist() == [4, 4, 0]


@pytest.mark.parametrize("compare", ["column", "row", "matrix", "turn", "relative"])
def test_a_floor_where_one_token_could_take_all(compare):
    assert get_algorithm("dew", compare=compare).entropy_clip == (None if compare == "column" else (0.01, 100.0))
    by_default = get_algorithm("gtpo", compare=compare).entropy_clip is not None
    assert by_default == (compare in ("turn", "relative"))
