"""The policy loss that forms its own gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.errors import ConfigError, DewError, ShapeError
from dew.kernels import linear_logprob_entropy, linear_policy_loss, passes


def problem(n=33, d=17, v=123, seed=0, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=gen, dtype=dtype)
    weight, bias = torch.randn(v, d, generator=gen, dtype=dtype), torch.randn(v, generator=gen, dtype=dtype)
    targets = torch.randint(v, (n,), generator=gen)
    logp, _ = linear_logprob_entropy(hidden, weight, targets, bias=bias, impl="reference")
    old = logp + 0.4 * torch.randn(n, generator=gen, dtype=dtype)  # ratios on both sides of both clips
    advantages = torch.randn(n, generator=gen, dtype=dtype)
    advantages[::6] = 0
    targets[::7] = -100
    return hidden, weight, bias, targets, old, advantages


def run(hidden, weight, bias, targets, old, advantages, **settings):
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    out = linear_policy_loss(leaves[0], leaves[1], targets, old, advantages, bias=leaves[2], **settings)
    return [*(t.detach() for t in out), *torch.autograd.grad(3 * out.loss, leaves)]


# Golden.


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize(
    "ratio, advantage, loss, slope",
    [
        (1.0, 2.0, -2.0, -2.0),  # inside the clip: L = −w A, ∂L/∂logp = −w A
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.56, 0.0),  # held above: −1.28 · 2
        (1.5, -2.0, 3.0, 3.0),  # the worse of the two counts: nothing holds a mistake back
        (0.5, -2.0, 1.6, 0.0),  # held below: 0.8 · 2
        (0.5, 2.0, -1.0, -1.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_one_token(impl, ratio, advantage, loss, slope):
    # h = 1, W = (ln 3, 0): logp = ln 3/4, ∂logp/∂h = ln 3 / 4.
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[math.log(3)], [0.0]], dtype=torch.float64)
    old = torch.tensor([math.log(3 / 4) - math.log(ratio)], dtype=torch.float64)
    a = torch.tensor([advantage], dtype=torch.float64)
    out = linear_policy_loss(hidden, weight, torch.tensor([0]), old, a, impl=impl)
    assert out.loss.item() == pytest.approx(loss)
    assert torch.autograd.grad(out.loss, hidden)[0].item() == pytest.approx(slope * math.log(3) / 4)
    assert out.logp.item() == pytest.approx(math.log(3 / 4))
    assert out.entropy.item() == pytest.approx(math.log(4) - 3 / 4 * math.log(3))


# Oracle: autograd through the definition.


@pytest.mark.parametrize("nbytes", [64, 20_000, 1 << 28])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "softcap": 3.0, "clip_low": 0.1, "divisor": 7.0}])
def test_is_the_reference(nbytes, settings, monkeypatch):
    monkeypatch.setattr(passes, "allowed", lambda limit, device: nbytes)
    data = problem()
    want = run(*data, impl="reference", **settings)
    for ours, truth in zip(run(*data, impl="chunked", **settings), want, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-12)


def test_is_the_token_loss_of_dew_losses():
    losses = pytest.importorskip("dew.losses")
    hidden, weight, bias, targets, old, advantages = problem()
    out = linear_policy_loss(hidden, weight, targets, old, advantages, bias=bias)
    mask = (targets != -100)[None]
    given_ = (out.logp[None], old[None], advantages[None], mask)
    loss, _ = losses.policy_loss(*given_, ratio="token", reduce="tokens", clip_low=0.2, clip_high=0.28)
    assert out.loss.item() == pytest.approx(loss.item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_the_truth(dtype):
    data = problem()
    half = [t.to(dtype) if i < 3 else t for i, t in enumerate(data)]
    exact = [t.double() if i < 3 else t for i, t in enumerate(half)]
    want = run(*exact, impl="reference", divisor=4096.0)
    got = run(*half, impl="chunked", divisor=4096.0)
    for ours, truth in zip(got, want, strict=True):
        assert (ours - truth).norm() <= 1e-2 * truth.norm()


# Properties.


@given(seed=st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_ignored_rows_are_never_read(seed):
    hidden, weight, bias, targets, old, advantages = problem(9, 4, 11, seed)
    want = run(hidden, weight, bias, targets, old, advantages, impl="chunked")
    gone = targets == -100
    hidden[gone], old[gone], advantages[gone] = math.nan, math.nan, math.nan
    torch.testing.assert_close(run(hidden, weight, bias, targets, old, advantages, impl="chunked"), want)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_the_order_of_tokens_does_not_matter(seed):
    data = problem(9, 4, 11, seed)
    order = torch.randperm(9)
    mixed = [data[0][order], data[1], data[2], *(t[order] for t in data[3:])]
    loss, _, _, dh, dw, db = run(*data, impl="chunked")
    got = run(*mixed, impl="chunked")
    torch.testing.assert_close([got[0], *got[3:]], [loss, dh[order], dw, db])


# Edges.


def test_tokens_with_advantage_zero_keep_their_statistics():
    hidden, weight, bias, targets, old, advantages = problem()
    out = linear_policy_loss(hidden.requires_grad_(), weight, targets, old, 0 * advantages, bias=bias)
    want = linear_logprob_entropy(hidden, weight, targets, bias=bias, impl="reference")
    torch.testing.assert_close(out.logp, want[0].detach())
    torch.testing.assert_close(out.entropy, want[1])
    assert not torch.autograd.grad(out.loss, hidden)[0].any()


def test_only_the_loss_carries_gradients():
    hidden, weight, bias, targets, old, advantages = problem()
    out = linear_policy_loss(hidden.requires_grad_(), weight, targets, old, advantages, bias=bias)
    assert out.loss.requires_grad and not out.logp.requires_grad and not out.entropy.requires_grad
    with torch.no_grad():
        assert not linear_policy_loss(hidden, weight, targets, old, advantages, bias=bias).loss.requires_grad


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, bias, targets, old, advantages = problem()
    want = run(hidden, weight, bias, targets, old, advantages, impl="reference")[3]
    out = linear_policy_loss(hidden.requires_grad_(), weight, targets, old, advantages, bias=bias, impl="chunked")
    torch.testing.assert_close(torch.autograd.grad(3 * out.loss, hidden)[0], want)


@pytest.mark.parametrize("n", [0, 1])
def test_few_rows(n):
    hidden, weight, bias, targets, old, advantages = problem()
    few = (hidden[:n], weight, bias, targets[:n], old[:n], advantages[:n])
    got = run(*few, impl="chunked")
    torch.testing.assert_close(got, run(*few, impl="reference"))
    assert not got[4].isnan().any()


def test_torch_compile_keeps_one_graph():
    hidden, weight, _, targets, old, advantages = problem(dtype=torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()

    def loss(h, w):
        return linear_policy_loss(h, w, targets, old, advantages).loss * 2

    want = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(hidden, weight), (hidden, weight)), want)


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"old_logp": torch.zeros(4)}, ShapeError, "old_logp"),
        ({"advantages": torch.zeros(3, 1)}, ShapeError, "one number per target"),
        ({"clip_low": -0.1}, ConfigError, "DAPO"),
        ({"clip_high": -0.1}, ConfigError, "clip_high"),
    ],
)
def test_bad_input_is_answered_with_advice(change, error, says):
    kw = {"old_logp": torch.zeros(3), "advantages": torch.zeros(3)} | change
    with pytest.raises(error, match=says) as caught:
        linear_policy_loss(torch.zeros(3, 4), torch.zeros(9, 4), torch.tensor([0, 1, 2]), **kw)
    assert isinstance(caught.value, DewError)
