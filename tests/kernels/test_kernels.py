"""linear_logprob_entropy: values, gradients and awkward shapes."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dew.errors import ConfigError, DewError, ShapeError
from dew.kernels import chunked, linear, linear_logprob_entropy
from operator_cases import *  # noqa: F403
from operator_cases import Backend, assert_near, doubles, problem, run

SHAPES = [(1, 1, 1), (1, 5, 2), (7, 3, 1), (13, 25, 50), (33, 17, 123), (52, 50, 257)]


@pytest.fixture
def backend():
    return Backend("chunked", "cpu", torch.float32, torch.float64)


def small_chunks(monkeypatch, nbytes):
    for module in (chunked, linear):
        monkeypatch.setattr(module, "allowed", lambda limit, device: nbytes)


# Golden: worked by hand.
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_vocabulary_of_two(impl):
    # h = 1, W = (ln 3, 0): p = 3/4, 1/4. logp = ln 3/4, H = ln 4 − 3/4 ln 3.
    # ∂logp/∂h = W_y − Σ p W = ln 3 / 4, ∂logp/∂W = (1 − p, −p) h = (1/4, −1/4).
    hidden = torch.tensor([[1.0]], dtype=torch.float64)
    weight = torch.tensor([[math.log(3)], [0.0]], dtype=torch.float64)
    logp, entropy, dh, dw = run(hidden, weight, torch.tensor([0]), torch.ones(1), impl=impl)
    assert logp.item() == pytest.approx(math.log(3 / 4))
    assert entropy.item() == pytest.approx(math.log(4) - 3 / 4 * math.log(3))
    assert dh.item() == pytest.approx(math.log(3) / 4)
    assert dw.flatten().tolist() == pytest.approx([1 / 4, -1 / 4])


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_vocabulary_of_two_with_bias_softcap_and_temperature(impl):
    # scores (1 + 1, 0), cap 2: 2 tanh(2/2) = 2 · 0.761594 = 1.523188, T = 2: 0.761594 and 0. p = σ(0.761594) = 0.681700
    hidden, weight = torch.ones(1, 1), torch.tensor([[1.0], [0.0]])
    settings = {"bias": torch.tensor([1.0, 0.0]), "softcap": 2.0, "temperature": 2.0, "impl": impl}
    logp, entropy, squares = linear_logprob_entropy(hidden, weight, torch.tensor([0]), sum_sq=True, **settings)
    p = 0.681700
    assert squares.item() == pytest.approx(p * p + (1 - p) * (1 - p), abs=2e-6)
    assert logp.item() == pytest.approx(math.log(p), abs=2e-6)
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=2e-6)


# Oracle: loops over lists, straight from the definition; finite differences for the gradients.
def by_hand(hidden, weight, targets, bias, temperature, softcap):
    out = []
    for row, y in zip(hidden.tolist(), targets.tolist(), strict=True):
        z = [sum(a * b for a, b in zip(row, w, strict=True)) for w in weight.tolist()]
        z = [a + b for a, b in zip(z, bias.tolist(), strict=True)] if bias is not None else z
        z = [softcap * math.tanh(a / softcap) for a in z] if softcap else z
        z = [a / temperature for a in z]
        total = sum(math.exp(a) for a in z)
        p = [math.exp(a) / total for a in z]
        out.append((math.log(p[y]), -sum(q * math.log(q) for q in p), sum(q * q for q in p)))
    return torch.tensor(out, dtype=torch.float64).unbind(1)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature, softcap, bias", [(1.0, None, False), (0.7, 2.0, True)])
def test_values_match_the_definition(impl, shape, temperature, softcap, bias):
    hidden, weight, targets, b = problem(*shape, bias=bias)
    settings = {"temperature": temperature, "softcap": softcap}
    got = linear_logprob_entropy(hidden, weight, targets, bias=b, impl=impl, sum_sq=True, **settings)
    for ours, truth in zip(got, by_hand(hidden, weight, targets, b, temperature, softcap), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)


def test_targets_that_are_known_to_be_live_are_not_read(monkeypatch):
    hidden, weight, targets, _ = problem(33, 17, 123)
    g, ge = torch.randn(2, 33)
    want = run(hidden, weight, targets, g, ge, impl="chunked")
    monkeypatch.setattr(linear, "_live_rows", lambda *args: pytest.fail("a GPU would be waited for"))
    monkeypatch.setattr(linear, "_what_to_save", lambda *args: "slopes")
    hidden.requires_grad_()
    logp, entropy = linear_logprob_entropy(hidden, weight, targets, impl="chunked", all_live=True)
    (logp * g).sum().backward()
    torch.testing.assert_close([logp, entropy, hidden.grad], list(want[:3]))


@pytest.mark.parametrize("save", ["nothing", "scores", "slopes", "weights"])
def test_sum_of_squares_whatever_is_saved(save, monkeypatch):
    """0 on ignored rows, no gradient, and nothing else changes."""
    small_chunks(monkeypatch, 5000)
    monkeypatch.setattr(linear, "_what_to_save", lambda *args: save)
    hidden, weight, targets, _ = problem(33, 17, 123)
    targets[4] = -100
    hidden.requires_grad_()
    *plain, squares = linear_logprob_entropy(hidden, weight, targets, impl="chunked", sum_sq=True)
    torch.testing.assert_close(plain, list(linear_logprob_entropy(hidden, weight, targets, impl="chunked")))
    expected = linear_logprob_entropy(hidden, weight, targets, impl="reference", sum_sq=True)[2]
    torch.testing.assert_close(squares, expected)
    assert squares[4] == 0 and not squares.requires_grad and not expected.requires_grad
    if save != "nothing":
        plain[0].sum().backward()


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("temperature, softcap, bias", [(1.0, None, False), (0.7, 2.0, True)])
def test_gradients_match_finite_differences(entropy_grad, temperature, softcap, bias):
    hidden, weight, targets, b = problem(4, 3, 5, bias=bias)
    targets[1] = -100
    leaves = [t.requires_grad_() for t in (hidden, weight, b) if t is not None]

    def values(h, w, bias=None):
        settings = {"temperature": temperature, "softcap": softcap, "entropy_grad": entropy_grad, "impl": "chunked"}
        logp, entropy = linear_logprob_entropy(h, w, targets, bias=bias, **settings)
        return (logp, entropy) if entropy_grad else logp

    assert torch.autograd.gradcheck(values, leaves)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("nbytes", [64, 5000, 1 << 28])
def test_chunks_of_any_size_match_the_reference(shape, entropy_grad, nbytes, monkeypatch):
    small_chunks(monkeypatch, nbytes)
    hidden, weight, targets, b = problem(*shape, bias=True)
    targets[::3] = -100
    g, ge = torch.randn(2, shape[0])
    g[1::4] = ge[1::4] = 0
    settings = {"bias": b, "temperature": 1.3, "softcap": 3.0, "entropy_grad": entropy_grad}
    ge = ge if entropy_grad else None
    want = run(hidden, weight, targets, g, ge, impl="reference", **settings)
    got = run(hidden, weight, targets, g, ge, impl="chunked", **settings)
    for ours, truth in zip(got, want, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("frozen", [False, True])
def test_errors_are_no_larger_than_the_naive_path(dtype, frozen):
    """Truth in float64; naive path: logits in the input dtype, then float32."""
    hidden, weight, targets, _ = problem(96, 64, 517, dtype=dtype, scale=0.4)
    g = torch.randn(96)
    truth = run(hidden.double(), weight.double(), targets, g, impl="reference")
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logq = torch.log_softmax((x @ w.T).float(), -1)
    logp, entropy = logq.gather(1, targets[:, None])[:, 0], -(logq.exp() * logq).sum(1)
    naive = [logp, entropy, *torch.autograd.grad((g * logp).sum(), (x, w))]
    got = run(hidden, weight, targets, g, frozen=frozen, impl="chunked")
    for ours, theirs, exact in zip(got, naive, truth, strict=False):
        slack = 1.05 if dtype == torch.float32 else 1.0
        assert (ours - exact).norm() <= slack * (theirs - exact).norm() + 1e-6 * exact.norm()


# Edges.
def test_scores_of_minus_infinity():
    """They do not enter the entropy; such a target has log-probability −∞ and finite gradients."""
    hidden, weight, _, b = problem(6, 16, 300, torch.float32, scale=0.3, bias=True)
    b[::2] = b[:260] = -math.inf
    targets, g = torch.tensor([299, 299, 299, 2, 299, 299]), torch.ones(6)
    settings = {"entropy_grad": True}
    got = run(hidden, weight, targets, g, g, bias=b, impl="chunked", **settings)
    assert got[0][3] == -math.inf and all(t.isfinite().all() for t in got[1:])
    want = run(*doubles(hidden, weight), targets, g, g, bias=b.double(), impl="reference", **settings)
    assert_near(got, want, torch.float32)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_frozen_head(entropy_grad, monkeypatch):
    small_chunks(monkeypatch, 5000)
    hidden, weight, targets, _ = problem(33, 17, 123)
    g, ge = torch.randn(2, 33).double()
    settings = {"ge": ge if entropy_grad else None, "entropy_grad": entropy_grad, "frozen": True}
    want, got = (run(hidden, weight, targets, g, impl=impl, **settings) for impl in ("reference", "chunked"))
    torch.testing.assert_close(got, want)


def test_frozen_hidden_states():
    hidden, weight, targets, b = problem(13, 5, 50, bias=True)
    want = run(hidden, weight, targets, torch.ones(13), bias=b, impl="reference")
    b.requires_grad_(), weight.requires_grad_()
    logp, entropy = linear_logprob_entropy(hidden, weight, targets, bias=b, impl="chunked")
    torch.testing.assert_close(list(torch.autograd.grad(logp.sum(), (weight, b))), want[3:])
    assert not entropy.requires_grad  # unless it is asked for


def test_without_gradients_nothing_is_saved():
    hidden, weight, targets, _ = problem(13, 5, 50)
    weight.requires_grad_()
    with torch.no_grad():
        logp, entropy = linear_logprob_entropy(hidden, weight, targets)
    assert logp.grad_fn is None and entropy.grad_fn is None
    assert linear._what_to_save(hidden, weight.detach(), None, False) == "nothing"


def test_rows_without_gradient_are_skipped(monkeypatch):
    hidden, weight, targets, _ = problem(13, 5, 50)
    g = torch.randn(13)
    g[[0, 3, 4]] = 0
    seen = []
    tile = chunked.gradient_tile
    monkeypatch.setattr(chunked, "gradient_tile", lambda x, *rest: (seen.append(len(x)), tile(x, *rest)))
    got = run(hidden, weight, targets, g, impl="chunked")
    assert set(seen) == {10}
    torch.testing.assert_close(got, run(hidden, weight, targets, g, impl="reference"))


@pytest.mark.parametrize("share", [1.0, 0.8, 0.3])
def test_kept_weights_give_the_same_gradients(share, monkeypatch):
    """The path of a GPU with enough free memory: two products with the stored weights."""
    monkeypatch.setattr(linear, "_what_to_save", lambda *args: "weights")
    hidden, weight, targets, b = problem(40, 17, 123, bias=True)
    targets[::5] = -100
    g = torch.randn(40) * (torch.rand(40) < share)
    got = run(hidden, weight, targets, g, bias=b, impl="chunked", softcap=3.0)
    torch.testing.assert_close(got, run(hidden, weight, targets, g, bias=b, impl="reference", softcap=3.0))


class Largest(TorchDispatchMode):
    """Size of the largest tensor created by any operation, in entries."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.entries = max(self.entries, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_memory_is_bounded_by_a_chunk(entropy_grad, monkeypatch):
    n, d, v = 256, 4, 2048
    small_chunks(monkeypatch, 1 << 17)
    hidden, weight, targets, _ = problem(n, d, v, dtype=torch.float32)
    with Largest() as largest:
        run(hidden, weight, targets, torch.ones(n), impl="chunked", entropy_grad=entropy_grad)
    assert largest.entries * 4 <= max(1 << 17, n * 256 * 4)  # a slice is at least 256 columns wide
    assert largest.entries < n * v / 4


@pytest.mark.parametrize("length", [1, 5, 127, 128, 1000, 152_064])
@pytest.mark.parametrize("nbytes", [1, 1000, 100_000, 1 << 30])
def test_spans_cover_everything_once(length, nbytes):
    cuts = list(chunked.spans(length, 32, nbytes, 128))
    assert cuts[0][0] == 0 and cuts[-1][1] == length
    assert all(a[1] == b[0] for a, b in pairwise(cuts))
    assert all(high - low <= max(1, nbytes // 32) or high - low <= 128 for low, high in cuts)


@pytest.mark.parametrize("save", ["nothing", "scores", "slopes"])
def test_operator_registration(save):
    hidden, weight, targets, b = problem(6, 4, 9, bias=True)
    hidden.requires_grad_(), weight.requires_grad_(save == "scores")
    args = (hidden, weight, b, targets, 1.0, None, save, "chunked", save != "scores", False)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.dew.logprob_entropy.default, args, test_utils=tests)


def test_autocast():
    hidden, weight, targets, _ = problem(6, 4, 9, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_logprob_entropy(hidden, weight, targets)
    torch.testing.assert_close(got, linear_logprob_entropy(hidden.bfloat16(), weight.bfloat16(), targets))


def test_strided_inputs():
    hidden, weight, targets, _ = problem(12, 8, 30)
    got = linear_logprob_entropy(hidden.t().contiguous().t(), weight[:, ::2].repeat(1, 2)[:, :8], targets)
    want = linear_logprob_entropy(hidden, weight[:, ::2].repeat(1, 2), targets, impl="reference")
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"hidden": torch.zeros(2, 3, 4)}, ShapeError, "flatten"),
        ({"targets": torch.zeros(5).long()}, ShapeError, r"\(N,\)"),
        ({"targets": torch.zeros(3)}, ShapeError, "long"),
        ({"targets": torch.tensor([0, 9, 1])}, ShapeError, "for example 9"),
        ({"targets": torch.tensor([0, -1, 1])}, ShapeError, "marked -100"),
        ({"weight": torch.zeros(9, 5)}, ShapeError, "expected"),
        ({"weight": torch.zeros(0, 4)}, ShapeError, "V > 0"),
        ({"weight": torch.zeros(9, 4).half()}, ShapeError, "one floating dtype"),
        ({"bias": torch.zeros(8)}, ShapeError, "bias"),
        ({"bias": torch.zeros(())}, ShapeError, "bias"),
        ({"temperature": 0.0}, ConfigError, "above 0"),
        ({"softcap": -1.0}, ConfigError, "softcap"),
        ({"impl": "cuda"}, ConfigError, "chunked"),
        ({"impl": "triton"}, ConfigError, "auto"),
    ],
)
def test_invalid_input_raises(change, error, message):
    given_ = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(9, 4), "targets": torch.tensor([0, 1, 2])} | change
    with pytest.raises(error, match=message) as caught:
        linear_logprob_entropy(given_.pop("hidden"), given_.pop("weight"), given_.pop("targets"), **given_)
    assert isinstance(caught.value, DewError)


@pytest.mark.parametrize(
    ("name", "major", "kib", "triton", "says"),
    [
        ("H200", 9, 227, "3.6.0", ""),
        ("B200", 10, 227, "3.7.1", "triton 3.7.1 does not compile them for B200; 3.8 does"),
        ("B200", 10, 227, "3.10.0", ""),
        ("A100", 8, 163, "3.9.0", "A100 has too little shared memory for the tiles"),
    ],
)
def test_gpus_that_the_triton_kernels_run_on(name, major, kib, triton, says, monkeypatch):
    pytest.importorskip("triton")
    gpu = SimpleNamespace(name=name, major=major, shared_memory_per_block_optin=1024 * kib)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(linear, "version", lambda package: triton)
    obstacle = linear._machine_obstacle.__wrapped__
    assert obstacle(torch.device("cuda"), torch.bfloat16) == says
    assert "exact for bfloat16 and float16 only" in obstacle(torch.device("cuda"), torch.float32)
