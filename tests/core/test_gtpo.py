import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from dew import DewError
from dew.credit import gtpo_advantages, gtpo_rewards
from groups import AVERAGE, COMPARE, POOL, groups, pad, tensors

CLIP = st.sampled_from([None, (0.2, 0.28), (0.0, 1.0)])


# ---- golden: worked by hand -------------------------------------------------------------------
#          t=1                                       t=2
#   ✓ H=1  1 + .1 · 2 · 1/(1+3)         = 1.05   ✓ H=3  1 + .1 · 1 · 3/3 = 1.10
#   ✓ H=3  1 + .1 · 2 · 3/(1+3)         = 1.15     (ended)
#   ✗ H=1  −1 − .1 · 2 · 1/(1+1/3)      = −1.15  ✗ H=2  −1 − .1 · 1      = −1.10
#   ✗ H=3  −1 − .1 · 2 · (1/3)/(1+1/3)  = −1.05    (ended)
CORRECT = torch.tensor([True, True, False, False])
ENTROPY, MASK = pad([[1, 3], [3], [1, 2], [3]])
REWARDS = torch.tensor([[1.05, 1.10], [1.15, 0], [-1.15, -1.10], [-1.05, 0]], dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-9, atol=1e-12)


def test_golden_column():
    close(gtpo_rewards(CORRECT, ENTROPY, MASK), REWARDS)
    close(gtpo_rewards(CORRECT, ENTROPY, MASK.long()), REWARDS)  # a mask of whole numbers, as trainers have
    wide, mask = (torch.nn.functional.pad(x, (3, 0)) for x in (ENTROPY, MASK))  # after a prompt of three tokens
    close(gtpo_rewards(CORRECT, wide, mask)[:, 3:], REWARDS)


def test_golden_row():
    # ✓ row 1: mean(1, 3) = 2 -> .1 · 1/2 = .05, .1 · 3/2 = .15;  ✗ row 3: mean(1, 1/2) = 3/4 -> .1 · 4/3, .1 · 2/3
    expected = [[1.05, 1.15], [1.10, 0], [-1 - 0.4 / 3, -1 - 0.2 / 3], [-1.10, 0]]
    close(gtpo_rewards(CORRECT, ENTROPY, MASK, compare="row"), expected)


def test_golden_matrix():
    # ✓ mean(1, 3, 3) = 7/3 -> .1 · 3/7 = .3/7, .9/7, .9/7;  ✗ mean(1, 1/2, 1/3) = 11/18 -> 1.8/11, .9/11, .6/11
    expected = [[1 + 0.3 / 7, 1 + 0.9 / 7], [1 + 0.9 / 7, 0], [-1 - 1.8 / 11, -1 - 0.9 / 11], [-1 - 0.6 / 11, 0]]
    close(gtpo_rewards(CORRECT, ENTROPY, MASK, compare="matrix"), expected)


def test_golden_geometric():
    # ✓ t=1: √(1·3) = √3 -> .1/√3 and .1·√3;  ✗ t=1: √(1·⅓) = 1/√3 -> .1·√3 and .1/√3
    s = 3**0.5
    expected = [[1 + 0.1 / s, 1.1], [1 + 0.1 * s, 0], [-1 - 0.1 * s, -1.1], [-1 - 0.1 / s, 0]]
    close(gtpo_rewards(CORRECT, ENTROPY, MASK, average="geometric"), expected)


def test_golden_clip():
    # H clamped to (1, 2): ✓ t=1 is 1, 2 -> mean 1.5;  ✗ t=1 is 1, 1/2 -> mean 3/4
    expected = [[1 + 0.2 / 3, 1.1], [1 + 0.4 / 3, 0], [-1 - 0.4 / 3, -1.1], [-1 - 0.2 / 3, 0]]
    close(gtpo_rewards(CORRECT, ENTROPY, MASK, entropy_clip=(1, 2)), expected)


def test_golden_penalty():
    # an overlong charge of −½ lowers both a correct and a wrong answer: r̃ = ±α₁ + charge ± α₂ · weight
    charge = torch.tensor([-0.5, 0, 0, -0.5], dtype=torch.float64)
    close(gtpo_rewards(CORRECT, ENTROPY, MASK, extra=charge), [[0.55, 0.60], [1.15, 0], [-1.15, -1.10], [-1.55, 0]])


@pytest.mark.parametrize("scale", [1.0, 0.1])  # the sign of a reward is its polarity, however small it is
def test_golden_advantages_over_the_group(scale):
    # r̃⁺ over the 6 tokens: 1.05 1.10 1.15 0 0 0 -> mean .55, sample variance 1.82/5
    std = scale * (1.82 / 5) ** 0.5 + 1e-4
    A = gtpo_advantages(scale * REWARDS, MASK)
    close(A[:2], scale * torch.tensor([[0.50, 0.55], [0.60, 0]], dtype=torch.float64) / std)
    close(A[2:], scale * torch.tensor([[-0.60, -0.55], [-0.50, 0]], dtype=torch.float64) / std)


# ---- oracle: the formula as loops --------------------------------------------------------------
@given(groups(max_size=16), COMPARE, AVERAGE, CLIP, st.floats(0, 2), st.floats(0, 2))
def test_rewards_match_the_loops(group, compare, average, clip, alpha1, alpha2):
    settings = {"alpha1": alpha1, "alpha2": alpha2, "compare": compare, "average": average, "entropy_clip": clip}
    if clip == (0.0, 1.0):  # a clip that starts at 0 does not undo the floor
        expected = oracles.gtpo_rewards(*group, **{**settings, "entropy_clip": (1e-6, 1.0)})
    else:
        expected = oracles.gtpo_rewards(*group, **settings)
    actual = gtpo_rewards(*tensors(group), **settings)
    torch.testing.assert_close(actual, pad(expected, fill=0.0)[0], rtol=1e-9, atol=1e-9)


@given(groups(max_size=16), POOL)
def test_advantages_match_the_loops(group, pool):
    correct, rows = group
    rewards = oracles.gtpo_rewards(correct, rows)
    expected, mask = pad(oracles.gtpo_advantages(correct, rewards, pool), fill=0.0)
    torch.testing.assert_close(gtpo_advantages(pad(rewards)[0], mask, pool=pool), expected, rtol=1e-9, atol=1e-9)


# ---- properties: what stays true for every group ----------------------------------------------
@given(groups(), st.floats(0.1, 2), st.floats(0.0, 2))
def test_reward_mass_is_conserved_at_every_position(group, alpha1, alpha2):
    """Proposition 2.2, and its mirror for wrong answers."""
    correct, entropy, mask = tensors(group)
    r = gtpo_rewards(correct, entropy, mask, alpha1=alpha1, alpha2=alpha2)
    d_t = (correct[:, None] & mask).sum(0).double()
    h_t = (~correct[:, None] & mask).sum(0).double()
    torch.testing.assert_close(r.clamp_min(0).sum(0), (alpha1 + alpha2) * d_t)
    torch.testing.assert_close(r.clamp_max(0).sum(0), -(alpha1 + alpha2) * h_t)


@given(groups(), COMPARE, AVERAGE)
def test_padding_is_never_read(group, compare, average):
    correct, entropy, mask = tensors(group)  # NaN under the mask
    r = gtpo_rewards(correct, entropy, mask, compare=compare, average=average)
    assert r.isfinite().all() and not r[~mask].any()
    poisoned = torch.where(mask, r, float("nan"))
    for pool in ("group", "joint", "sign"):
        A = gtpo_advantages(poisoned, mask, pool=pool)
        assert A.isfinite().all() and not A[~mask].any()


@given(groups(), groups(), COMPARE)
def test_batch_equals_its_groups_one_by_one(one, two, compare):
    G, T = max(len(one[0]), len(two[0])), 5
    correct, mask = torch.zeros(2, G, dtype=torch.bool), torch.zeros(2, G, T, dtype=torch.bool)
    entropy = torch.full((2, G, T), float("nan"), dtype=torch.float64)
    for p, group in enumerate((one, two)):
        c, H, m = tensors(group)
        correct[p, : len(c)], entropy[p, : len(c), : H.shape[1]], mask[p, : len(c), : H.shape[1]] = c, H, m
    rewards = gtpo_rewards(correct, entropy, mask, compare=compare)
    advantages = gtpo_advantages(rewards, mask)
    for p, group in enumerate((one, two)):
        c, H, m = tensors(group)
        alone = gtpo_rewards(c, H, m, compare=compare)
        torch.testing.assert_close(rewards[p, : len(c), : H.shape[1]], alone)
        torch.testing.assert_close(advantages[p, : len(c), : H.shape[1]], gtpo_advantages(alone, m))


# ---- edges -------------------------------------------------------------------------------------
def test_one_confident_token_gets_at_most_its_column():
    # h = 2 wrong answers: the certain one takes the whole column, 2 · α₂, and not 1/H
    H = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    r = gtpo_rewards(torch.tensor([False, False]), H, torch.ones(2, 1, dtype=torch.bool))
    torch.testing.assert_close(r, torch.tensor([[-1.2], [-1.0]], dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_polarity_is_kept_when_a_penalty_flips_the_sign():
    charge = torch.full((4,), -0.5, dtype=torch.float64)
    weak = gtpo_rewards(CORRECT, ENTROPY, MASK, alpha1=0.3, extra=charge)
    assert (weak[MASK] < 0).all()
    A = gtpo_advantages(weak, MASK, pool="sign", correct=CORRECT)
    torch.testing.assert_close(A[:2].sum(), A.new_zeros(()), atol=1e-9, rtol=0)
    assert A[:2].any()


def test_equal_rewards_give_no_advantage_rather_than_rounding_noise():
    # a lone correct answer: every share is H/H, which in float32 is 1 only up to rounding
    entropy = torch.rand(8, 4096, generator=torch.Generator().manual_seed(0))
    mask, lone = torch.ones(8, 4096, dtype=torch.bool), torch.arange(8) == 0
    A = gtpo_advantages(gtpo_rewards(lone, entropy, mask), mask, pool="sign")
    assert A[0].abs().max() < 5e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    entropy = ENTROPY.nan_to_num(0).to(dtype)
    r = gtpo_rewards(CORRECT, entropy, MASK)
    assert r.dtype == torch.float32
    torch.testing.assert_close(r, REWARDS.float())
    assert gtpo_advantages(r.to(dtype), MASK).dtype == torch.float32


def test_a_million_tokens_agree_with_double_precision():
    generator = torch.Generator().manual_seed(1)
    entropy = torch.rand(1, 256, 4096, generator=generator, dtype=torch.float64).pow(8) * 5
    correct, mask = torch.rand(1, 256, generator=generator) > 0.5, torch.ones(1, 256, 4096, dtype=torch.bool)
    exact = gtpo_advantages(gtpo_rewards(correct, entropy, mask), mask)
    single = gtpo_advantages(gtpo_rewards(correct, entropy.float(), mask), mask)
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("longest", [0, 7])
def test_an_answer_of_16k_tokens_outlives_the_others(longest):
    """Where it is alone in its column its weight is 1; earlier columns do not depend on what follows."""
    torch.manual_seed(0)
    correct, lengths = torch.arange(8) < 4, torch.randint(1, 50, (8,))
    lengths[longest] = 16_384
    mask, entropy = torch.arange(16_384) < lengths[:, None], torch.rand(8, 16_384)
    rewards = gtpo_rewards(correct, entropy, mask)
    close(rewards[:, :50], gtpo_rewards(correct, entropy[:, :50], mask[:, :50]))
    close(rewards[longest, 50:], torch.full((16_334,), 1.1 if longest == 0 else -1.1))
    advantages = gtpo_advantages(rewards, mask)
    torch.testing.assert_close(advantages.double(), gtpo_advantages(rewards.double(), mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"correct": CORRECT[:3]}, r"correct has shape \(3,\), expected \(4,\)"),
        ({"mask": torch.ones(4, 3, dtype=torch.bool)}, r"entropy has shape \(4, 2\) and mask \(4, 3\)"),
        ({"mask": torch.ones(4, 2)}, r"expected torch.bool.*mask\.bool\(\)"),
        ({"correct": CORRECT.numpy()}, r"correct is of type ndarray.*torch.as_tensor\(correct\)"),
        ({"entropy": ENTROPY.flip(-1), "mask": MASK.flip(-1)}, "padded on the left.*Pad on the right"),
        ({"correct": torch.ones(4)}, r"reward > 0\.5"),
        *(({"entropy": 0 * ENTROPY + x}, says) for x, says in
          ((float("nan"), r"nan at live token \(0, 0\)"), (float("inf"), "inf at live token"), (-1, "never negative"))),
        ({"entropy": torch.ones(4, 2, dtype=torch.long)}, "expected a float"),
        ({"entropy": torch.ones(4)}, r"\(\*P, G, T\)"),
        ({"entropy": torch.ones(65, 2), "correct": torch.ones(65) > 0}, r"one group of 65\. .*Reshape to \(P, G, T\)"),
        ({"mask": 2 * torch.ones(4, 2, dtype=torch.long)}, "expected torch.bool"),
        ({"alpha1": -1.0}, "alpha1=-1.0"), ({"alpha2": -0.1}, "for being sure"),
        ({"alpha2": float("nan")}, "alpha2=nan"),
        ({"compare": "diagonal"}, "column, row, matrix, turn"),
        ({"average": "harmonic"}, "arithmetic, geometric"),
        ({"entropy_clip": (0.3, 0.2)}, "low <= high"),
        ({"extra": torch.zeros(3)}, "extra has shape"),
        ({"extra": [0.0, 0.0]}, "extra is of type list"),
    ],
)  # fmt: skip
def test_invalid_input(change, says):
    with pytest.raises(DewError, match=says):
        gtpo_rewards(**{"correct": CORRECT, "entropy": ENTROPY, "mask": MASK, **change})


@pytest.mark.parametrize(
    ("mask", "settings", "says"),
    [
        (MASK[:3], {}, r"and mask \(3, 2\)"),
        (MASK.float(), {}, "torch.bool"),
        (MASK, {"pool": "all"}, "group, joint, sign"),
        (MASK, {"correct": CORRECT[:2]}, "correct has shape"),
        (MASK, {"correct": CORRECT.float()}, r"correct has dtype.*reward > 0\.5"),
    ],
)
def test_invalid_rewards(mask, settings, says):
    with pytest.raises(DewError, match=says):
        gtpo_advantages(REWARDS, mask, **settings)
