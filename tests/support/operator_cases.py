"""What every implementation of the operator must pass; test_kernels.py and triton_cases.py run it on their backends."""

import math
from typing import NamedTuple

import pytest
import torch

from dew.kernels import linear_logprob_entropy


class Backend(NamedTuple):
    """An implementation and where it is tested."""

    impl: str
    device: str
    dtype: torch.dtype
    """For extreme scores."""
    accurate: torch.dtype
    """For gradients."""

    def tensor(self, values, dtype=None):
        return torch.as_tensor(values, dtype=dtype or self.dtype, device=self.device)

    def __call__(self, hidden, weight, targets, **settings):
        return linear_logprob_entropy(hidden, weight, targets, impl=self.impl, **settings)


def problem(n, d, v, dtype=torch.float64, *, device="cpu", seed=0, scale=1.0, bias=False, ignored=False):
    """Hidden states, weight, targets (every fourth ignored, if wanted) and bias."""
    gen = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(n, d, generator=gen), scale * torch.randn(v, d, generator=gen)
    targets, b = torch.randint(v, (n,), generator=gen), torch.randn(v, generator=gen) if bias else None
    targets[1::4] = torch.where(torch.tensor(ignored), -100, targets[1::4])
    hidden, weight, b = (None if t is None else t.to(device, dtype) for t in (hidden, weight, b))
    return hidden, weight, targets.to(device), b


def run(hidden, weight, targets, g, ge=None, *, bias=None, frozen=False, **settings):
    """Values and gradients of Σ g·logp + Σ ge·H."""
    x, w, b = (None if t is None else t.detach().clone() for t in (hidden, weight, bias))
    leaves = [t.requires_grad_() for t in ((x,) if frozen else (x, w, b)) if t is not None]
    logp, entropy = linear_logprob_entropy(x, w, targets, bias=b, **settings)
    loss = (g.to(logp) * logp).sum() + (0 if ge is None else (ge.to(logp) * entropy).sum())
    return [logp.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]


def doubles(*tensors):
    return [None if t is None else t.double() for t in tensors]


def truth(hidden, weight, targets, **settings):
    return linear_logprob_entropy(*doubles(hidden, weight), targets, impl="reference", **settings)


def assert_near(got, want, dtype):
    """Values to the accuracy of the sums, gradients to that of the input dtype."""
    rtol = 1e-9 if dtype == torch.float64 else 2e-5
    for ours, exact in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=rtol, atol=rtol)
    limits = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
    for ours, exact in zip(got[2:], want[2:], strict=True):
        assert (ours.double() - exact).norm() <= limits[dtype] * exact.norm() + 1e-30


def shifted(hidden, weight, level):
    """All scores higher by `level`, through eight more columns."""
    return torch.nn.functional.pad(hidden, (0, 8), value=1.0), torch.nn.functional.pad(weight, (0, 8), value=level / 8)


@pytest.mark.parametrize("level", [-200.0, 0.0, 50.0])
def test_scores_far_from_zero(backend, level):
    hidden, weight, targets, _ = problem(37, 40, 300, backend.dtype, device=backend.device, scale=0.3)
    got = backend(*shifted(hidden, weight, level), targets)
    for ours, exact in zip(got, truth(hidden, weight, targets), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rest, want", [(1, 1e-4), (600, 1e-1), (600, 1e-2), (600, 1e-4)])
def test_small_entropies_are_accurate(backend, rest, want):
    """One entry far above `rest` equal ones at −z, placed in the first, a middle and the last tile:
    H = log(1 + r) + r z / (1 + r) with r = rest · e^{−z}."""
    low, high = 1.0, 60.0
    for _ in range(100):
        z = (low + high) / 2
        r = rest * math.exp(-z)
        low, high = (z, high) if math.log1p(r) + r * z / (1 + r) > want else (low, z)
    hidden = backend.tensor([[1.0] * 8])
    for place in (0, rest // 2, rest):
        weight = torch.zeros(rest + 1, 8, device=backend.device, dtype=backend.dtype)
        weight[:, 0] = -round(z * 32) / 32
        weight[place] = 0
        targets = backend.tensor([place], torch.long)
        for level in (0.0, 32.0):
            got = backend(*shifted(hidden, weight, level), targets)
            for ours, exact in zip(got, truth(hidden, weight, targets), strict=True):
                assert ours.item() == pytest.approx(exact.item(), rel=1e-3)


def test_ignored_rows_are_never_read(backend):
    hidden, weight, targets, _ = problem(180, 40, 517, backend.dtype, device=backend.device, scale=0.3, ignored=True)
    g = torch.linspace(-1, 1, 180, device=backend.device)
    want = run(*doubles(hidden, weight), targets, g, impl="reference")
    hidden[targets == -100] = math.nan
    assert_near(run(hidden, weight, targets, g, impl=backend.impl), want, backend.dtype)


def test_all_rows_ignored(backend):
    hidden, weight, targets, _ = problem(140, 40, 300, backend.dtype, device=backend.device)
    found = run(hidden, weight, torch.full_like(targets, -100), torch.ones(140), impl=backend.impl)
    assert not any(t.any() for t in found)


def test_equal_scores_have_maximum_entropy(backend):
    hidden, weight = backend.tensor([[0.0] * 8] * 3), backend.tensor([[1.0] * 8] * 777)
    logp, entropy = backend(hidden, weight, backend.tensor([0, 500, 776], torch.long))
    assert logp.tolist() == pytest.approx([-math.log(777)] * 3)
    assert entropy.tolist() == pytest.approx([math.log(777)] * 3)


@pytest.mark.parametrize("frozen", [False, True])
def test_no_rows(backend, frozen):
    hidden, weight, targets, _ = problem(0, 16, 50, backend.accurate, device=backend.device)
    found = run(hidden, weight, targets, torch.ones(0), frozen=frozen, impl=backend.impl)
    assert found[0].shape == found[1].shape == (0,) and found[2].shape == (0, 16)
    assert not any(t.any() for t in found)


@pytest.mark.parametrize("frozen", [False, True])
def test_torch_compile_keeps_one_graph(backend, frozen):
    hidden, weight, targets, _ = problem(256, 64, 1024, backend.accurate, device=backend.device, scale=0.3)
    hidden.requires_grad_(), weight.requires_grad_(not frozen)

    def loss(h, w):
        logp, entropy = backend(h, w, targets, temperature=0.9)
        return (logp * 2 + entropy).sum()

    inputs = [hidden] if frozen else [hidden, weight]
    want = torch.autograd.grad(loss(hidden, weight), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(torch.autograd.grad(compiled(hidden, weight), inputs), want, strict=True):
        assert (ours - eager).norm() <= (1e-2 if backend.accurate.itemsize == 2 else 1e-6) * eager.norm()
