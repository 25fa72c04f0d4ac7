import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from dew import DewError
from dew.losses import UNBOUNDED, policy_loss
from groups import pad

RATIO = st.sampled_from(["token", "sequence_mean", "sequence_geometric"])
REDUCE = st.sampled_from(["tokens", "sequences"])
LN = math.log


@st.composite
def batches(draw):
    """Ragged (logp, old_logp, advantages per token)."""
    value = st.floats(-3, 0, width=32)
    credit = st.floats(-2, 2, width=32)
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    return tuple([draw(st.lists(kind, min_size=n, max_size=n)) for n in lengths] for kind in (value, value, credit))


def tensors(batch):
    (logp, mask), (old, _), (A, _) = (pad(rows) for rows in batch)
    return logp, old, A, mask


# ---- golden: worked by hand -------------------------------------------------------------------
#   row 1: w = 2, ½ with A = 1    row 2: w = 1 with A = −1    clip 0.2 / 0.28
LOGP, MASK = pad([[LN(2), LN(0.5)], [0.0]])
OLD, ADVANTAGES = torch.zeros_like(LOGP), torch.tensor([1.0, -1.0], dtype=torch.float64)


def loss(**settings):
    return policy_loss(LOGP, OLD, ADVANTAGES, MASK, **settings)[0].item()


def test_golden_ratios():
    # token: min(2, 1.28) = 1.28, min(½, .8) = ½ | min(−1, −1) = −1
    assert loss() == pytest.approx(-(1.28 + 0.5 - 1) / 3)
    assert loss(reduce="sequences") == pytest.approx(-((1.28 + 0.5) / 2 - 1) / 2)
    # sequence_mean: ŵ = (2 + ½)/2 = 1.25 < 1.28, for both tokens of row 1; sequence_geometric: ŵ = √(2 · ½) = 1
    assert loss(ratio="sequence_mean", reduce="sequences") == pytest.approx(-(1.25 - 1) / 2)
    assert loss(ratio="sequence_mean", clip_high=0.2, reduce="sequences") == pytest.approx(-(1.2 - 1) / 2)
    assert loss(ratio="sequence_geometric", reduce="sequences") == pytest.approx(0)


def test_golden_clip_for_a_wrong_answer():
    # A = −1: min(−2, −1.28) = −2 is not held back; min(−½, −.8) = −.8 is
    value, stats = policy_loss(LOGP[:1], OLD[:1], -ADVANTAGES[:1], MASK[:1])
    assert value.item() == pytest.approx((2 + 0.8) / 2)
    assert (stats["clip/low"].item(), stats["clip/high"].item()) == (0.5, 0)


def test_golden_kl():
    # k3 with d = log 2: 2 − log 2 − 1;  with d = 0: 0.  β = ½ over three tokens of equal logp
    ref = LOGP + torch.tensor([[LN(2), 0], [0, 0]], dtype=torch.float64)
    value, stats = policy_loss(LOGP, OLD, ADVANTAGES, MASK, ref_logp=ref, kl_coef=0.5)
    assert stats["kl/ref"].item() == pytest.approx((1 - LN(2)) / 3)
    assert policy_loss(LOGP, OLD, ADVANTAGES, MASK, ref_logp=ref)[0].item() == loss()  # no coefficient, no penalty
    assert value.item() == pytest.approx(loss() + 0.5 * (1 - LN(2)) / 3)


def test_golden_statistics():
    stats = policy_loss(LOGP, OLD, ADVANTAGES, MASK)[1]
    assert stats["ratio/mean"].item() == pytest.approx((2 + 0.5 + 1) / 3)
    assert stats["ratio/max"].item() == pytest.approx(2)
    assert stats["clip/high"].item() == pytest.approx(1 / 3)
    assert stats["clip/low"].item() == 0
    # k3 with d = log w: (2 − log 2 − 1) + (½ + log 2 − 1) + 0 = ½
    assert stats["kl/approx"].item() == pytest.approx(0.5 / 3)


@pytest.mark.parametrize("surrogate", ["clip", "cispo", "geo_mean", "dppo_tv", "dppo_kl"])
def test_a_ratio_of_1_is_not_clipped(surrogate):
    for A in (ADVANTAGES, -ADVANTAGES):
        stats = policy_loss(OLD, OLD, A, MASK, surrogate=surrogate)[1]
        assert stats["clip/low"] == stats["clip/high"] == 0


def test_golden_statistics_of_one_token():
    """w = ½ of a correct answer, beside padding: no ratio is larger, and nothing is clipped."""
    logp, mask = torch.tensor([[LN(0.5), 0.0]]), torch.tensor([[True, False]])
    stats = policy_loss(logp, torch.zeros(1, 2), torch.tensor([0.5]), mask)[1]
    found = {name: x.item() for name, x in stats.items()}
    assert found == pytest.approx(
        {"ratio/mean": 0.5, "ratio/max": 0.5, "ratio/abs_log": LN(2), "clip/low": 0, "clip/high": 0,
         "kl/approx": 0.5 + LN(2) - 1}
    )  # fmt: skip


def test_extreme_probabilities_give_finite_numbers():
    one, half = torch.zeros(1, 1), torch.full((1, 1), LN(0.5))  # certain before: KL = ln 2 is above the bound
    stats = policy_loss(half, one, -torch.ones(1), one == 0, surrogate="dppo_kl")[1]
    assert stats["clip/low"] == 1
    assert policy_loss(half, one, torch.ones(1), one == 0, ref_logp=half + 500)[1]["kl/ref"].isfinite()


def test_statistics_keep_no_graph():
    logp = LOGP.clone().requires_grad_()
    value, stats = policy_loss(logp, OLD, ADVANTAGES, MASK, ref_logp=OLD, kl_coef=0.1)
    assert value.requires_grad and not any(x.requires_grad for x in stats.values())


def test_golden_weight_applies_to_the_surrogate_and_not_to_the_kl():
    half = torch.full((2, 1), 0.5, dtype=torch.float64)
    assert policy_loss(LOGP, OLD, ADVANTAGES, MASK, weight=half)[0].item() == pytest.approx(loss() / 2)
    ref = LOGP + 1.0
    with_kl = policy_loss(LOGP, OLD, ADVANTAGES, MASK, weight=half, ref_logp=ref, kl_coef=1.0)[0].item()
    assert with_kl == pytest.approx(loss() / 2 + math.e - 2)


# ---- oracle ------------------------------------------------------------------------------------
@given(batches(), RATIO, REDUCE, st.floats(0, 0.5), st.floats(0, 0.5))
def test_loss_matches_the_loops(batch, ratio, reduce, low, high):
    settings = {"ratio": ratio, "reduce": reduce, "clip_low": low, "clip_high": high}
    expected = oracles.policy_loss(*batch, **settings)
    assert policy_loss(*tensors(batch), **settings)[0].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


# ---- properties --------------------------------------------------------------------------------
@given(batches(), RATIO, REDUCE)
def test_micro_batches_sum_to_the_batch(batch, ratio, reduce):
    """Value and gradient, when the global count is given."""
    logp, old, A, mask = tensors(batch)
    settings = {"ratio": ratio, "reduce": reduce}
    whole = logp.clone().requires_grad_()
    total = policy_loss(whole, old, A, mask, **settings)[0]
    total.backward()
    count = mask.sum() if reduce == "tokens" else len(mask)
    parts = logp.clone().requires_grad_()
    losses = [
        policy_loss(parts[i : i + 1], old[i : i + 1], A[i : i + 1], mask[i : i + 1], count=count, **settings)[0]
        for i in range(len(mask))
    ]
    sum(losses).backward()
    torch.testing.assert_close(sum(losses), total)
    torch.testing.assert_close(parts.grad, whole.grad)


@given(batches(), RATIO, REDUCE)
def test_padding_is_never_read(batch, ratio, reduce):
    logp, old, A, mask = tensors(batch)  # NaN under the mask, in all of them
    leaf = logp.clone().requires_grad_()
    weight = torch.where(mask, 1.0, torch.nan)
    settings = {"ratio": ratio, "reduce": reduce, "ref_logp": old, "kl_coef": 0.1, "weight": weight, "penalty": weight}
    value, stats = policy_loss(leaf, old, A, mask, **settings)
    value.backward()
    assert value.isfinite() and all(s.isfinite() for s in stats.values())
    assert leaf.grad.isfinite().all() and not leaf.grad[~mask].any()


@given(batches(), RATIO)
def test_no_gradient_reaches_the_old_policy_or_the_credit(batch, ratio):
    logp, old, A, mask = tensors(batch)
    leaf, others = logp.clone().requires_grad_(), [x.nan_to_num(0).requires_grad_() for x in (old, A, old, A, A)]
    given = dict(zip(("old_logp", "advantages", "ref_logp", "weight", "penalty"), others, strict=True))
    policy_loss(leaf, mask=mask, ratio=ratio, kl_coef=0.1, **given)[0].backward()
    assert leaf.grad is not None and all(x.grad is None for x in others)


def test_gradient_of_the_surrogate_is_minus_w_times_a():
    leaf = LOGP.nan_to_num(0).requires_grad_()
    policy_loss(leaf, OLD, ADVANTAGES, MASK)[0].backward()
    # row 1: held back at w = 2, so 0; −½ · 1.  row 2: −1 · −1.  over 3 tokens
    torch.testing.assert_close(leaf.grad, torch.tensor([[0, -0.5], [1.0, 0]], dtype=torch.float64) / 3)


# ---- edges -------------------------------------------------------------------------------------
@pytest.mark.parametrize("surrogate", ["clip", "cispo", "sapo", "geo_mean", "dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("A", [-0.5, 0.5])
def test_the_unbounded_surrogates_grow_with_the_ratio(surrogate, A):
    logp = torch.full((1, 1), -20.0, requires_grad=True)  # w = e^10, and both probabilities are near 0
    policy_loss(logp, torch.full((1, 1), -30.0), torch.tensor([A]), logp < 0, surrogate=surrogate)[0].backward()
    assert (logp.grad.abs() > 100).item() == (UNBOUNDED.get(surrogate, -math.inf) > A)


def test_empty_mask_gives_a_differentiable_zero():
    leaf = torch.full((2, 3), float("nan"), requires_grad=True)
    for reduce in ("tokens", "sequences"):
        value, stats = policy_loss(leaf, leaf.detach(), torch.zeros(2), torch.zeros(2, 3).bool(), reduce=reduce)
        value.backward()
        assert value.item() == 0 and not leaf.grad.any() and all(s.isfinite() for s in stats.values())


def test_extreme_ratio_stays_finite():
    logp = torch.tensor([[0.0, -1.0]], requires_grad=True)
    value, stats = policy_loss(logp, torch.tensor([[-1e4, -1.0]]), torch.tensor([[0.0, -1.0]]), torch.ones(1, 2).bool())
    value.backward()
    assert value.isfinite() and logp.grad.isfinite().all()
    assert stats["ratio/max"].item() == pytest.approx(math.exp(20))


def test_half_precision_is_computed_in_float32():
    logp = torch.full((1, 4), -0.5, dtype=torch.bfloat16)
    assert policy_loss(logp, logp, torch.ones(1), torch.ones(1, 4).bool())[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logp": LOGP[:1]}, r"logp has shape \(1, 2\)"),
        ({"old_logp": OLD[:1]}, r"old_logp has shape \(1, 2\)"),
        ({"mask": MASK.float()}, "torch.bool"),
        ({"advantages": torch.ones(3)}, "one per token"),
        ({"advantages": [1.0, 0.0]}, "advantages is of type list"),
        ({"ratio": "geometric"}, "token, sequence_mean, sequence_geometric"),
        ({"reduce": "mean"}, "tokens, sequences"),
        *(({"clip_low": low}, "0 <= clip_low <= 1") for low in (-0.2, 1.5)),
        ({"tau_neg": 0.0}, "must be above 0"),
        ({"kl_coef": 0.1}, "without ref_logp"),
        ({"ref_logp": OLD[:1]}, r"ref_logp has shape \(1, 2\)"),
        ({"weight": torch.ones(2)}, "one per answer"),  # (T,) and (B,) look the same here
    ],
)
def test_invalid_input(change, says):
    arguments = {"logp": LOGP, "old_logp": OLD, "advantages": ADVANTAGES, "mask": MASK, **change}
    with pytest.raises(DewError, match=says):
        policy_loss(**arguments)
