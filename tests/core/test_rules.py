"""Group credits, token weights and surrogates of other papers: MaxRL, QAE, W-REINFORCE, REINFORCE++, Clip-Cov, KL-Cov,
OTB, STEER, STARE, FIPO, GEPO, CISPO, SAPO, GMPO, DPPO; and that they combine."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import oracles
from dew import DewError, Rollouts, get_algorithm
from dew.algorithms.base import Part
from dew.algorithms.credit import give_credit
from dew.credit import (
    clip_cov_mask,
    entropy_bands,
    future_weights,
    grpo_advantages,
    kl_cov_mask,
    maxrl_advantages,
    qae_advantages,
    reinforce_pp_advantages,
    steer_weights,
    token_baseline_advantages,
    w_reinforce_advantages,
)
from dew.losses import policy_loss
from groups import NAN, ONE_GROUP, batches, groups, pad, rollouts

LN = math.log
REWARDS = st.lists(st.floats(0, 2, width=32), min_size=1, max_size=16)
CREDITS = ("grpo", "maxrl", "qae", "w_reinforce", "reinforce_pp")
SURROGATES = ("clip", "cispo", "sapo", "geo_mean", "dppo_tv", "dppo_kl")


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, double(expected) if isinstance(expected, list) else expected)


# ---- group credit, worked by hand ---------------------------------------------------------------
def test_golden_maxrl():
    # 1 0 0 0: mean ¼; (1 − ¼)/¼ = 3, (0 − ¼)/¼ = −1.  Without a positive reward there is nothing to divide by.
    rewards = double([[1.0, 0, 0, 0], [0, 0, 0, 0], [-1, 0, 0, 0]])
    close(maxrl_advantages(rewards), [[3.0, -1, -1, -1], [0, 0, 0, 0], [0, 0, 0, 0]])


def test_other_or_negative_rewards_do_not_unbound_maxrl():
    """A sum of 1 − 3 · 0.3333 has mean 2.5e-5, and dividing by that would give 39,999."""
    wrong = double([0.0, -0.3333, -0.3333, -0.3333])
    rewards = double([1.0, 0, 0, 0])
    expected = [(1 - 2.5e-5) / 0.25, *[(-0.3333 - 2.5e-5) / 0.25] * 3]
    close(maxrl_advantages(rewards, extra=wrong), expected)  # over the success rate, ¼
    close(maxrl_advantages(rewards + wrong), expected)  # over the best of four, 1 / 4
    batch = rollouts(([0] * 4, [1.0, 0, 0, 0], [[1.0]] * 4), extra=wrong.tolist())
    close(get_algorithm("maxrl").advantages(batch).flatten(), expected)
    assert not maxrl_advantages(double([0.0, 0]), extra=double([0.1, 0.0])).any()  # no answer is correct


def test_golden_qae():
    # K = .4 of five answers: the second smallest reward.  0 0 0 0 1 and 0 0 1 1 1 -> 0;  0 1 1 1 1 -> 1
    # std of one in five: squares .8² + 4 · .2² = .8, over 4, √.2;  of two or three in five: √(1.2/4) = √.3
    few, many, limit = [1.0, 0, 0, 0, 0], [1.0, 1, 1, 1, 0], [1.0, 1, 1, 0, 0]
    a, b = 1 / (math.sqrt(0.2) + 1e-4), 1 / (math.sqrt(0.3) + 1e-4)
    close(qae_advantages(double([few, many, limit])), [[a, 0, 0, 0, 0], [0, 0, 0, 0, -a], [b, b, b, 0, 0]])
    close(qae_advantages(double(limit), quantile=0.5), [0.0, 0, 0, -b, -b])  # the third smallest, 1
    close(qae_advantages(double([1.0, 0])), [1 / (math.sqrt(0.5) + 1e-4), 0.0])
    assert not qae_advantages(double([1.0, 0]), torch.zeros(2).bool()).any()  # nobody is there

    batch = rollouts(([0] * 5, limit, [[1.0]] * 5))
    close(get_algorithm("qae", quantile=0.5).advantages(batch).flatten(), [0.0, 0, 0, -b, -b])


def test_golden_w_reinforce():
    assert w_reinforce_advantages(torch.tensor([True, False])).tolist() == pytest.approx([0.1, -1])
    one = torch.tensor([True, False])
    assert w_reinforce_advantages(one, one, positive=0.5).tolist() == [0.5, 0]  # the second is absent
    # other rewards are added before the weight: .1 · (1 + .5), −1 − .2
    batch = rollouts(([0, 0], [1.0, 0.0], [[1.0], [1.0]]), extra=[0.5, -0.2])
    assert get_algorithm("w_reinforce").advantages(batch).flatten().tolist() == pytest.approx([0.15, -1.2])


def test_golden_reinforce_pp():
    # two groups: 1 0 -> ½ −½ on 2 and 1 tokens; 1 1 -> 0 0 on 1 and 1.  ½ ½ −½ 0 0: mean .1,
    # squares .16 + .16 + .36 + .01 + .01 = .7, over 4, std √.175
    mask = torch.tensor([[[1, 1], [1, 0]], [[1, 0], [1, 0]]]).bool()
    s = math.sqrt(0.175) + 1e-4
    A = reinforce_pp_advantages(double([[1.0, 0], [1, 1]]), mask)
    close(A, [[[0.4 / s, 0.4 / s], [-0.6 / s, 0]], [[-0.1 / s, 0], [-0.1 / s, 0]]])


# ---- token weights, worked by hand --------------------------------------------------------------
#   A − 0 = 1 1 −1 −1, log π + 3 = 2 −2 2 −2: covariances 2 −2 −2 2
COV_A, COV_LOGP = double([[1.0, 1], [-1, -1]]), double([[-1.0, -5], [-1, -5]])
EVERY = torch.ones(2, 2).bool()


def test_golden_clip_cov():
    chosen = clip_cov_mask(COV_A, COV_LOGP, EVERY.long().T, share=1.0)  # whole numbers, not contiguous
    assert chosen.dtype == torch.bool and chosen.tolist() == [[True, False], [False, True]]
    one = clip_cov_mask(COV_A, COV_LOGP, EVERY, share=1e-9)  # at least one, drawn from these two
    assert one.sum() == 1 and (one & chosen).sum() == 1
    assert not clip_cov_mask(COV_A, COV_LOGP, EVERY, share=1.0, high=2.0).any()  # 2 < 2 is false
    assert not clip_cov_mask(COV_A, COV_LOGP, EVERY, share=1.0, low=2.0).any()


def test_golden_kl_cov():
    logp = COV_LOGP + double([[0.0, 0], [0, -4]])  # −1 −5 −1 −9, mean −4: covariances 3 −1 −3 5
    assert kl_cov_mask(COV_A, logp, EVERY, share=0.25).tolist() == [[False, False], [False, True]]
    assert kl_cov_mask(COV_A, logp, EVERY, share=0.5).tolist() == [[True, False], [False, True]]
    assert kl_cov_mask(COV_A, logp, EVERY, share=1e-9).sum() == 1


def test_golden_otb():
    # answer 1: π = ½, Σπ² = ½ -> 1 − 1 + ½ = ½; π = 1 adds 0.  answer 2: π = Σπ² = ¼ -> 1 − ½ + ¼ = ¾
    # B₁ = (1 · ½ + 0 · ¾) / 1¼ = .4;  at the second position answer 1 is alone: B = 0
    logp, mask = pad([[LN(0.5), 0.0], [LN(0.25)]])
    A = token_baseline_advantages(double([1.0, 0]), logp, logp.exp(), mask)
    torch.testing.assert_close(A, double([[0.6, 1.0], [-0.4, 0]]), rtol=0, atol=1e-7)
    batched = token_baseline_advantages(double([[1.0, 0]]), logp[None], logp.exp()[None], mask[None])
    torch.testing.assert_close(batched[0], A)
    # Σπ² of a certain token, rounded to less than 1: 1 − 2 + .99 counts as 0, B = 0
    squares = double([[0.99], [0.25]])
    certain = token_baseline_advantages(double([1.0, 0]), double([[0.0], [LN(0.25)]]), squares, torch.ones(2, 1).bool())
    close(certain, [[1.0], [0.0]])
    # a third answer, with reward ½ and the second token at π = Σπ² = ½: W = ½, 1.  B₂ = (1 · ½ + ½ · 1) / 1½ = ⅔
    logp, mask = pad([[LN(0.5), 0.0], [LN(0.25)], [LN(0.5), LN(0.5)]])
    A = token_baseline_advantages(double([1.0, 0, 0.5]), logp, logp.exp(), mask)
    torch.testing.assert_close(A[:, 1], double([1 / 3, 0, 0.5 - 2 / 3]), rtol=0, atol=1e-7)
    apart = [torch.cat([x[:, :1], torch.full_like(x[:, :1], NAN), x[:, 1:]], 1) for x in (logp, logp.exp())]
    seen = torch.cat([mask[:, :1], ~mask[:, :1], mask[:, 1:]], 1)  # tool output between them adds nothing
    torch.testing.assert_close(token_baseline_advantages(double([1.0, 0, 0.5]), *apart, seen)[:, ::2], A)


def test_otb_gives_groups_of_equal_rewards_nothing():
    """Not even the end of the longest answer, whose baseline is 0. A group may have fewer answers than others."""
    found = get_algorithm("otb").advantages(rollouts(([0, 0, 1, 1, 1], [1.0, 1, 1, 0, 0], [[1.0, 2.0], *[[1.0]] * 4])))
    assert not found[0].any() and found[1].any()
    paid = get_algorithm("otb").advantages(rollouts(([0, 0], [1.0, 1.0], [[1.0], [1.0]]), extra=[0.5, 0.0]))
    assert paid[0, 0, 0] > 0 > paid[0, 1, 0]
    assert get_algorithm("otb").advantages(rollouts(([0, 0], [1.0, 0.0], [[1.0, 2.0], [1.0]]))).all(-1)[0, 0]


def test_golden_steer():
    # H = log 2.  π = ½: log π + H = 0, weight 1.  π = ¼: ¾ · −log 2; with A = 2 the largest: .8; with A = −1 half: √.8
    logp, mask = pad([[LN(0.5), LN(0.25)], [LN(0.25)]])
    H, A = torch.full_like(logp, LN(2)), double([[1.0, 2], [-1, 0]])
    close(steer_weights(A, logp, H, mask), [[1.0, 0.8], [math.sqrt(0.8), 0]])
    # the largest |Ω| is 1e-3 · ¾ log 2, below .02: its weight is .8 ^ (Ω / .02)
    close(steer_weights(1e-3 * A / 2, logp, H, mask)[0, 1], double(0.8 ** (1e-3 * 0.75 * LN(2) / 0.02)))


def test_steer_does_not_let_one_token_set_the_scale():
    """A token at log π = −1,000 counts as π = 1e-8: the others' weights stay as far from 1 as with log π = −20."""
    H, one = torch.full((1, 2), LN(2)), torch.ones(1, 2)
    far, near = (steer_weights(one, torch.tensor([[LN(0.25), x]]), H, one.bool()) for x in (-1000.0, -20.0))
    close(far, near)  # k = −log .8 / (log 1e8 − log 2); the first token: ¾ · (log 4 − log 2)
    assert far[0, 0].item() == pytest.approx(0.8 ** (0.75 * LN(2) / (LN(1e8) - LN(2))))


def test_golden_stare():
    # ✓ 4 tokens, of which ⌈.3 · 4⌉ = 2 are the least likely: log π = −3, −2; ✗ 2, of which one: −4
    logp, mask = pad([[-1, -3], [-2, -1], [-4], [-1]])
    H = torch.where(mask, 0.25, logp)
    made = Rollouts(mask=mask[None], reward=double([[1.0, 1, 0, 0]]), entropy=H[None], logp=logp[None])
    plain = get_algorithm("dapo").advantages(made)
    both = {"share": 0.3, "positive_weight": 1.5, "negative_weight": 0.5}
    A = get_algorithm("stare", **both).advantages(made)
    close(A / torch.where(mask, plain, 1), [[[1.0, 1.5], [1.5, 1], [0.5, 0], [1, 0]]])
    close(get_algorithm("stare", share=0.3).advantages(made)[0, :3, 0] / plain[0, :3, 0], [1.0, 1.1, 1.0])
    # tokens without advantage do not count, however unlikely
    unlikely = {"entropy": H, "logp": logp - 9}
    more = {name: torch.stack([getattr(made, name)[0], x]) for name, x in unlikely.items()}
    both_groups = Rollouts(mask=mask.expand(2, -1, -1), reward=double([[1.0, 1, 0, 0], [1, 1, 1, 1]]), **more)
    close(get_algorithm("stare", **both).advantages(both_groups)[0], A[0])
    # rounding may give a log-probability above 0, which counts as 0
    rounded = replace(made, logp=torch.where(logp == -1, 0.03, logp)[None])
    close(get_algorithm("stare", **both).advantages(rounded), A)
    # the gate: off while the mean entropy, ¼, is not below the target
    assert get_algorithm("stare", **both, target_entropy=0.25).advantages(made).equal(plain)


def test_golden_gepo():
    # H of the groups: 1, 2, (8 + 4)/2 = 6: μ = 3, σ = √((4 + 1 + 9)/2) = 2.65; low below 2.47, high above 3.79
    logp = double([[[-1.0, -1], [-1, NAN]], [[-2, NAN], [-2, NAN]], [[-8, NAN], [-4, NAN]]])
    mask = ~logp.isnan()
    assert [x.tolist() for x in entropy_bands(logp, mask.long())] == [[True, True, False], [False, False, True]]
    # 1σ below is .35, 2σ above is 8.3
    assert [x.tolist() for x in entropy_bands(logp, mask, low=1.0, high=2.0)] == [[False] * 3, [False] * 3]
    for one in (logp[0], logp[:1]):  # a single group has nothing to be compared with
        assert [x.tolist() for x in entropy_bands(one, ~one.isnan())] in ([False] * 2, [[False]] * 2)
    assert not torch.stack(entropy_bands(logp[:2], mask[:2], low=0.8, high=0.8)).any()  # 1, 2: σ = √½, .8 σ = .57 > .5
    # 0 0 2.2 4: μ = 1.55, σ = √(11.23/3) = 1.93; high above 2.13
    assert entropy_bands(-double([0, 0, 2.2, 4]).view(4, 1, 1), torch.ones(4, 1, 1).bool())[1].sum() == 2
    made = Rollouts(mask=mask, reward=double([[1.0, 0], [0, 1], [1, 0]]), logp=logp)
    scale = get_algorithm("gepo").advantages(made) / torch.where(mask, get_algorithm("grpo").advantages(made), 1)
    close(scale[..., 0], [[0.5, 1.0], [1.0, 0.5], [1.0, 0.2]])
    scale = get_algorithm("gepo", low_weight=0.1, high_band=2.0).advantages(made)
    close(scale[..., 0].abs() / scale[2, 0, 0], [[0.1, 1.0], [1.0, 0.1], [1.0, 1.0]])


def test_golden_fipo():
    # γ = ½: F₃ = .4, F₂ = −.1 + .2 = .1, F₁ = .02 + .05 = .07; 1.49 is cut to 1.2
    log_w, mask = pad([[0.02, -0.1, 0.4], [-0.3]])
    A = torch.ones_like(log_w)
    close(future_weights(log_w, A, mask, half_life=1.0), [[math.exp(0.07), math.exp(0.1), 1.2], [1, 1, 1]])
    close(future_weights(log_w, A, mask, half_life=1.0, low=0.8)[1], [0.8, 1.0, 1.0])
    close(future_weights(log_w / 9, A, mask), future_weights(log_w / 9, A, mask.long(), half_life=32.0))
    # a ratio above 10 does not count for anyone; above 4 it is unsafe in a wrong answer, where weights are at most 1
    log_w = double([[0.1, LN(11)], [0.1, LN(5)], [0.1, LN(3)], [0.1, LN(5)]])
    A = double([[1.0, 1], [-1, -1], [-1, -1], [0.5, 0.5]])
    f = future_weights(log_w, A, torch.ones(4, 2).bool(), half_life=1.0)
    close(f, [[math.exp(0.1), 1.0], [1.2, 1.0], [1.2, 1.2], [1.2, 1.2]])
    # there, F = log 5 + ½ log .01 = −.69: at least .8
    log_w = double([[LN(5), LN(0.01)]])
    assert future_weights(log_w, double([[-1.0, -1]]), EVERY[:1], half_life=1.0, low=0.1)[0, 0] == 0.8


def test_fipo_weights_the_advantage_in_its_loss():
    # log w = .1 and −.05: F = .1 − .05 · 2^(−1/32), −.05; w f with A = 1
    part = Part(mask=torch.ones(2, 2).bool(), old_logp=torch.tensor([[-1.0, -2.0]] * 2))
    logp = torch.tensor([[0.1, -0.05]] * 2) + part.old_logp
    first = math.exp(0.1 - 0.05 * 2 ** (-1 / 32))
    for settings, low in (({}, 1.0), ({"least_weight": 0.9}, math.exp(-0.05))):
        loss, _ = get_algorithm("fipo", **settings).loss(logp, part, torch.tensor([1.0, 2.0]))
        assert loss.item() == pytest.approx(-3 * (math.exp(0.1) * first + math.exp(-0.05) * low) / 4, rel=1e-5)
    loss, _ = get_algorithm("fipo", half_life=1.0, most_weight=1.01).loss(logp, part, torch.ones(2, 2), count=2)
    assert loss.item() == pytest.approx(-(math.exp(0.1) * 1.01 + math.exp(-0.05)))


# ---- surrogates, worked by hand -----------------------------------------------------------------
#   row 1: w = 2, ½ with A = 1    row 2: w = 1 with A = −1    clip 0.2 / 0.28, as in test_losses
LOGP, MASK = pad([[LN(2), LN(0.5)], [0.0]])
OLD, ADVANTAGES = torch.zeros_like(LOGP), double([1.0, -1.0])


def value_and_gradient(**settings):
    leaf = LOGP.nan_to_num(0).requires_grad_()
    value, _ = policy_loss(leaf, OLD, ADVANTAGES, MASK, **settings)
    value.backward()
    return value.item(), leaf.grad[MASK].tolist()


def test_golden_cispo():
    # weights 1.28, .8 | 1: −(1.28 · log 2 + .8 · log ½ − 1 · 0)/3; the gradient is −weight · A, also beyond the bounds
    value, gradient = value_and_gradient(surrogate="cispo")
    assert value == pytest.approx(-(1.28 - 0.8) * LN(2) / 3)
    assert gradient == pytest.approx([-1.28 / 3, -0.8 / 3, 1 / 3])


def test_golden_sapo():
    # A > 0: 4 σ(1), 4 σ(−½) | A < 0, τ = 1.05: 4/1.05 · σ(0).  gradient: −4 σ(1 − σ) · w · A
    def sigma(x):
        return 1 / (1 + math.exp(-x))

    value, gradient = value_and_gradient(surrogate="sapo")
    assert value == pytest.approx(-(4 * sigma(1) + 4 * sigma(-0.5) - 2 / 1.05) / 3)
    slopes = [4 * sigma(x) * (1 - sigma(x)) for x in (1, -0.5, 0)]
    assert gradient == pytest.approx([-slopes[0] * 2 / 3, -slopes[1] * 0.5 / 3, slopes[2] / 3])
    hot, _ = value_and_gradient(surrogate="sapo", tau_pos=2.0, tau_neg=4.0)
    assert value_and_gradient(surrogate="sapo", tau_neg=0.5)[0] > value
    assert hot == pytest.approx(-(2 * sigma(2) + 2 * sigma(-1) - 0.5) / 3)


def test_golden_geo_mean():
    # row 1: log 2 -> .28, log ½ stays: ŵ = exp((.28 − log 2)/2) at both tokens, gradient −ŵ/3 at the second alone
    # row 2: log w = 0: 1
    value, gradient = value_and_gradient(surrogate="geo_mean")
    w = math.exp((0.28 - LN(2)) / 2)
    assert value == pytest.approx(-(2 * w - 1) / 3)
    assert gradient == pytest.approx([0, -w / 3, 1 / 3])
    # A < 0: log ½ -> −.2 and log 2 stays
    leaf = LOGP.nan_to_num(0).requires_grad_()
    policy_loss(leaf, OLD, -ADVANTAGES, MASK, surrogate="geo_mean")[0].backward()
    w = math.exp((LN(2) - 0.2) / 2)
    assert leaf.grad[MASK].tolist() == pytest.approx([w / 3, 0, -1 / 3])


@pytest.mark.parametrize(("surrogate", "bound", "wide"), [("dppo_tv", 0.15, 0.25), ("dppo_kl", 0.05, 0.1)])
def test_golden_dppo(surrogate, bound, wide):
    # π_old = ½.  A > 0: .7 rose by .2 (KL ½ log 5/7 + ½ log 5/3 = .087), .6 by .1 (.020), .3 fell: allowed
    #             A < 0: .3 fell by .2, .4 by .1, .7 rose: allowed
    p, A = double([[0.7, 0.6, 0.3, 0.3, 0.4, 0.7]]), double([[1.0, 1, 1, -1, -1, -1]])
    ones, old = torch.ones(1, 6).bool(), torch.full((1, 6), LN(0.5)).double()
    kept = [0, 1, 1, 0, 1, 1]
    for low, high in ((bound, bound), (wide, bound), (bound, wide)):
        leaf = p.log().requires_grad_()
        settings = {"surrogate": surrogate, "clip_low": low, "clip_high": high}
        value, stats = policy_loss(leaf, old, A, ones, **settings)
        value.backward()
        valid = double([1.0 if high == wide else 0, *kept[1:3], 1.0 if low == wide else 0, *kept[4:]])
        close(leaf.grad[0], -2 * p[0] * A[0] * valid / 6)
        close(value.detach(), -(2 * p * A * p.log() * valid).mean())
        assert stats["clip/high"].item() == pytest.approx((high == bound) / 6)
        assert stats["clip/low"].item() == pytest.approx((low == bound) / 6)
    certain = torch.tensor([[1e-6]])  # log π of a certain token, rounded: it has not moved
    one = policy_loss(certain, torch.zeros(1, 1), torch.ones(1, 1), ones[:, :1], surrogate=surrogate)[1]
    assert one["clip/high"] == 0 and one["clip/low"] == 0


def test_golden_penalty():
    # ½ · |log 2| on the first token, 2 · |log ½| on the second; both are multiplied by the sampler's correction
    penalty = double([[0.5, 2.0], [0.0, float("nan")]])
    plain, _ = value_and_gradient()
    assert value_and_gradient(penalty=penalty)[0] == pytest.approx(plain + 2.5 * LN(2) / 3)
    half = torch.full((2, 1), 0.5, dtype=torch.float64)
    assert value_and_gradient(penalty=penalty, weight=half)[0] == pytest.approx((plain + 2.5 * LN(2) / 3) / 2)


def test_rounding_has_no_penalty():
    """The gradient of |log w| is ±1 however small log w is: two passes of one policy would train on their rounding."""
    old = torch.tensor([[-1.0, -2.0, -3.0]])
    logp = (old + torch.tensor([[1e-7, -0.004, 0.01]])).requires_grad_()
    zero, ones = torch.zeros(1, 3), torch.ones(1, 3)
    policy_loss(logp, old, zero, ones.bool(), penalty=ones)[0].backward()
    assert logp.grad.tolist() == [[0.0, 0.0, pytest.approx(1 / 3)]]


def test_clip_cov_clips_at_the_authors_bounds():
    """Both are 1: a ratio of 1.9 still trains, one of 2.1 does not; and none is too small."""
    rule, old = get_algorithm("clip_cov"), torch.zeros(1, 3)
    logp = torch.tensor([[1.9, 2.1, 0.01]]).log().requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -1.0]])
    rule.loss(logp, Part(mask=torch.ones(1, 3).bool(), old_logp=old), advantages)[0].backward()
    assert (logp.grad != 0).tolist() == [[True, False, True]]


def test_clip_statistics_are_those_of_the_surrogate():
    logps = (LOGP - 1, OLD - 1)  # π = .74, up from .37, is too much for all of them
    shares = {s: policy_loss(*logps, ADVANTAGES, MASK, surrogate=s)[1]["clip/high"].item() for s in SURROGATES}
    assert shares == pytest.approx({**dict.fromkeys(SURROGATES, 1 / 3), "sapo": 0})


# ---- oracles ------------------------------------------------------------------------------------
@given(st.integers(1, 40), st.floats(0.5, 64), st.integers(0, 99))
def test_future_weights_match_the_loops(T, half_life, seed):
    log_w = 0.05 * torch.randn(T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    one = torch.ones(1, 1, T)
    f = future_weights(log_w.view(1, 1, T), one, one.bool(), half_life=half_life, low=1e-9, high=1e9)
    for t in range(T):
        F = sum(2 ** (-(k - t) / half_life) * log_w[k].item() for k in range(t, T))
        assert f[0, 0, t].item() == pytest.approx(math.exp(F))


@given(groups(max_size=6), st.lists(st.floats(-1, 2, width=32), min_size=6, max_size=6))
def test_otb_matches_the_loops(group, rewards):
    _, rows = group
    rewards = rewards[: len(rows)]
    logp = [[-h for h in row] for row in rows]
    squares = [[math.exp(-0.5 * h) for h in row] for row in rows]
    expected = oracles.token_baseline(rewards, logp, squares)
    (lp, mask), (sq, _) = pad(logp), pad(squares)
    actual = token_baseline_advantages(double(rewards), lp, sq, mask)
    for row, wanted in zip(actual, expected, strict=True):
        assert row[: len(wanted)].tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@given(groups(max_size=6, mixed=True), st.floats(0.01, 1))
def test_covariances_match_the_loops(group, share):
    correct, rows = group
    credit = [[1.0 if won else -0.5 for _ in row] for won, row in zip(correct, rows, strict=True)]
    (A, mask), (logp, _) = pad(credit), pad([[-h for h in row] for row in rows])
    cov = oracles.covariances(credit, [[-h for h in row] for row in rows])
    top = sorted(cov, reverse=True)[: max(1, int(share * len(cov) + 1e-9))]
    chosen = kl_cov_mask(A, logp, mask, share=share)[mask].tolist()
    assert sorted((c for c, k in zip(cov, chosen, strict=True) if k), reverse=True) == pytest.approx(top, abs=1e-9)
    inside = [1 < c < 5 for c in cov]
    drawn = clip_cov_mask(A, logp, mask, share=share)[mask].tolist()
    assert sum(drawn) == min(len(top), sum(inside)) and all(i for i, d in zip(inside, drawn, strict=True) if d)


# ---- properties ---------------------------------------------------------------------------------
@given(REWARDS)
def test_absent_answers_are_never_read(rewards):
    r, present = double([*rewards, float("nan")]), torch.tensor([True] * len(rewards) + [False])
    mask = torch.ones(len(r), 2).bool()
    by_token = lambda r, p=None: reinforce_pp_advantages(r, mask[: len(r)], p)  # noqa: E731
    for credit in (grpo_advantages, maxrl_advantages, qae_advantages, by_token):
        torch.testing.assert_close(credit(r, present)[:-1], credit(r[:-1]))
        assert not credit(r, present)[-1].any()


@given(st.integers(0, 8), st.integers(1, 8))
def test_maxrl_is_grpos_direction_and_sums_to_zero(n, m):
    r = double([1.0] * n + [0.0] * m)
    A = maxrl_advantages(r)
    assert abs(A.sum().item()) < 1e-9
    torch.testing.assert_close(A * n / (n + m), grpo_advantages(r, scale=False))


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0.05, 0.95))
def test_qae_trains_one_side_only(n, m, quantile):
    """Correct answers if their share is at most 1 − K, else wrong ones."""
    A = qae_advantages(double([1.0] * n + [0.0] * m), quantile=quantile)
    if abs(n / (n + m) - (1 - quantile)) < 1e-4:
        return
    hard = n / (n + m) < 1 - quantile
    assert (A[:n] > 0).all() == hard and (A[n:] < 0).all() == (not hard)
    assert not A[n:].any() if hard else not A[:n].any()


@given(batches())
def test_token_rules_never_flip_a_sign(batch):
    grouped = rollouts(batch)
    plain = get_algorithm("dapo").advantages(grouped)
    for name in ("clip_cov", "steer"):
        A = get_algorithm(name).advantages(grouped)
        assert (A * plain >= 0).all() and (A.abs() <= plain.abs() + 1e-12).all()
    assert ((get_algorithm("steer").advantages(grouped).abs() >= 0.8 * plain.abs() - 1e-9) | ~grouped.mask).all()
    assert (get_algorithm("stare", negative_weight=0.5).advantages(grouped) * plain >= 0).all()
    assert (get_algorithm("gepo").advantages(grouped) * plain >= 0).all()
    A = get_algorithm("otb").advantages(grouped)
    won = (grouped.reward > 0.5)[..., None] & grouped.mask
    assert (A[won] >= -1e-6).all() and (A[~won] <= 1e-6).all()


TIED = (  # two tokens share the largest covariance, up to the rounding of the means
    [3, 3, 0, 0, 0, 2, 1, 0, 0, 4, 1, 3, 0, 0, 1, 1, 2, 3, 0],
    [0.0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 1],
    [[0.0], [0, 0, 0, 1.5], [0, 1.75, 1, 3, 5], [2.25, 0, 0, 3], [0, 0], [0, 1.25, 1.75, 0], [3.8125, 0, 1, 5, 5],
     [5, 5], [5, 2], [1, 2.25, 2.25, 5, 2.220446049250313e-16], [0, 0], [1.75, 0, 1.75, 4, 0], [5], [5], [0], [0], [0],
     [0, 0, 0, 0], [4, 0, 5]],
)  # fmt: skip


@example(TIED, "kl_cov")
@given(batches(), st.sampled_from(["clip_cov", "kl_cov", "steer", "otb", "stare", "gepo"]))
def test_padding_does_not_matter(batch, name):
    """Wider rows with NaN beyond the mask give the same credit and penalties."""
    narrow, algorithm = rollouts(batch), get_algorithm(name)
    wide = {
        key: torch.cat([x, torch.full_like(x, float("nan"))], -1)
        for key in ("entropy", "logp", "sum_sq")
        if (x := getattr(narrow, key)) is not None
    }
    mask = torch.cat([narrow.mask, torch.zeros_like(narrow.mask)], -1)
    other = Rollouts(mask=mask, reward=narrow.reward, rows=narrow.rows, **wide)
    T = narrow.mask.shape[-1]
    one, two = algorithm.advantages(narrow), algorithm.advantages(other)
    torch.testing.assert_close(two[..., :T], one)
    assert not two[..., T:].any()
    if algorithm.penalises:
        torch.testing.assert_close(algorithm.penalties(other, two)[..., :T], algorithm.penalties(narrow, one))


@given(batches())
def test_kl_cov_penalises_the_chosen_tokens_and_keeps_dapos_advantages(batch):
    grouped, algorithm = rollouts(batch), get_algorithm("kl_cov", cov_coef=3.0, cov_share=0.2)
    credit = give_credit(algorithm, grouped)
    assert credit.advantages.equal(get_algorithm("dapo").advantages(grouped))
    penalty = credit.penalty
    live = int(grouped.mask.sum())
    assert (penalty > 0).sum() == max(1, int(0.2 * live + 1e-9)) and penalty.sum() == 3 * (penalty > 0).sum()
    assert not penalty[~grouped.mask].any()


def test_statistics_are_those_of_the_whole_batch():
    """Two groups together choose other tokens, weights and scales than each alone."""
    rows = [[0.2, 3.0, 1.0], [0.1, 2.0, 4.0], [0.3, 0.1, 0.2], [5.0, 0.4, 0.1]]
    both, rewards = rollouts(([0, 0, 1, 1], [1.0, 0, 1, 0], rows)), [1.0, 0.0]
    alone = [rollouts(([0, 0], rewards, part)) for part in (rows[:2], rows[2:])]
    for name, settings in (("steer", {}), ("kl_cov", {"cov_share": 0.3})):
        algorithm = get_algorithm(name, **settings)

        def found(batch, algorithm=algorithm):
            A = algorithm.advantages(batch)
            return algorithm.penalties(batch, A) if algorithm.penalises else A

        assert not torch.allclose(found(both), torch.cat([found(batch) for batch in alone]), rtol=1e-6)
    uneven = rollouts(([0, 0, 0, 1, 1], [1.0, 0, 0, 1, 0], [*rows, [1.0]]))
    dr = get_algorithm("dr_grpo").advantages(uneven)
    A = get_algorithm("reinforce_pp").advantages(uneven)
    assert A[uneven.mask].mean().abs() < 1e-9 and A[uneven.mask].std().item() == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(A[uneven.mask] - A[0, 0, 0], (dr[uneven.mask] - dr[0, 0, 0]) * (A[0, 0, 0] - A[0, 1, 0]))


def test_the_draw_of_clip_cov_is_the_same_in_every_process():
    g = torch.Generator().manual_seed(0)
    A, logp = torch.randn(2, 64, 50, generator=g)
    mask = torch.rand(64, 50, generator=g) < 0.8
    draws = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        draws.append(clip_cov_mask(A, -logp.abs() * 4, mask, share=0.01))
        assert torch.initial_seed() == seed
    assert draws[0].equal(draws[1]) and draws[0].sum() == int(0.01 * mask.sum())
    order = torch.randperm(64, generator=g)
    assert clip_cov_mask(A[order], -logp[order].abs() * 4, mask[order], share=0.01).equal(draws[0][order])
    wide = [torch.cat([x] * 4) for x in (A, -logp.abs() * 4, mask)]  # by default 2 in 10,000 tokens
    assert [of(*wide).sum() for of in (clip_cov_mask, kl_cov_mask)] == [int(2e-4 * wide[2].sum())] * 2 == [2, 2]


@given(st.integers(0, 1000))
def test_on_policy_all_surrogates_and_ratios_have_the_same_gradient(seed):
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(3, 4, generator=g, dtype=torch.float64)
    A = torch.randn(3, 1, generator=g, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]]).bool()
    gradients = []
    for ratio, surrogate in product(("token", "sequence_mean", "sequence_geometric"), SURROGATES):
        leaf = logp.clone().requires_grad_()
        settings = {"ratio": ratio, "surrogate": surrogate, "reduce": "sequences"}
        policy_loss(leaf, logp, A.expand(3, 4), mask, **settings)[0].backward()
        gradients.append(leaf.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


# ---- combinations and refusals ------------------------------------------------------------------
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("credit", CREDITS)
@pytest.mark.parametrize("name", ["dapo", "forking_tokens", "steer", "clip_cov"])
def test_every_combination_can_be_written(name, credit, surrogate):
    """Group credit x token weight x loss."""
    batch, algorithm = rollouts(ONE_GROUP), get_algorithm(name, credit=credit, surrogate=surrogate)
    A = batch.to_rows(algorithm.advantages(batch))
    plain = batch.to_rows(get_algorithm(name).advantages(batch))
    assert A.isfinite().all() and A.any() and (A * plain >= 0).all()
    part = Part(mask=batch.to_rows(batch.mask), old_logp=batch.to_rows(batch.logp).nan_to_num(0))
    loss, _ = algorithm.loss(part.old_logp + 0.5, part, A)
    bounds = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    expected, _ = policy_loss(part.old_logp + 0.5, part.old_logp, A, part.mask, surrogate=surrogate, **bounds)
    torch.testing.assert_close(loss, expected)


def test_penalties_are_part_of_the_algorithms_loss():
    # w = 2 everywhere, A = 1, no clip: −2, and 3 · log 2 on one of two tokens
    part = Part(mask=torch.ones(1, 2).bool(), old_logp=torch.zeros(1, 2), penalty=torch.tensor([[3.0, 0.0]]))
    loss, _ = get_algorithm("kl_cov").loss(torch.full((1, 2), LN(2)), part, torch.ones(1, 2))
    assert loss.item() == pytest.approx(-2 + 3 * LN(2) / 2)


CHANGES = [("forking_tokens", {"keep": 0.9}), ("clip_cov", {"cov_share": 0.9}), ("clip_cov", {"cov_high": 2.0}),
           ("steer", {"least_weight": 0.5}), ("stare", {"share": 0.9}), ("qae", {"quantile": 0.8}),
           ("w_reinforce", {"positive": 0.5}), ("gepo", {"low_band": 3.0}), ("gepo", {"high_band": 3.0})]  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), CHANGES)
def test_settings_change_the_credit(name, settings):
    rows = [[0.1, 0.05], [0.02], [0.1], [0.2, 0.1], [3.0, 0.1], [2.0, 1.0], [4.0], [3.0]]
    batch = rollouts(([0] * 4 + [1] * 4, [1.0, 0, 0, 0, 1, 1, 1, 0], rows))
    one, other = get_algorithm(name), get_algorithm(name, **settings)
    if name == "stare":
        one, other = (replace(x, target_entropy=9.0) for x in (one, other))
    assert not one.advantages(batch).equal(other.advantages(batch))


def test_values_at_the_bounds_are_allowed():
    for name, settings in (
        ("entropy_advantage", {"alpha": 0}), ("kl_cov", {"cov_coef": 0}), ("stare", {"positive_weight": 0.5}),
        ("gepo", {"low_band": 0, "high_band": 0}),
        ("dapo", {"clip_high": 0, "max_rounds": 1, "tau_neg": 0.5}),
    ):  # fmt: skip
        get_algorithm(name, **settings)


@pytest.mark.parametrize("name", ["gtpo", "grpo_s", "gspo"])
def test_the_surrogate_is_a_setting_of_every_algorithm(name):
    part = Part(mask=torch.ones(1, 2).bool(), old_logp=torch.zeros(1, 2))
    ones = torch.ones(1, 2)
    loss = get_algorithm(name, surrogate="cispo", clip_low=1.0, clip_high=9.0).loss(ones * LN(2), part, ones)[0]
    assert loss.item() == pytest.approx(-2 * LN(2))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: clip_cov_mask(COV_A[:1], COV_LOGP, EVERY), r"advantages has shape \(1, 2\)"),
        (lambda: clip_cov_mask(COV_A, COV_LOGP[:1], EVERY), "logp has shape"),
        (lambda: kl_cov_mask(COV_A, COV_LOGP, EVERY, share=2.0), "cov_share=2.0"),
        (lambda: clip_cov_mask(COV_A, COV_LOGP, EVERY, low=5.0), "low < high"),
        (lambda: steer_weights(COV_A, COV_LOGP, COV_A.abs(), EVERY, least=0), "least=0"),
        (lambda: steer_weights(COV_A, COV_LOGP, COV_A.abs(), EVERY, least=1.5), "least=1.5"),
        (lambda: steer_weights(COV_A[:1], COV_LOGP, COV_A.abs(), EVERY), "advantages has shape"),
        (lambda: steer_weights(COV_A, COV_LOGP[:1], COV_A.abs(), EVERY), "logp has shape"),
        (lambda: token_baseline_advantages(double([1.0]), COV_LOGP, COV_LOGP, EVERY), "rewards has shape"),
        (lambda: token_baseline_advantages(double([1.0, 0]), COV_LOGP[:1], COV_LOGP, EVERY), "logp has shape"),
        (lambda: token_baseline_advantages(double([1.0, 0]), COV_LOGP, COV_LOGP[:1], EVERY), "sum_sq has shape"),
        (lambda: token_baseline_advantages(double([1.0, 0]), COV_LOGP, COV_LOGP, EVERY.triu().flip(0)), "on the left"),
        (lambda: entropy_bands(COV_LOGP[:1], EVERY), "logp has shape"),
        (lambda: future_weights(COV_LOGP[:1], COV_A, EVERY), "log_w has shape"),
        (lambda: future_weights(COV_LOGP, COV_A[:1], EVERY), "advantages has shape"),
        (lambda: maxrl_advantages(double([[1.0, 0]]), extra=double([1.0, 0])), "extra has shape"),
        (lambda: maxrl_advantages(double([1.0, 0]), extra=double([1.0, NAN])), "reward is nan"),
        (lambda: qae_advantages(double([1.0]), quantile=0), "quantile=0"),
        (lambda: qae_advantages(double([1.0]), quantile=1.0), "quantile=1.0"),
        (lambda: w_reinforce_advantages(double([1.0])), "torch.bool"),
        (lambda: w_reinforce_advantages(torch.tensor([True]), positive=-1), "positive=-1"),
        (lambda: policy_loss(LOGP, OLD, ADVANTAGES, MASK, surrogate="ppo"), "clip, cispo, sapo"),
        (lambda: policy_loss(LOGP, OLD, ADVANTAGES, MASK, tau_pos=0), "above 0"),
        (
            lambda: get_algorithm("kl_cov").loss(LOGP, Part(mask=MASK, old_logp=OLD), ADVANTAGES),
            "kl_cov needs penalty=",
        ),
    ],
)
def test_invalid_input(call, says):
    with pytest.raises(DewError, match=says):
        call()
