import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from dew import DewError
from dew.credit import grpo_s_advantages, grpo_s_rewards
from groups import AVERAGE, POOL, groups, pad, tensors

# ---- golden: worked by hand -------------------------------------------------------------------
#   ✓ H = 1, 3 -> Ĥ = 2    1 + .1 · 2/((2+4)/2)           = 1 + .2/3
#   ✓ H = 4    -> Ĥ = 4    1 + .1 · 4/3                   = 1 + .4/3
#   ✗ H = 1, 1 -> Ĥ = 1   −1 − .1 · 1/((1+1/3)/2)         = −1.15
#   ✗ H = 3    -> Ĥ = 3   −1 − .1 · (1/3)/(2/3)           = −1.05
CORRECT = torch.tensor([True, True, False, False])
ENTROPY, MASK = pad([[1, 3], [4], [1, 1], [3]])
REWARDS = torch.tensor([1 + 0.2 / 3, 1 + 0.4 / 3, -1.15, -1.05], dtype=torch.float64)


def test_golden_rewards():
    torch.testing.assert_close(grpo_s_rewards(CORRECT, ENTROPY, MASK), REWARDS)


def test_golden_geometric():
    # Ĥ = √3, 4 with geometric mean (4√3)^½;  1/Ĥ = 1, 1/3 with geometric mean 1/√3
    s = 3**0.5
    g = (4 * s) ** 0.5
    expected = torch.tensor([1 + 0.1 * s / g, 1 + 0.4 / g, -1 - 0.1 * s, -1 - 0.1 / s], dtype=torch.float64)
    torch.testing.assert_close(grpo_s_rewards(CORRECT, ENTROPY, MASK, average="geometric"), expected)


def test_golden_advantages_over_the_group():
    # r̂⁻ of the group: 0 0 −1.15 −1.05 -> mean −.55, squares .55² · 2 + .6² + .5² = 1.215, sample variance 1.215/3
    expected = torch.tensor([-0.60, -0.50], dtype=torch.float64) / ((1.215 / 3) ** 0.5 + 1e-4)
    torch.testing.assert_close(grpo_s_advantages(REWARDS)[2:], expected)


# ---- oracle ------------------------------------------------------------------------------------
@given(groups(max_size=16), AVERAGE, st.sampled_from([None, (0.2, 0.28)]), st.floats(0, 2), st.floats(0, 2))
def test_rewards_match_the_loops(group, average, clip, beta1, beta2):
    settings = {"beta1": beta1, "beta2": beta2, "average": average, "entropy_clip": clip}
    expected = torch.tensor(oracles.grpo_s_rewards(*group, **settings), dtype=torch.float64)
    torch.testing.assert_close(grpo_s_rewards(*tensors(group), **settings), expected, rtol=1e-9, atol=1e-9)


@given(groups(max_size=16), POOL)
def test_advantages_match_the_loops(group, pool):
    rewards = oracles.grpo_s_rewards(*group)
    expected = torch.tensor(oracles.pooled(rewards, group[0], pool), dtype=torch.float64)
    actual = grpo_s_advantages(torch.tensor(rewards, dtype=torch.float64), pool=pool)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# ---- properties --------------------------------------------------------------------------------
@given(groups(), AVERAGE, POOL)
def test_padded_answers_are_never_read(group, average, pool):
    """A ragged group padded with answers of NaN gives what the group alone gives."""
    correct, entropy, mask = tensors(group)
    r = grpo_s_rewards(correct, entropy, mask, average=average)
    nan = torch.full_like(entropy[:1], float("nan"))
    padded = torch.cat([correct, correct[:1]]), torch.cat([entropy, nan]), torch.cat([mask, torch.zeros_like(mask[:1])])
    extra = torch.cat([torch.zeros_like(r), nan[0, :1]])
    r_padded = grpo_s_rewards(*padded, average=average, extra=extra)
    torch.testing.assert_close(r_padded, torch.cat([r, r.new_zeros(1)]))
    poisoned = torch.cat([r, r.new_full((1,), float("nan"))])
    A = grpo_s_advantages(poisoned, padded[2].any(-1), pool=pool)
    torch.testing.assert_close(A, torch.cat([grpo_s_advantages(r, pool=pool), r.new_zeros(1)]))


# ---- edges -------------------------------------------------------------------------------------
def test_the_polarity_is_the_sign():
    # ✓ ½ ¼ 0: mean ¼, std ¼;  ✗ 0 0 −½: mean −⅙, std √(1/12)
    A = grpo_s_advantages(torch.tensor([0.5, 0.25, -0.5], dtype=torch.float64))
    assert A.tolist() == pytest.approx([0.25 / 0.2501, 0, -1 / 3 / (12**-0.5 + 1e-4)])


def test_penalty_lowers_every_answer_and_keeps_its_polarity():
    charge = torch.full((4,), -0.5, dtype=torch.float64)
    weak = grpo_s_rewards(CORRECT, ENTROPY, MASK, beta1=0.3, extra=charge)
    torch.testing.assert_close(weak, grpo_s_rewards(CORRECT, ENTROPY, MASK, beta1=0.3) - 0.5)
    assert (weak < 0).all()  # the sign no longer tells the outcome, so it is passed
    A = grpo_s_advantages(weak, pool="sign", correct=CORRECT)
    torch.testing.assert_close(A[:2].sum(), A.new_zeros(()), atol=1e-9, rtol=0)


GROUP = CORRECT, ENTROPY, MASK


@pytest.mark.parametrize(
    ("function", "arguments", "change", "says"),
    [
        (grpo_s_rewards, GROUP, {"beta1": -1.0}, "beta1=-1.0"),
        (grpo_s_rewards, GROUP, {"beta2": -0.1}, "rewarded for being sure"),
        (grpo_s_rewards, GROUP, {"average": "median"}, "arithmetic, geometric"),
        (grpo_s_rewards, GROUP, {"entropy_clip": (-1, 2)}, "0 <= low"),
        (grpo_s_rewards, GROUP, {"extra": torch.zeros(5)}, "extra has shape"),
        (grpo_s_advantages, (REWARDS, torch.ones(3, dtype=torch.bool)), {}, "present has shape"),
        (grpo_s_advantages, (REWARDS, torch.ones(4)), {}, "torch.bool"),
        (grpo_s_advantages, (REWARDS,), {"pool": "none"}, "group, joint, sign"),
        (grpo_s_advantages, (REWARDS,), {"correct": CORRECT[:3]}, "correct has shape"),
    ],
)
def test_invalid_input(function, arguments, change, says):
    with pytest.raises(DewError, match=says):
        function(*arguments, **change)
