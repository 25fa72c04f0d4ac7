"""Learned credit: token weights from a predicted outcome, the head that predicts it, and how good it is."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from dew import DewError, Rollouts, get_algorithm
from dew.credit import learned_weights
from dew.credit.learned import POINTS, OutcomeHead, prediction_quality, spaced
from groups import NAN, pad

LEARNED = {"token_weight": "learned"}


def double(values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def predicted(draw):
    """Answers with A of either sign: (advantages, ragged predictions)."""
    n = draw(st.integers(1, 6))
    A = draw(st.lists(st.sampled_from([-2.0, -0.5, 0.0, 1.0]), min_size=n, max_size=n))
    values = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=7)
    return A, draw(st.lists(values, min_size=n, max_size=n))


# ---- weights ------------------------------------------------------------------------------------
def test_golden_weights():
    # A > 0, V = .4 .6 .5 .9: δ = .2 −.1 .4 and 0 for the last; p = .2 0 .4 0, P = .6 < 1
    #     κ = ½: w = 1 + ½ (4 p − .6) = 1.1 .7 1.5 .7, mean 1
    # A < 0, V = .4 .6 .5 .9: p = 0 .1 0 0, P = .1: w = 1 + ½ (4 p − .1) = .95 1.15 .95 .95
    # A > 0, V = 0 1 0 1: p = 1 0 1 0, P = 2: w = 1 + ½ (4 p − 2) / 2 = 1.5 .5 1.5 .5
    V, mask = pad([[0.4, 0.6, 0.5, 0.9], [0.4, 0.6, 0.5, 0.9], [0.0, 1.0, 0.0, 1.0]])
    A = double([[2.0], [-1.0], [0.5]]).expand(3, 4)
    expected = double([[1.1, 0.7, 1.5, 0.7], [0.95, 1.15, 0.95, 0.95], [1.5, 0.5, 1.5, 0.5]])
    torch.testing.assert_close(learned_weights(V, A, mask), expected, rtol=0, atol=1e-9)
    assert learned_weights(V, A, mask, share=1.0)[2].tolist() == pytest.approx([2, 0, 2, 0])
    assert learned_weights(V, A, mask, share=0.0).eq(1).all()


def test_tool_output_is_skipped():
    # the second token is tool output: δ of the first is .9 − .5, that of the third 0.  T = 2, P = .4
    V, mask = double([[0.5, NAN, 0.9]]), torch.tensor([[True, False, True]])
    w = learned_weights(V, torch.ones(1, 3).double(), mask, share=1.0)
    assert w.tolist() == [pytest.approx([1.4, 0, 0.6])]


@given(predicted(), st.floats(0, 1))
def test_weights_match_the_loops(answers, share):
    A, rows = answers
    V, mask = pad(rows)
    w = learned_weights(V, torch.where(mask, double(A)[:, None], NAN), mask, share=share)
    for got, live, expected in zip(w, mask, oracles.learned_weights(A, rows, share), strict=True):
        assert got[live].tolist() == pytest.approx(expected, abs=1e-9)


@given(predicted(), st.floats(0, 1))
def test_weights_keep_the_total_and_never_flip_a_sign(answers, share):
    A, rows = answers
    V, mask = pad(rows)
    w = learned_weights(V, double(A)[:, None].expand_as(V), mask, share=share)
    assert not w[~mask].any() and (w[mask] >= 1 - share - 1e-9).all()
    torch.testing.assert_close(w.sum(-1), mask.sum(-1).double())
    constant = learned_weights(torch.where(mask, 0.3, V), double(A)[:, None].expand_as(V), mask, share=share)
    assert constant[mask].eq(1).all()


def group(V, rewards=(1.0, 0.0)):
    value, mask = pad(V)
    return Rollouts(mask=mask[None], reward=double([list(rewards)]), value=value[None])


@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo", "cispo", "sapo", "maxrl", "qae", "w_reinforce", "kl_cov"])
def test_it_multiplies_the_credit_of_any_group_rule(name):
    rollouts = group([[0.4, 0.6, 0.5, 0.9], [0.5, 0.25]])
    settings = {"dynamic_sampling": False}
    plain = get_algorithm(name, **settings).advantages(rollouts)
    algorithm = get_algorithm(name, **settings, **LEARNED)
    assert algorithm.needs_hidden and not get_algorithm(name).needs_hidden
    # wrong answer, V = .5 .25: p = .25 0, P = .25: 1 + ½ (2 · .25 − .25) = 1.125 and .875
    weights = double([[[1.1, 0.7, 1.5, 0.7], [1.125, 0.875, 0, 0]]])
    torch.testing.assert_close(algorithm.advantages(rollouts), plain * weights, rtol=0, atol=1e-9)
    twice = get_algorithm(name, learned_share=1.0, **settings, **LEARNED).advantages(rollouts)
    torch.testing.assert_close(twice, plain * (2 * weights - 1), rtol=0, atol=1e-9)


def test_its_control_is_the_same_rule_without_weights():
    assert get_algorithm("dapo", credit="maxrl", learned_share=0.9, **LEARNED).control() == get_algorithm(
        "dapo", credit="maxrl"
    )
    assert get_algorithm("dapo").control() is None


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("dapo", {"token_weight": "learnt"}, "none, learned"),
        ("dapo", {"learned_share": 0}, "0 < learned_share <= 1"),
        ("gspo", LEARNED, "one ratio per answer"),
        ("otb", LEARNED, "one per token already"),
        ("trl", LEARNED, "not part of TRL's loss"),
    ],
)
def test_invalid_settings(name, settings, says):
    with pytest.raises(DewError, match=says) as error:
        get_algorithm(name, **settings)
    assert len(error.value.problems) == 1


def test_invalid_input():
    with pytest.raises(DewError, match="predicted outcome of each token"):
        get_algorithm("dapo", **LEARNED).advantages(Rollouts(mask=torch.ones(1, 2, 3).bool(), reward=torch.eye(2)[:1]))
    one, mask = torch.ones(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(DewError, match=r"value has shape \(2, 1\)"):
        learned_weights(one[:, :1], one, mask)
    with pytest.raises(DewError, match="share=2"):
        learned_weights(one, one, mask, share=2)


# ---- the head -----------------------------------------------------------------------------------
def states(seed, R=1, B=40, K=6, D=16):
    """Answers whose first coordinate, from the third state on, tells the outcome."""
    g = torch.Generator().manual_seed(seed)
    side = torch.randint(0, 2, (R, B), generator=g) * 2.0 - 1
    x = torch.randn(R, B, K, D, generator=g)
    x[:, :, 2:, 0] += 2 * side[..., None]
    return x, side


def test_the_head_learns_and_does_not_memorise():
    head = OutcomeHead(16)
    assert head.predict(states(0)[0]).eq(0.5).all()
    for seed in range(1, 20):
        head.fit(*states(seed))
    new, outcome = states(100)
    found = prediction_quality(head.predict(new), outcome, torch.ones(1, 40, 6).bool())
    assert found["auc_first"].item() == pytest.approx(0.5, abs=0.15)  # these states say nothing
    assert found["auc_last"] > 0.9 and found["brier"] < 0.2


def test_one_step_of_the_head_equals_torch(monkeypatch):
    monkeypatch.setattr("dew.credit.learned.STEPS", 1)
    head, (x, side) = OutcomeHead(16), states(3)
    side[0, :7] = 0
    p = {name: t.detach()[0].clone().requires_grad_() for name, t in head.parameters.items()}
    head.fit(x, side)
    z = torch.nn.functional.layer_norm(x[0, 7:], (16,)) @ p["first"] + p["bias"]
    logits = (z.relu() @ p["last"] + p["last_bias"])[..., 0]
    target = (side[0, 7:, None] > 0).float().expand_as(logits)
    torch.nn.functional.binary_cross_entropy_with_logits(logits, target).backward()
    adam = torch.optim.AdamW(p.values(), lr=3e-3, weight_decay=1e-2)
    adam.step()
    for name, t in head.parameters.items():
        torch.testing.assert_close(t[0], p[name], msg=name)


def test_replicas_answers_without_a_side_and_nan_do_not_leak():
    x, side = states(5, R=3)
    alone, three = OutcomeHead(16), OutcomeHead(16, replicas=3)
    broken, left_out = x.clone(), side.clone()
    broken[0], broken[2, 4, 1] = NAN, NAN  # a whole replica; one state of an answer that is left out
    left_out[2, 4] = 0
    for _ in range(3):
        three.fit(broken, left_out)
        alone.fit(x[2:][:, [i for i in range(40) if i != 4]], side[2:][:, [i for i in range(40) if i != 4]])
    torch.testing.assert_close(three.predict(x)[2:], alone.predict(x[2:]))
    assert three.predict(x).isfinite().all()


def test_the_head_continues_from_its_state(tmp_path):
    one, other = OutcomeHead(16), OutcomeHead(16)
    one.fit(*states(0))
    torch.save(one.state(), tmp_path / "head.pt")
    other.restore(torch.load(tmp_path / "head.pt", weights_only=True))
    for head in (one, other):
        head.fit(*states(1))
    x, _ = states(2)
    assert one.predict(x).equal(other.predict(x)) and not one.predict(x).eq(0.5).any()


def test_spaced_points_are_live_and_cover_the_answer():
    mask = torch.zeros(3, 100).bool()
    mask[0, 10:90], mask[1, 3] = True, True
    points = spaced(mask)
    assert points.shape == (3, POINTS) and mask[:2].gather(1, points[:2]).all()
    assert points[0, 0] == 10 and points[0, -1] == 10 + 80 * 31 // 32 and points[1].eq(3).all()


# ---- how good it is -----------------------------------------------------------------------------
def test_golden_quality():
    # three answers of three tokens: better .5 .9 .9, worse .5 .1 .9, and one without a side
    # AUC by third: tie ½;  .9 > .1: 1;  tie ½.   Brier: (.25 + .01 + .01 + .25 + .01 + .81) / 6
    V = double([[0.5, 0.9, 0.9], [0.5, 0.1, 0.9], [NAN, NAN, NAN]])
    found = prediction_quality(V, double([1.0, -1, 0]), torch.ones(3, 3).bool())
    assert [x.item() for x in found.values()] == pytest.approx([1.34 / 6, 0.5, 1, 0.5])
    # padding: NaN, and not part of an answer's thirds
    wide = torch.cat([V, torch.full((3, 4), NAN).double()], 1)
    mask = torch.arange(7) < torch.full((3, 1), 3)
    again = prediction_quality(wide, double([1.0, -1, 0]), mask)
    assert [x.item() for x in again.values()] == pytest.approx([1.34 / 6, 0.5, 1, 0.5])
    assert math.isnan(prediction_quality(V[:1], double([1.0]), mask[:1, :3])["auc_last"])


@given(predicted())
def test_quality_matches_the_loops(answers):
    A, rows = answers
    V, mask = pad(rows)
    found = prediction_quality(V, double(A).sign(), mask)
    expected = oracles.prediction_quality(A, rows)
    assert [x.item() for x in found.values()] == pytest.approx(expected, nan_ok=True)
