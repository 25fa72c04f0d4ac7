"""Tests of the Triton kernels, on a GPU or in Triton's interpreter. Run by test_triton.py."""

import math
import os
from unittest import mock

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime.errors import OutOfResources

import operator_cases
from dew.decoding import Decoder, Draw, buffers, draw_kernel, fused
from dew.decoding.decoder import _fused_parts
from dew.kernels import Head, linear, linear_logprob_entropy
from operator_cases import *  # noqa: F403
from operator_cases import Backend, assert_near, doubles, run

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
STORED, OTHER = (torch.float32, torch.float16) if INTERPRETED else (torch.bfloat16, torch.float16)
"""Stored weights need float32's exponent range; the interpreter's bfloat16 product is broken."""
SHAPES = [(1, 8, 1), (37, 40, 300), (130, 72, 517)]
if not INTERPRETED:
    SHAPES += [(1000, 576, 5003), (200, 896, 151_936)]
CASES = [(STORED, shape) for shape in SHAPES] + [(OTHER, (5, 8, 13)), (OTHER, (129, 64, 1024))]


def problem(n, d, v, dtype, *, scale=0.3):
    scale *= math.sqrt(64 / max(64, d))
    return operator_cases.problem(n, d, v, dtype, device=DEVICE, seed=n + d + v, scale=scale, ignored=True)[:3]


@pytest.fixture(params=["scores", "weights"])
def save(request, monkeypatch):
    monkeypatch.setattr(linear, "_what_to_save", lambda *args: request.param)
    return request.param


@pytest.fixture
def backend():
    return Backend("triton", DEVICE, OTHER, STORED)


@pytest.mark.parametrize("dtype, shape", CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(dtype, shape, temperature, save):
    hidden, weight, targets = problem(*shape, dtype)
    g = torch.randn(shape[0], device=DEVICE)
    g[2::5] = 0
    got = run(hidden, weight, targets, g, impl="triton", temperature=temperature)
    assert_near(got, run(*doubles(hidden, weight), targets, g, impl="reference", temperature=temperature), dtype)


def test_sum_of_squares(save):
    """PyTorch computes it, with the other results."""
    hidden, weight, targets = problem(37, 40, 300, STORED)
    for y in (targets, targets.clamp_min(0)):
        got = linear_logprob_entropy(hidden, weight, y, impl="triton", sum_sq=True)
        want = linear_logprob_entropy(*doubles(hidden, weight), y, impl="reference", sum_sq=True)
        for ours, truth in zip(got, want, strict=True):
            torch.testing.assert_close(ours.double(), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [STORED, OTHER])
def test_entropy_gradients(dtype):
    hidden, weight, targets = problem(37, 40, 300, dtype)
    g, ge = torch.randn(2, 37, device=DEVICE)
    got = run(hidden, weight, targets, g, ge, impl="triton", entropy_grad=True)
    assert_near(got, run(*doubles(hidden, weight), targets, g, ge, impl="reference", entropy_grad=True), dtype)


@pytest.mark.parametrize("dtype, shape", CASES)
def test_frozen_head(dtype, shape):
    hidden, weight, targets = problem(*shape, dtype)
    g = torch.randn(shape[0], device=DEVICE)
    got = run(hidden, weight, targets, g, frozen=True, impl="triton", temperature=0.8)
    x, w = doubles(hidden, weight)
    assert_near(got, run(x, w, targets, g, frozen=True, impl="reference", temperature=0.8), dtype)


@pytest.mark.parametrize("frozen, v, settings", [(False, 1100, {}), (True, 300, {"temperature": 0.8})])
def test_very_unlikely_targets(frozen, v, settings, monkeypatch):
    """p_v / p_y overflows: such rows are redone. Scores reach ±50 and beyond."""
    monkeypatch.setattr(linear, "_what_to_save", lambda *args: "slopes" if frozen else "weights")
    n = 140 if INTERPRETED else 300  # more than one block of rows
    hidden, weight, targets = problem(n, 64, v, STORED, scale=10.0)
    g = torch.randn(n, device=DEVICE)
    want = run(*doubles(hidden, weight), targets, g, frozen=frozen, impl="reference", **settings)
    assert (want[0] < -100).sum() > 20 and (want[0] > -20).any()
    got = run(hidden, weight, targets, g, frozen=frozen, impl="triton", **settings)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-3)
    for ours, truth in zip(got[2:], want[2:], strict=True):
        assert (ours.double() - truth).norm() <= 1e-2 * truth.norm()


def test_auto_selects_triton_where_it_can_run():
    hidden, weight, _ = problem(5, 16, 50, OTHER)
    assert linear.backend_for("auto", hidden, Head(weight)).__name__ == "dew.kernels.triton"
    for x, head in ((hidden[:, :3].contiguous(), Head(weight)), (hidden, Head(weight, softcap=30.0))):
        assert linear.backend_for("auto", x, head).__name__ == "dew.kernels.chunked"


if not INTERPRETED:

    def test_errors_are_no_larger_than_the_naive_path():
        hidden, weight, targets = problem(2048, 896, 32_000, torch.bfloat16, scale=0.6)
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


# ── drawing a token ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_drawn_token_inverts_the_cumulative_distribution(temperature, monkeypatch):
    """The first number chooses a block of 64 tokens by its mass, the second the token within it."""
    torch.manual_seed(0)
    rows, v = 6, 300
    logits = 3 * torch.randn(rows, v)
    logits[1, 60:250] = -torch.inf  # whole blocks without mass
    logits[2] = torch.where(torch.arange(v) == 299, 40.0, 0.0)  # nearly certain
    logits[3, :] = 5.0
    u = torch.rand(rows, 2)
    u[4], u[5], u[1] = torch.tensor([0.0, 0.0]), torch.tensor([1 - 2**-24, 1 - 2**-24]), torch.tensor([0.999, 0.999])
    monkeypatch.setattr(draw_kernel, "BLOCK", 64)
    found = draw_kernel.draw(logits.to(DEVICE), temperature, u.to(DEVICE), True)
    token, logp, entropy, squares = (x.cpu() for x in found)
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
    torch.testing.assert_close(squares.double(), p.square().sum(1), rtol=2e-5, atol=1e-12)


@pytest.mark.skipif(INTERPRETED, reason="too slow in the interpreter")
def test_frequencies_of_drawn_tokens():
    n = 200_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf], device=DEVICE)
    uniforms = torch.rand(n, 2, device=DEVICE)
    counts = torch.bincount(draw_kernel.draw(logits.expand(n, -1).contiguous(), 0.7, uniforms)[0], minlength=5).cpu()
    expected = n * (logits[:4].double() / 0.7).softmax(-1).cpu()
    assert counts[4] == 0 and chisquare(counts[:4].numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize(("longer", "trained"), [(0, True), (32, False)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma"])
def test_fused_parts_of_a_decoder(family, longer, trained, monkeypatch):
    """Greedy answers as without them. Gemma's norm and gate compute something else, and stay."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, **shape, num_key_value_heads=2, head_dim=8, initializer_range=0.5, vocab_size=40
    )
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval().requires_grad_(trained)
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    monkeypatch.setattr(buffers, "LONGER", longer)
    decoder = Decoder(model, Draw(greedy=True), ends=[1], pad=0)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    decoder.parts, decoder.attention = [], "dew_gathered"
    expected = decoder.answers(prompts, 4)
    decoder._release()
    decoder.parts, decoder.attention = _fused_parts(model)
    assert decoder.attention == "dew_fused"
    norms, products = {"qwen2": (5, 8), "qwen3": (9, 8), "llama": (5, 8), "gemma": (0, 10)}[family]
    assert len(decoder.parts) == norms + 1 + products * (not trained)
    assert decoder.answers(prompts, 4) == expected
    again, _ = _fused_parts(model)  # of another decoder: the weights stay where they are
    assert decoder.answers(prompts, 4) == expected and len(again) == len(decoder.parts)
    for p in model.parameters():  # as the copy that is sampled from is refreshed
        p.data.mul_(0.9)
    changed = decoder.answers(prompts, 4)
    decoder.parts, decoder.attention = [], "dew_gathered"
    decoder._release()
    assert changed == decoder.answers(prompts, 4)
    assert all("forward" not in vars(m) for m in model.modules())


def test_parts_whose_kernels_do_not_run_on_this_gpu_stay(monkeypatch):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("qwen2", **shape, num_key_value_heads=2, vocab_size=40)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval().requires_grad_(False)
    for name in ("_rotary_kernel", "_silu_kernel", "_attention_kernel"):
        monkeypatch.setitem(vars(fused), name, mock.MagicMock(**{"__getitem__.return_value": fails}))
    parts, attention = _fused_parts(model)
    assert attention == "dew_gathered" and len(parts) == 5 + 2 * 5  # norms; every product, but no gate as a whole
    assert not any(name == "apply_rotary_pos_emb" for _, name, _ in parts)


def fails(*_, **__):
    raise OutOfResources(240, 227, "shared memory")


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize(("heads", "shared", "width"), [(14, 2, 64), (3, 3, 24), (20, 1, 128)])
def test_attention_to_pages(heads, shared, width, parts):
    """What `store` writes and `attention` reads, against PyTorch's; a row that has ended writes and reads nothing."""
    torch.manual_seed(0)
    query = torch.randn(4, 1, heads, width, device=DEVICE).transpose(1, 2)
    pages = torch.randn(2, 9, shared, buffers.PAGE, width, device=DEVICE)
    rows = [[3, 70, 1, 65], [3, 70, 5, 1], [0, 0, 0, 0], [7, 64, 8, 3]]
    table = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    key, value = torch.randn(2, 4, shared, 1, width, device=DEVICE)
    before = pages.clone()
    fused.store(key, value, *pages, table)
    assert ((pages != before).any(-1).sum((0, 2, 3)) > 0).tolist() == [i in (2, 5, 8) for i in range(9)]
    for row, (page, slot) in {0: (2, 0), 1: (5, 0), 3: (8, 2)}.items():
        assert torch.equal(pages[:, page, :, slot], torch.stack([key, value])[:, row, :, 0])
    found = fused.attention(None, query, *pages, table[:, None, None], 0.3, parts)[0]
    side_by_side = [buffers.gather(x, table, (2, 2)) for x in pages]
    mask = buffers.hidden(table, (2, 2), torch.float32)
    expected = buffers.gathered_attention(None, query, *side_by_side, mask, 0.3)[0]
    live = [0, 1, 3]
    torch.testing.assert_close(found[live], expected[live], rtol=1e-5, atol=1e-5)
    assert not found[2].any()
