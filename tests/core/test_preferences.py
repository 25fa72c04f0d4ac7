"""Entropy weights for preference pairs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dew.credit import gtpo_rewards, preference_weights
from dew.errors import DewError
from groups import groups, pad

ALPHA = st.sampled_from([0.0, 0.25, 0.5, 1.0])
FLOOR = st.sampled_from([1e-6, 0.01, 0.3])


def weights(chosen, rows, **settings):
    entropy, mask = pad(rows)
    return preference_weights(torch.tensor(chosen), entropy, mask, **settings), mask


# ---- golden: worked by hand -------------------------------------------------------------------
#   chosen    H = 1, 3       mean 2                w = 1 + ½(1/2 − 1), 1 + ½(3/2 − 1)  = .75, 1.25
#   rejected  H = 1, 2, 4    H⁻¹ = 1, ½, ¼         mean 7/12: shares 12/7, 6/7, 3/7
#                                                  w = 1 + ½(5/7), 1 + ½(−1/7), 1 + ½(−4/7)
CHOSEN, ROWS = [True, False], [[1, 3], [1, 2, 4]]
WEIGHTS = torch.tensor([[0.75, 1.25, 0], [1 + 5 / 14, 1 - 1 / 14, 1 - 4 / 14]], dtype=torch.float64)


def test_golden():
    torch.testing.assert_close(weights(CHOSEN, ROWS, alpha=0.5)[0], WEIGHTS)


def test_golden_floor():
    # rejected, floor ½: H = ½, ½, 1 -> H⁻¹ = 2, 2, 1, mean 5/3: shares 6/5, 6/5, 3/5; without it the first takes it all
    found, _ = weights([False], [[1e-9, 0.5, 1]], alpha=1.0, floor=0.5)
    torch.testing.assert_close(found, torch.tensor([[1.2, 1.2, 0.6]], dtype=torch.float64))
    alone, _ = weights([False], [[1e-9, 0.5, 1]], alpha=1.0, floor=1e-6)
    torch.testing.assert_close(alone, torch.tensor([[3.0, 0, 0]], dtype=torch.float64), atol=1e-4, rtol=0)


def oracle(chosen, rows, alpha, floor):
    out = []
    for preferred, row in zip(chosen, rows, strict=True):
        values = [max(h, floor) if preferred else 1 / max(h, floor) for h in row]
        mean = sum(values) / len(values)
        out.append([1 + alpha * (x / mean - 1) for x in values])
    return out


@given(groups(), ALPHA, FLOOR)
def test_oracle(group, alpha, floor):
    found, _ = weights(*group, alpha=alpha, floor=floor)
    expected, _ = pad(oracle(*group, alpha, floor), fill=0.0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@given(groups(), ALPHA)
def test_the_weights_of_an_answer_are_1_on_average_and_never_negative(group, alpha):
    found, mask = weights(*group, alpha=alpha)
    torch.testing.assert_close(found.sum(-1), mask.sum(-1).double())
    assert (found[mask] >= 1 - alpha - 1e-9).all()
    assert (found[~mask] == 0).all()


@given(groups())
def test_without_alpha_every_token_counts_once(group):
    found, mask = weights(*group, alpha=0.0)
    torch.testing.assert_close(found, mask.double())


@given(groups(min_entropy=0.125), ALPHA, st.sampled_from([0.5, 2.0]))
def test_the_unit_of_entropy_does_not_matter(group, alpha, unit):
    chosen, rows = group
    scaled = [[unit * h for h in row] for row in rows]
    torch.testing.assert_close(weights(chosen, rows, alpha=alpha)[0], weights(chosen, scaled, alpha=alpha)[0])


@given(groups(), ALPHA)
def test_an_answer_is_compared_with_itself_alone(group, alpha):
    chosen, rows = group
    together, _ = weights(chosen, rows, alpha=alpha)
    for i, row in enumerate(rows):
        alone, _ = weights([chosen[i]], [row], alpha=alpha)
        torch.testing.assert_close(together[i, : len(row)], alone[0])


def test_it_is_gtpos_weighting_along_the_row():
    entropy, mask = pad(ROWS)
    rewards = gtpo_rewards(torch.tensor(CHOSEN), entropy, mask, alpha1=0.7, alpha2=0.3, compare="row")
    torch.testing.assert_close(preference_weights(torch.tensor(CHOSEN), entropy, mask, alpha=0.3), rewards.abs())


def test_batches_of_pairs_and_no_gradient():
    entropy, mask = pad(ROWS)
    entropy.requires_grad_()
    both = preference_weights(torch.tensor([CHOSEN] * 2), entropy.expand(2, -1, -1), mask.expand(2, -1, -1), alpha=0.5)
    torch.testing.assert_close(both, WEIGHTS.expand(2, -1, -1))
    assert not both.requires_grad


@pytest.mark.parametrize(("alpha", "floor"), [(-0.1, 0.01), (1.1, 0.01), (float("nan"), 0.01), (0.5, 0.0), (0.5, -1)])
def test_settings_that_cannot_work_are_refused(alpha, floor):
    with pytest.raises(DewError, match="alpha" if floor == 0.01 else "entropy_floor"):
        weights(CHOSEN, ROWS, alpha=alpha, floor=floor)
