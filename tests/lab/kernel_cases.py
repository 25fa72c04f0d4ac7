"""The lab's Triton kernels against PyTorch, on a GPU or in Triton's interpreter. Run by kernels/test_triton.py."""

import os

import pytest
import torch
import torch.nn.functional as F

from dew.engines.lab import kernels, tiny
from dew.engines.lab.adapters import Rows, _adapted
from dew.engines.lab.lora_kernels import AdaptedLinear, Layout
from dew.engines.lab.tasks import VOCABULARY, generator, get_task
from dew.engines.lab.tiny import forward, new_policy, numerics, sample, token_logp

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def normal(*shape, scale=1.0):
    return (scale * torch.randn(*shape, generator=generator(*shape))).to(DEVICE)


def near(found, expected, tolerance=2e-6):
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.1e}"


def near_with_gradient(kernel, function, x, g):
    fast, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    out, expected = kernel.apply(fast), function(exact)
    near(out, expected)
    out.backward(g)
    expected.backward(g.double())
    near(fast.grad, exact.grad)


@pytest.mark.parametrize("S", [1, 33, 65] if DEVICE == "cpu" else [1, 7, 32, 33, 64, 65, 130])
def test_attention_and_its_gradient(S):
    near_with_gradient(kernels.Attention, tiny.attention, normal(2, S, 3, 2, 32, scale=2.0), normal(2, S, 2, 32))


@pytest.mark.parametrize("length", [8, 31, 32, 45])
def test_attention_of_one_query(length):
    qkv, keys, values = normal(4, 1, 3, 2, 32), normal(4, 2, 45, 32, scale=2.0), normal(4, 2, 45, 32).cos()
    for x in (keys, values):
        x[:, :, length:] = torch.nan  # not written yet
        x[1::2, :, :7] = x[::2, :, :7]  # prompts of two neighbours
    expected = tiny.query_attention(*(x.double() for x in (qkv, keys, values)), length, 7, 2)
    for x in (keys, values):
        x[1::2, :, :7] = torch.nan  # only the first one's are read
    near(kernels.query_attention(qkv, keys, values, length, 7, 2), expected)


@pytest.mark.parametrize("shape", [(3, 5, 128), (1, 9, 192)])
def test_norm(shape):
    x, g = normal(*shape, scale=3.0) + 1, normal(*shape).cos()
    near_with_gradient(kernels.Norm, lambda x: F.layer_norm(x, shape[-1:]), x, g)


def test_a_policy_samples_and_learns_as_without_kernels(monkeypatch):
    task = get_task("countdown-3")
    problems = task.problems(2, generator(1), device=DEVICE)
    width, depth = (32, 1) if DEVICE == "cpu" else (64, 2)  # the interpreter is slow
    start = new_policy(width, depth, task.prompt_length + task.tokens, generator(0))
    uniforms = torch.rand(1, 4, task.tokens, generator=generator(2)).to(DEVICE)

    def run(module):
        monkeypatch.setattr(tiny, "_kernels", lambda _: module)
        parameters = {name: (5 * p).to(DEVICE).requires_grad_() for name, p in start.items()}
        answers = sample(parameters, problems.prompt, uniforms)
        ids = torch.cat([problems.prompt.repeat_interleave(2, 1), answers.tokens[..., :-1]], -1)
        logp = token_logp(forward(parameters, ids, last=task.tokens), answers.tokens)
        (logp * answers.mask).sum().backward()
        return answers, logp.detach(), {name: p.grad for name, p in parameters.items()}

    torch.backends.cuda.matmul.allow_tf32 = False
    (fast, fast_logp, fast_grad), (plain, _, plain_grad) = run(kernels), run(None)
    assert torch.equal(fast.tokens, plain.tokens) and int(fast.tokens.max()) < VOCABULARY
    for name in ("logp", "entropy", "sum_sq"):
        near(getattr(fast, name) * fast.mask, (getattr(plain, name) * plain.mask).double(), 1e-5)
    near(fast_logp * fast.mask, (plain.logp * plain.mask).double(), 1e-5)
    for name, grad in fast_grad.items():
        near(grad, plain_grad[name].double(), 1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="runs on a GPU")
def test_sampling_and_training_agree_in_tf32():
    """The same probabilities from the cache and from the whole sequence: a ratio of 1 before the first update."""
    task = get_task("countdown-6")
    parameters = {n: (4 * p).cuda() for n, p in new_policy(128, 3, 68, generator(0)).items()}
    problems = task.problems(8, generator(1), device="cuda")
    with numerics(), torch.no_grad():
        answers = sample(parameters, problems.prompt, torch.rand(1, 64, task.tokens, generator=generator(2)).cuda())
        ids = torch.cat([problems.prompt.repeat_interleave(8, 1), answers.tokens[..., :-1]], -1)
        logp = token_logp(forward(parameters, ids, last=task.tokens), answers.tokens)
    difference = ((logp - answers.logp) * answers.mask).abs()
    print("largest difference of log-probabilities", difference.max().item())
    assert difference.max() < 0.01


@pytest.mark.parametrize(
    ("width", "sizes", "r", "gated"),
    [(96, [192, 64, 64], 4, False), (600, [72], 16, False), (130, [128, 128], 8, False), (130, [128, 128], 8, True)],
)
def test_adapters_of_joined_layers(width, sizes, r, gated):
    """Three replicas, one of them without rows: outputs and all gradients."""
    rows = Rows(3, DEVICE)
    counts = torch.tensor([70, 0, 13], device=DEVICE)
    rows.count(counts, 83)
    x, weight, bias = normal(83, width), normal(sum(sizes), width, scale=0.1), normal(sum(sizes))
    a, b = [normal(3, width, r, scale=0.1) for _ in sizes], [normal(3, n, r, scale=0.5) for n in sizes]
    a = [(i + 1) * y for i, y in enumerate(a)]

    def outputs(x, a, b):
        base = F.linear(x, weight.to(x.dtype), bias.to(x.dtype)).split(sizes, 1)
        parts = zip(base, a, b, strict=True)
        found = [y + 0.7 * _adapted(x, A, B, rows[83][1].tolist()) for y, A, B in parts]
        return [F.silu(found[0]) * found[1]] if gated else found

    exact = [y.double().requires_grad_() for y in (x, *a, *b)]
    expected = outputs(exact[0], exact[1 : 1 + len(sizes)], exact[1 + len(sizes) :])
    fast = [y.clone().requires_grad_() for y in (x, *a, *b)]
    layouts = Layout([width], r * len(sizes), DEVICE), Layout(sizes, r, DEVICE)
    low = torch.cat(a, 2), torch.cat(b, 1)
    found = AdaptedLinear.apply(fast[0], weight, bias, low, layouts, rows[83], 0.7, gated, *fast[1:])
    found = [found] if torch.is_tensor(found) else found
    for y, z in zip(found, expected, strict=True):
        near(y, z)
    sum((y.sin() * (i + 1)).sum() for i, y in enumerate(found)).backward()
    sum((y.sin() * (i + 1)).sum() for i, y in enumerate(expected)).backward()
    for y, z in zip(fast, exact, strict=True):
        near(y.grad, z.grad, 1e-5)
