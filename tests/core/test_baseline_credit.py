"""GRPO, Dr. GRPO, DAPO's filter and penalties, forking tokens, the entropy-shaped advantage."""

from functools import partial
from inspect import signature

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from dew import DewError, credit
from groups import groups, pad

REWARDS = st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=16)
YES, NO = True, False


def bools(*values):
    return torch.tensor(values, dtype=torch.bool)


# ---- golden: worked by hand -------------------------------------------------------------------
def test_golden_grpo():
    # 1 0 0 0: mean ¼, squares .75² + 3 · .25² = .75, sample variance .25 -> (.75, −.25, …)/(.5 + 1e-4)
    A = credit.grpo_advantages(torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(A, torch.tensor([0.75, -0.25, -0.25, -0.25], dtype=torch.float64) / 0.5001)


def test_golden_soft_overlong():
    # limit 10, buffer 4: free up to 6, then (6 − len)/4, −1 from 10 on
    charge = credit.soft_overlong(torch.tensor([1, 6, 7, 8, 10, 11, 500]), limit=10, buffer=4)
    torch.testing.assert_close(charge, torch.tensor([0, 0, -0.25, -0.5, -1, -1, -1]))


def test_golden_group_overlong():
    lengths = torch.tensor([[10, 20, 30, 80], [10, 20, 30, 80], [10, 20, 30, 80], [10, 20, 30, 80]])
    correct = torch.tensor([[YES, YES, YES, NO], [YES, NO, NO, NO], [YES, YES, NO, NO], [YES, YES, YES, YES]])
    expected = torch.tensor(
        [
            [0, 0, -0.25, 0],  # easy, n/G = ¾: knee over 10 20 30 = max(20, 20); 30 -> −½ · 10/20
            [0, 0, 0, 0],  # hard, n/G = ¼: nobody
            [0, 0, 0, -0.5 * 35 / 45],  # between, n = m: the wrong pay; knee over all = max(45, 35)
            [0, 0, 0, -0.5 * 35 / 45],  # easy: knee over all four correct lengths
        ]
    )
    torch.testing.assert_close(credit.group_overlong(lengths, correct), expected)


def test_golden_forking():
    # 6 live tokens, keep ⌈.2 · 6⌉ = 2: the second largest is 2, and the tie with it stays
    entropy, mask = pad([[1, 2], [3], [2, 0, 1]])
    assert credit.forking_mask(entropy, mask)[mask].tolist() == [False, True, True, True, False, False]


def test_golden_entropy_advantage():
    # A + min(.4 H, |A|/2): 1 + min(.4, .5) = 1.4;  1 + min(2, .5) = 1.5;  −1 + min(.4, .5) = −.6
    A = credit.entropy_advantages(torch.tensor([1.0, -1]), torch.tensor([[1.0, 5], [1, 0]]), torch.ones(2, 2).bool())
    torch.testing.assert_close(A, torch.tensor([[1.4, 1.5], [-0.6, -1.0]]))
    assert credit.entropy_advantages(torch.ones(1), torch.tensor([[-1e-4]]), torch.ones(1, 1).bool()) == 1  # rounding


# ---- oracle ------------------------------------------------------------------------------------
@given(REWARDS, st.booleans())
def test_grpo_matches_the_loops(rewards, scale):
    expected = torch.tensor(oracles.grpo_advantages(rewards, scale), dtype=torch.float64)
    actual = credit.grpo_advantages(torch.tensor(rewards, dtype=torch.float64), scale=scale)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@given(st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=16))
def test_group_overlong_matches_the_loops(answers):
    lengths, correct = [a[0] for a in answers], [a[1] for a in answers]
    actual = credit.group_overlong(torch.tensor(lengths, dtype=torch.float64), torch.tensor(correct))
    expected = torch.tensor(oracles.group_overlong(lengths, correct), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@given(groups(max_size=16), st.floats(0.01, 1))
def test_forking_matches_the_loops(group, keep):
    entropy, mask = pad(group[1])
    expected = [k for row in oracles.forking_mask(group[1], keep) for k in row]
    assert credit.forking_mask(entropy, mask, keep=keep)[mask].tolist() == expected


# ---- properties --------------------------------------------------------------------------------
@given(st.lists(st.booleans(), min_size=1, max_size=16), st.lists(st.booleans(), min_size=16, max_size=16))
def test_signal_needs_a_present_correct_and_wrong_answer(correct, present):
    here = [c for c, p in zip(correct, present, strict=False) if p]
    actual = credit.has_signal(torch.tensor(correct), torch.tensor(present[: len(correct)]))
    assert actual.item() == (len(set(here)) == 2)
    assert credit.has_signal(torch.tensor(correct)).item() == (len(set(correct)) == 2)


@given(groups(), st.floats(0, 2), st.floats(1.01, 5))
def test_entropy_bonus_never_flips_an_advantage(group, alpha, kappa):
    entropy, mask = pad(group[1])
    A = torch.where(torch.tensor(group[0]), 1.0, -1.0).double()
    shaped = credit.entropy_advantages(A, entropy, mask, alpha=alpha, kappa=kappa)
    assert (shaped.sign() == torch.where(mask, A[:, None].sign(), 0)).all()
    per_token = credit.entropy_advantages(A[:, None].expand_as(entropy), entropy, mask, alpha=alpha, kappa=kappa)
    torch.testing.assert_close(per_token, shaped)


# ---- edges -------------------------------------------------------------------------------------
def test_equal_rewards_give_no_advantage_rather_than_rounding_noise():
    assert credit.grpo_advantages(torch.full((3, 7), 0.3)).abs().max() < 1e-3
    assert not credit.group_relative(torch.tensor([[0.3] * 7, [-0.3] * 7])).any()
    small = credit.group_relative(torch.tensor([1e-6, 3e-6, float("nan")]), bools(YES, YES, NO))  # relative to the size
    assert small[0] < 0 < small[1]


def test_absent_answers_get_no_penalty_and_do_not_move_the_knee():
    lengths, correct = torch.tensor([10, 20, 30, 80, 9999]), bools(YES, YES, YES, NO, YES)
    charge = credit.group_overlong(lengths, correct, bools(YES, YES, YES, YES, NO))
    torch.testing.assert_close(charge[:4], credit.group_overlong(lengths[:4], correct[:4]))
    assert charge[4] == 0


def test_empty_groups_and_answers():
    assert not credit.group_overlong(torch.tensor([5, 6]), bools(YES, NO), bools(NO, NO)).any()
    assert not credit.group_overlong(torch.tensor([0, 0]), bools(YES, NO)).any()
    assert not credit.forking_mask(torch.full((2, 3), float("nan")), torch.zeros(2, 3).bool()).any()


def test_entropy_is_a_constant():
    H, A, mask = torch.rand(2, 3, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2, 3).bool()
    assert not credit.entropy_advantages(A, H, mask).requires_grad
    for rewards in (credit.gtpo_rewards, credit.grpo_s_rewards):
        assert not rewards(bools(YES, NO), H, mask).requires_grad


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_an_error_for_every_credit(value):
    r, x, mask = torch.tensor([1.0, value]), torch.ones(2, 1), torch.ones(2, 1).bool()
    names = ("grpo", "maxrl", "qae", "grpo_s", "reinforce_pp", "token_baseline", "gtpo")
    for function in (credit.group_relative, *(getattr(credit, f"{name}_advantages") for name in names)):
        others = {"mask": mask, "logp": -x, "sum_sq": x}
        others = {name: x for name, x in others.items() if name in signature(function).parameters}
        with pytest.raises(DewError, match=r"reward is -?(nan|inf) at \(1,"):
            function(r[:, None] if function is credit.gtpo_advantages else r, **others)


H, MASK = torch.ones(2, 2), torch.ones(2, 2).bool()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: credit.grpo_advantages(torch.tensor(1.0)), "axis of answers"),
        (lambda: credit.grpo_advantages(torch.rand(65)), "one group of 65"),
        (lambda: credit.grpo_advantages(torch.rand(4, 1)), r"shape \(4, 1\): groups of one.*x\.squeeze\(-1\)"),
        (lambda: credit.has_signal(torch.ones(4)), r"reward > 0\.5"),
        *((partial(credit.soft_overlong, torch.ones(2), limit=4, buffer=b), "0 < buffer <= limit") for b in (0, 5)),
        (lambda: credit.group_overlong(torch.ones(3), bools(YES, NO)), "lengths has shape"),
        (lambda: credit.group_overlong(torch.ones(2), bools(YES, NO), gamma=0.4), "easy and hard at once"),
        (lambda: credit.group_overlong(torch.ones(2), bools(YES, NO), gamma=1.1), "gamma=1.1"),
        *((partial(credit.forking_mask, H, MASK, keep=keep), "0 < keep <= 1") for keep in (0, 1.5)),
        (lambda: credit.entropy_advantages(torch.ones(3), H, MASK), "advantages has shape"),
        (lambda: credit.entropy_advantages(torch.ones(2), H, MASK, kappa=1), "kappa > 1"),
        (lambda: credit.entropy_advantages(torch.ones(2), -H, MASK), "never negative"),
        (lambda: credit.entropy_advantages([1.0, 0], H, MASK), "advantages is of type list"),
        (lambda: credit.wrong_sign([[1.0], [0]], torch.ones(2)), "advantages is of type list"),
        (lambda: credit.soft_overlong([1, 2], limit=4, buffer=2), "lengths is of type list"),
        (lambda: credit.reinforce_pp_advantages(torch.ones(2), [[1], [1]]), "mask is of type list"),
        (lambda: credit.grpo_s_advantages(H[0], correct=H[0]), r"correct has dtype.*reward > 0\.5"),
    ],
)
def test_invalid_input(call, says):
    with pytest.raises(DewError, match=says):
        call()
