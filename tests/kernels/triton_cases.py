"""Tests of the Triton kernels, on a GPU or in Triton's interpreter. Run by test_triton.py."""

import logging
import math
import os
import sys

import pytest
import torch

import dew.kernels
from dew.kernels import linear, linear_logprob_entropy
from dew.kernels import triton as backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
STORED, OTHER = (torch.float32, torch.float16) if INTERPRETED else (torch.bfloat16, torch.float16)
"""Stored weights need float32's exponent range; the interpreter's bfloat16 product is broken."""
SHAPES = [(1, 8, 1), (37, 40, 300), (130, 72, 517)]
if not INTERPRETED:
    SHAPES += [(1000, 576, 5003), (200, 896, 151_936)]
HOPPER = not INTERPRETED and torch.cuda.get_device_capability() == (9, 0)
CASES = [(STORED, shape) for shape in SHAPES] + [(OTHER, (5, 8, 13)), (OTHER, (129, 64, 1024))]


def problem(n, d, v, dtype, *, scale=0.3, bias=False):
    torch.manual_seed(n + d + v)
    hidden = torch.randn(n, d, device=DEVICE).to(dtype)
    weight = (scale * torch.randn(v, d, device=DEVICE) * math.sqrt(64 / max(64, d))).to(dtype)
    targets = torch.randint(v, (n,), device=DEVICE)
    targets[1::4] = -100
    return hidden, weight, targets, torch.randn(v, device=DEVICE).to(dtype) if bias else None


def run(hidden, weight, targets, g, ge=None, *, bias=None, frozen=False, **settings):
    x, w, b = (None if t is None else t.detach().clone() for t in (hidden, weight, bias))
    leaves = [t.requires_grad_() for t in ((x,) if frozen else (x, w, b)) if t is not None]
    logp, entropy = linear_logprob_entropy(x, w, targets, bias=b, **settings)
    loss = (g.to(logp) * logp).sum() + (0 if ge is None else (ge.to(logp) * entropy).sum())
    return [logp.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]


def doubles(*tensors):
    return [None if t is None else t.double() for t in tensors]


def assert_near(got, want, dtype):
    """Values to float32 accuracy, gradients to that of the input dtype."""
    for ours, truth in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=2e-5, atol=2e-5)
    for ours, truth in zip(got[2:], want[2:], strict=True):
        limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        assert (ours.double() - truth).norm() <= limit * truth.norm() + 1e-30


@pytest.fixture(params=["scores", "weights"])
def save(request, monkeypatch):
    monkeypatch.setattr(linear, "_what_to_save", lambda *args: request.param)
    return request.param


@pytest.fixture(params=["triton", "hopper"] if HOPPER else ["triton"])
def kernel(request, monkeypatch):
    """The kernel of the pass without stored weights: on Hopper there are two."""
    if request.param == "triton":
        monkeypatch.setattr(backend, "_is_hopper", lambda device: False)
    yield request.param
    assert not backend.hopper_failed


@pytest.mark.parametrize("dtype, shape", CASES)
@pytest.mark.parametrize("temperature, softcap, bias", [(1.0, None, False), (0.7, 5.0, True)])
def test_values_and_gradients(dtype, shape, temperature, softcap, bias, save):
    hidden, weight, targets, b = problem(*shape, dtype, bias=bias)
    g = torch.randn(shape[0], device=DEVICE)
    g[2::5] = 0
    settings = {"temperature": temperature, "softcap": softcap}
    got = run(hidden, weight, targets, g, bias=b, impl="triton", **settings)
    x, w, b64 = doubles(hidden, weight, b)
    assert_near(got, run(x, w, targets, g, bias=b64, impl="reference", **settings), dtype)


@pytest.mark.parametrize("dtype, shape", CASES[1:2] if INTERPRETED else CASES)
@pytest.mark.parametrize("temperature, softcap, bias", [(1.0, None, False), (0.7, 5.0, True)])
def test_sum_of_squares(dtype, shape, temperature, softcap, bias, save, kernel):
    hidden, weight, targets, b = problem(*shape, dtype, bias=bias)
    settings = {"temperature": temperature, "softcap": softcap, "sum_sq": True}
    x, w, b64 = doubles(hidden, weight, b)
    for y in (targets, targets.clamp_min(0)):
        got = linear_logprob_entropy(hidden, weight, y, bias=b, impl="triton", **settings)
        want = linear_logprob_entropy(x, w, y, bias=b64, impl="reference", **settings)
        for ours, truth in zip(got, want, strict=True):
            torch.testing.assert_close(ours.double(), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype, softcap, bias", [(STORED, None, False), (OTHER, 5.0, True)])
def test_entropy_gradients(dtype, softcap, bias):
    hidden, weight, targets, b = problem(37, 40, 300, dtype, bias=bias)
    g, ge = torch.randn(2, 37, device=DEVICE)
    settings = {"softcap": softcap, "entropy_grad": True}
    got = run(hidden, weight, targets, g, ge, bias=b, impl="triton", **settings)
    x, w, b64 = doubles(hidden, weight, b)
    assert_near(got, run(x, w, targets, g, ge, bias=b64, impl="reference", **settings), dtype)


@pytest.mark.parametrize("dtype, shape", CASES)
def test_frozen_head(dtype, shape):
    hidden, weight, targets, _ = problem(*shape, dtype)
    g = torch.randn(shape[0], device=DEVICE)
    got = run(hidden, weight, targets, g, frozen=True, impl="triton", temperature=0.8)
    x, w = doubles(hidden, weight)
    assert_near(got, run(x, w, targets, g, frozen=True, impl="reference", temperature=0.8), dtype)


@pytest.mark.parametrize(
    "frozen, v, settings", [(False, 1100, {}), (True, 300, {"softcap": 150.0, "temperature": 0.8})]
)
def test_very_unlikely_targets(frozen, v, settings, monkeypatch):
    """p_v / p_y overflows: such rows are redone. Scores reach ±50 and beyond."""
    monkeypatch.setattr(linear, "_what_to_save", lambda *args: "slopes" if frozen else "weights")
    n = 140 if INTERPRETED else 300  # more than one block of rows
    hidden, weight, targets, bias = problem(n, 64, v, STORED, scale=10.0, bias=bool(settings))
    g = torch.randn(n, device=DEVICE)
    x, w, b = doubles(hidden, weight, bias)
    want = run(x, w, targets, g, bias=b, frozen=frozen, impl="reference", **settings)
    assert (want[0] < -100).sum() > 20 and (want[0] > -20).any()
    got = run(hidden, weight, targets, g, bias=bias, frozen=frozen, impl="triton", **settings)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-3)
    for ours, truth in zip(got[2:], want[2:], strict=True):
        assert (ours.double() - truth).norm() <= 1e-2 * truth.norm()


@pytest.mark.parametrize("level", [-200.0, 50.0])
def test_scores_far_from_zero(level):
    hidden, weight, targets, _ = problem(37, 40, 300, OTHER)
    got = linear_logprob_entropy(
        hidden, weight, targets, bias=torch.full((300,), level, dtype=OTHER, device=DEVICE), impl="triton"
    )
    want = linear_logprob_entropy(*doubles(hidden, weight), targets, impl="reference")
    for ours, truth in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)


def test_scores_of_minus_infinity():
    hidden, weight, _, b = problem(6, 16, 300, OTHER, bias=True)
    b[::2] = -math.inf
    b[:260] = -math.inf  # a whole tile
    targets = torch.full((6,), 299, device=DEVICE)
    targets[3] = 2
    g = torch.ones(6, device=DEVICE)
    got = run(hidden, weight, targets, g, g, bias=b, entropy_grad=True, impl="triton")
    want = run(*doubles(hidden, weight), targets, g, g, bias=b.double(), entropy_grad=True, impl="reference")
    assert got[0][3] == -math.inf and all(t.isfinite().all() for t in got[1:])
    assert_near(got, want, OTHER)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("rest, want", [(1, 1e-4), (600, 1e-2), (600, 1e-4)])
def test_small_entropies_are_accurate(rest, want):
    """One entry far above `rest` equal ones, placed in the first, a middle and the last tile."""
    low, high = 1.0, 60.0
    for _ in range(100):
        z = (low + high) / 2
        r = rest * math.exp(-z)
        low, high = (z, high) if math.log1p(r) + r * z / (1 + r) > want else (low, z)
    for place in (0, rest // 2, rest):
        weight = torch.zeros(rest + 1, 8, device=DEVICE, dtype=OTHER)
        weight[:, 0] = -round(z * 32) / 32
        weight[place] = 0
        hidden = torch.ones(1, 8, device=DEVICE, dtype=OTHER)
        targets = torch.tensor([place], device=DEVICE)
        logp, entropy = linear_logprob_entropy(hidden, weight, targets, impl="triton")
        truth = linear_logprob_entropy(*doubles(hidden, weight), targets, impl="reference")
        assert entropy.item() == pytest.approx(truth[1].item(), rel=1e-3)
        assert logp.item() == pytest.approx(truth[0].item(), rel=1e-3)


@pytest.mark.usefixtures("kernel")
def test_ignored_rows_are_never_read():
    hidden, weight, targets, _ = problem(180, 40, 517, OTHER)  # two blocks of rows, also without the ignored ones
    want = linear_logprob_entropy(*doubles(hidden, weight), targets, impl="reference")
    hidden[targets == -100] = math.nan
    for ours, truth in zip(linear_logprob_entropy(hidden, weight, targets, impl="triton"), want, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("kernel")
def test_all_rows_ignored():
    hidden, weight, targets, _ = problem(140, 40, 300, OTHER)
    for numbers in linear_logprob_entropy(hidden, weight, torch.full_like(targets, -100), impl="triton"):
        assert not numbers.any()


@pytest.mark.usefixtures("kernel")
def test_targets_outside_the_vocabulary_give_nan():
    """The forward pass does not synchronise, so it cannot raise: such rows are NaN, and the backward pass raises."""
    hidden, weight, targets, _ = problem(9, 40, 300, OTHER)
    targets[:2] = torch.tensor([300, -1])
    logp, entropy = linear_logprob_entropy(hidden, weight, targets, impl="triton")
    assert logp[:2].isnan().all() and entropy[:2].isnan().all()
    assert logp[2:].isfinite().all() and entropy[2:].isfinite().all()


@pytest.mark.usefixtures("kernel")
def test_equal_scores():
    hidden, weight = (
        torch.zeros(3, 8, device=DEVICE, dtype=OTHER),
        torch.ones(777, 8, device=DEVICE, dtype=OTHER),
    )
    logp, entropy = linear_logprob_entropy(hidden, weight, torch.tensor([0, 500, 776], device=DEVICE), impl="triton")
    assert logp.tolist() == pytest.approx([-math.log(777)] * 3)
    assert entropy.tolist() == pytest.approx([math.log(777)] * 3)


@pytest.mark.usefixtures("kernel")
def test_no_rows():
    hidden, weight, targets, _ = problem(0, 16, 50, STORED)
    for frozen in (False, True):
        logp, _, *grads = run(hidden, weight, targets, torch.ones(0, device=DEVICE), frozen=frozen, impl="triton")
        assert logp.shape == (0,) and not any(t.any() for t in grads)


def test_auto_selects_triton_where_it_can_run():
    hidden, weight, _, _ = problem(5, 16, 50, OTHER)
    assert linear.backend_for("auto", hidden, weight).__name__ == "dew.kernels.triton"
    assert linear.backend_for("auto", hidden[:, :3].contiguous(), weight).__name__ == "dew.kernels.chunked"


def test_without_gluon_the_generic_kernel_is_used_and_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(backend, "_is_hopper", lambda device: True)
    monkeypatch.setattr(backend, "hopper_failed", [])
    monkeypatch.setitem(sys.modules, "dew.kernels.hopper", None)
    monkeypatch.delattr(dew.kernels, "hopper", raising=False)
    hidden, weight, targets, _ = problem(9, 40, 300, OTHER)
    want = linear_logprob_entropy(*doubles(hidden, weight), targets, impl="reference")
    with caplog.at_level(logging.INFO, "dew"):
        for _ in range(2):
            got = linear_logprob_entropy(hidden, weight, targets, impl="triton")
    assert len(caplog.records) == len(backend.hopper_failed) == 1 and "Hopper" in caplog.text
    for ours, truth in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=2e-5, atol=2e-5)


if HOPPER:

    @pytest.mark.parametrize("dtype, shape", CASES)
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_values(dtype, shape, temperature, kernel):
        hidden, weight, targets, _ = problem(*shape, dtype)
        for y in (targets, targets.clamp_min(0)):
            got = linear_logprob_entropy(hidden, weight, y, temperature=temperature, impl="triton")
            want = linear_logprob_entropy(*doubles(hidden, weight), y, temperature=temperature, impl="reference")
            assert_near(got, want, dtype)

    def test_both_kernels_agree(monkeypatch):
        """Items of six, five, two and one tile; few and many row blocks; one step of depth and more."""
        for n, d, v in [(32_768, 576, 49_152), (5000, 64, 32_000), (768, 200, 49_152), (130, 128, 777), (63, 192, 9)]:
            hidden, weight, targets, _ = problem(n, d, v, torch.bfloat16)
            for y in (targets, targets.clamp_min(0)):
                got = linear_logprob_entropy(hidden, weight, y, temperature=0.9, impl="triton")
                with monkeypatch.context() as patch:
                    patch.setattr(backend, "_is_hopper", lambda device: False)
                    want = linear_logprob_entropy(hidden, weight, y, temperature=0.9, impl="triton")
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert not backend.hopper_failed


if not INTERPRETED:

    def test_errors_are_no_larger_than_the_naive_path():
        hidden, weight, targets, _ = problem(2048, 896, 32_000, torch.bfloat16, scale=0.6)
        targets = targets.clamp_min(0)
        g = torch.randn(2048, device=DEVICE)
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logq = torch.log_softmax((x @ w.T).float(), -1)
        logp, entropy = logq.gather(1, targets[:, None])[:, 0], -(logq.exp() * logq).sum(1)
        naive = [logp, entropy, *torch.autograd.grad((g * logp).sum(), (x, w))]
        exact = run(*doubles(hidden, weight), targets, g, impl="reference")
        for ours, theirs, truth in zip(run(hidden, weight, targets, g), naive, exact, strict=True):
            assert (ours - truth).norm() <= (theirs - truth).norm()

    def test_memory_of_the_four_product_path(monkeypatch):
        """At most half a gibibyte beyond the gradients, at the 7B shape."""
        monkeypatch.setattr(linear, "_what_to_save", lambda *args: "scores")
        hidden = torch.randn(16_384, 3_584, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        weight = (torch.randn(152_064, 3_584, device=DEVICE) / 60).bfloat16().requires_grad_()
        targets = torch.randint(152_064, (16_384,), device=DEVICE)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logp, _ = linear_logprob_entropy(hidden, weight, targets)
        logp.sum().backward()
        extra = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
        assert extra <= 1 << 29, f"{extra / 2**20:.0f} MiB"

    @pytest.mark.parametrize("frozen", [False, True])
    def test_torch_compile_keeps_one_graph(frozen):
        hidden, weight, targets, _ = problem(256, 64, 1024, torch.bfloat16)
        hidden.requires_grad_(), weight.requires_grad_(not frozen)

        def loss(h, w):
            logp, entropy = linear_logprob_entropy(h, w, targets, impl="triton")
            return (logp * 2 + entropy).sum()

        inputs = [hidden] if frozen else [hidden, weight]
        want = torch.autograd.grad(loss(hidden, weight), inputs)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for ours, eager in zip(torch.autograd.grad(compiled(hidden, weight), inputs), want, strict=True):
            assert (ours - eager).norm() <= 1e-2 * eager.norm()


# ── drawing a token ─────────────────────────────────────────────────────────────────────────────────────────


def drawn(logits, u, temperature, monkeypatch, block=64):
    from dew.decoding import fused

    monkeypatch.setattr(fused, "BLOCK", block)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: u.to(DEVICE))
    return [x.cpu() for x in fused.draw(logits.to(DEVICE), temperature)]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_drawn_token_inverts_the_cumulative_distribution(temperature, monkeypatch):
    """The first number chooses a block of 64 tokens by its mass, the second the token within it."""
    torch.manual_seed(0)
    rows, v = 12, 300
    logits = 3 * torch.randn(rows, v)
    logits[1, 60:250] = -torch.inf  # whole blocks without mass
    logits[2] = torch.where(torch.arange(v) == 299, 40.0, 0.0)  # nearly certain
    logits[3, :] = 5.0
    u = torch.rand(rows, 2)
    u[4], u[5], u[1] = torch.tensor([0.0, 0.0]), torch.tensor([1 - 2**-24, 1 - 2**-24]), torch.tensor([0.999, 0.999])
    token, logp, entropy = drawn(logits, u, temperature, monkeypatch)
    q = (logits.double() / temperature).log_softmax(-1)
    p = q.exp()
    for i in range(rows):
        blocks = p[i].split(64)
        mass = torch.stack([b.sum() for b in blocks]).cumsum(0)
        b = min(int((mass <= u[i, 0] * mass[-1]).sum()), 4)
        inner = blocks[b].cumsum(0)
        expected = 64 * b + min(int((inner <= u[i, 1] * inner[-1]).sum()), len(inner) - 1)
        assert token[i] == expected
    torch.testing.assert_close(logp.double(), q.gather(1, token[:, None])[:, 0], rtol=2e-5, atol=2e-5)
    h = -(p * q.clamp_min(-1e30)).sum(1)
    torch.testing.assert_close(entropy.double(), h, rtol=2e-5, atol=1e-12)


@pytest.mark.skipif(INTERPRETED, reason="too slow in the interpreter")
def test_frequencies_of_drawn_tokens():
    from scipy.stats import chisquare

    from dew.decoding import fused

    n = 200_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf], device=DEVICE)
    counts = torch.bincount(fused.draw(logits.expand(n, -1).contiguous(), 0.7)[0], minlength=5).cpu()
    expected = n * (logits[:4] / 0.7).softmax(-1).double().cpu()
    assert counts[4] == 0 and chisquare(counts[:4].numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma"])
def test_fused_parts_of_a_decoder(family):
    """Greedy answers as without them. Gemma's norm computes something else, and stays."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from dew.decoding import Decoder, Draw
    from dew.decoding.decoder import _fused_parts

    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 40,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **shape, num_key_value_heads=2, head_dim=8, initializer_range=0.5)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    decoder = Decoder(model, Draw(greedy=True), ends=[1], pad=0)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    decoder.parts, decoder.attention = [], "dew_grouped"
    expected = decoder.answers(prompts, 6)
    decoder._release()
    decoder.parts, decoder.attention = _fused_parts(model)
    assert decoder.attention == "dew_fused"
    norms = {"qwen2": 5, "qwen3": 9, "llama": 5, "gemma": 0}[family]
    assert len(decoder.parts) == norms + 1
    assert decoder.answers(prompts, 6) == expected
    assert all("forward" not in vars(m) for m in model.modules())


@pytest.mark.parametrize(("heads", "shared", "width"), [(14, 2, 64), (3, 3, 24), (20, 1, 128)])
def test_attention_of_single_tokens(heads, shared, width):
    """Against PyTorch's, with hidden slots at both ends, whole blocks of them among them, and keys that are a view."""
    from dew.decoding.decoder import grouped_attention
    from dew.decoding.fused import attention

    torch.manual_seed(0)
    rows, slots, seen = 3, 512, 384
    query = torch.randn(rows, 1, heads, width, device=DEVICE).transpose(1, 2)
    keys, values = (x[:, :, :seen] for x in torch.randn(2, rows, shared, slots, width, device=DEVICE))
    mask = torch.zeros(rows, 1, 1, seen, device=DEVICE)
    mask[0, ..., :140], mask[1, ..., 5:], mask[2, ..., :200], mask[2, ..., 201:] = (-torch.inf,) * 4
    found, expected = (f(None, query, keys, values, mask, 0.3)[0] for f in (attention, grouped_attention))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2, 0, 0], values[2, 0, 200], rtol=1e-5, atol=1e-5)  # a single visible slot
