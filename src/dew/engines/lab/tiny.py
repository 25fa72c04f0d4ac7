"""Many small transformers at once: every parameter has a leading replica axis R, and batched products compute all.

Axes, in addition to P, G and T: R replicas, B answers per replica, L prompt tokens, S = L + T positions.
"""

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dew.engines.lab.study_settings import HEAD
from dew.engines.lab.tasks import EOS, OUTPUTS, PAD, VOCABULARY, Answers

Parameters = dict[str, Tensor]
HAS_TRITON = importlib.util.find_spec("triton") is not None
MAX_GRADIENT_NORM = 1.0
BETAS = (0.9, 0.99)
ALIGNED = 32
"""Parameters start at multiples of this many elements in the flat tensor: fast matrix products need alignment."""


def new_policy(width: int, depth: int, positions: int, generator: torch.Generator) -> Parameters:
    """One untrained policy (R = 1): a pre-norm transformer without biases, with parameter-free layer norms."""

    def normal(*shape: int, std: float = 0.02) -> Tensor:
        return torch.randn(1, *shape, generator=generator) * std

    found = {"embed": normal(VOCABULARY, width), "position": normal(positions, width), "out": normal(width, OUTPUTS)}
    for i in range(depth):
        found[f"{i}.qkv"] = normal(width, 3 * width)
        found[f"{i}.project"] = normal(width, width, std=0.02 / math.sqrt(2 * depth))
        found[f"{i}.up"] = normal(width, 4 * width)
        found[f"{i}.down"] = normal(4 * width, width, std=0.02 / math.sqrt(2 * depth))
    return found


def forward(
    parameters: Mapping[str, Tensor], ids: Tensor, *, last: int, cache: Tensor | None = None, start: int = 0,
    shared: tuple[int, int] = (0, 1),
) -> Tensor:  # fmt: skip
    """(R, B, S) ids -> (R, B, last, OUTPUTS) logits of the last positions.

    With a KV cache, (layers, 2, R·B, H, S, d), `ids` are the tokens from position `start` on, whose keys and values
    are written to it. `shared`: the prompt length and the number of neighbouring rows that have the same prompt.
    """
    R, B, S = ids.shape
    D = parameters["embed"].shape[-1]
    heads, fast = max(1, D // HEAD), _kernels(parameters["embed"])
    norm = fast.Norm.apply if fast else lambda x: F.layer_norm(x, (D,))
    attend, attend_once = (fast.Attention.apply, fast.query_attention) if fast else (attention, query_attention)
    one_hot = F.one_hot(ids.reshape(R, B * S), VOCABULARY).float()  # a product's gradient is faster than a lookup's
    x = torch.bmm(one_hot, parameters["embed"]).view(R, B, S, D) + parameters["position"][:, None, start : start + S]
    x = x.reshape(R, B * S, D)
    for i in range(sum(name.endswith("qkv") for name in parameters)):
        qkv = torch.bmm(norm(x), parameters[f"{i}.qkv"]).view(R * B, S, 3, heads, D // heads)
        if cache is not None:
            keys, values = cache[i]
            keys[:, :, start : start + S], values[:, :, start : start + S] = qkv.permute(2, 0, 3, 1, 4)[1:]
        mixed = attend_once(qkv, keys, values, start + 1, *shared) if start else attend(qkv)
        x = torch.baddbmm(x, mixed.reshape(R, B * S, D), parameters[f"{i}.project"])
        inner = torch.bmm(norm(x), parameters[f"{i}.up"]).relu_()
        x = torch.baddbmm(x, inner, parameters[f"{i}.down"])
    x = norm(x.view(R, B, S, D)[:, :, S - last :].reshape(R, B * last, D))
    return torch.bmm(x, parameters["out"]).view(R, B, last, OUTPUTS)


def _kernels(embed: Tensor) -> Any:
    """The module with Triton kernels if they can be used, else None."""
    usable = HAS_TRITON and embed.is_cuda and embed.shape[-1] % HEAD == 0
    return importlib.import_module("dew.engines.lab.kernels") if usable else None


def attention(qkv: Tensor) -> Tensor:
    """Causal attention: (N, S, 3, H, d) queries, keys and values -> (N, S, H, d)."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def query_attention(qkv: Tensor, keys: Tensor, values: Tensor, length: int, prompt: int, group: int) -> Tensor:
    """Attention of one query per row, (N, 1, 3, H, d), to the first `length` of its (N, H, S, d) keys: (N, 1, H, d)."""
    query = qkv[:, :, 0].transpose(1, 2)
    weights = (query @ keys[:, :, :length].transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1)
    return (weights @ values[:, :, :length]).transpose(1, 2)


def token_logp(logits: Tensor, tokens: Tensor) -> Tensor:
    """log π of each token. PAD, which cannot be sampled, gets that of token 0: mask it."""
    target = torch.where(tokens < OUTPUTS, tokens, 0)
    return -F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none").view_as(tokens)


@torch.no_grad()
def sample(parameters: Mapping[str, Tensor], prompts: Tensor, uniforms: Tensor) -> Answers:
    """Sample answers to (R, P, L) prompts by inverse transform: one uniform number (R, P·G, T) decides each token.

    Equal policies with the same uniform numbers give the same answers. This pairs the arms of a study.
    """
    R, P, L = prompts.shape
    B, T = uniforms.shape[1:]
    G, width, embed = B // P, parameters["embed"].shape[-1], parameters["embed"]
    heads, depth = max(1, width // HEAD), sum(name.endswith("qkv") for name in parameters)
    by_group = embed.new_empty(depth, 2, R * P, G, heads, L + T, width // heads)  # keys and values of each layer
    logits = forward(parameters, prompts, last=1, cache=by_group[:, :, :, 0])[:, :, 0]
    by_group[:, :, :, 1:, :, :L] = by_group[:, :, :, :1, :, :L]  # a group has one prompt
    logits, cache = logits.repeat_interleave(G, 1), by_group.flatten(2, 3)
    tokens = torch.full((R, B, T), PAD, device=prompts.device)
    signals = uniforms.new_zeros(3, R, B, T)
    for t in range(T):
        logp = logits.log_softmax(-1)
        p = logp.exp()
        token = (p.cumsum(-1) < uniforms[:, :, t, None]).sum(-1).clamp_max(OUTPUTS - 1)
        own = logp.gather(-1, token[..., None])[..., 0]
        signals[..., t] = torch.stack([own, -(p * logp).sum(-1), p.square().sum(-1)])
        tokens[:, :, t] = torch.where(tokens[:, :, t - 1] >= EOS, PAD, token) if t else token
        if t == T - 1 or (t % 16 == 15 and bool((tokens[:, :, t] >= EOS).all())):
            break
        newest = tokens[:, :, t, None]
        logits = forward(parameters, newest, last=1, cache=cache, start=L + t, shared=(L, G))[:, :, 0]
    return Answers(tokens, signals[0], signals[1], tokens != PAD, signals[2])


class TinyPolicies:
    """R policies that start from the same parameters, each with its own learning rate."""

    noise = ()
    """Shape of the uniform numbers that decide one token."""
    refills = False
    """Whether `sample` accepts any number of answers: rows that have ended are refilled with waiting prompts."""

    def __init__(self, start: Parameters, rates: Tensor) -> None:
        self.parameters = {n: p.to(rates.device).repeat(len(rates), 1, 1).requires_grad_() for n, p in start.items()}
        self.adam = Adam(self.parameters, rates)

    def sample(self, problems: Tensor, uniforms: Tensor) -> Answers:
        return sample(self.parameters, problems, uniforms)

    def passes(self, problems: Tensor, lengths: Tensor) -> list[tuple[slice, Tensor]]:
        """The rows of an optimizer step that are scored one after the other, each with the problems for `score`."""
        return [(slice(None), problems)]

    def score(
        self, problems: Tensor, tokens: Tensor, mask: Tensor, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(R, b, T) log π of the tokens and, with `entropy`, the entropies, without gradient."""
        logits = forward(self.parameters, torch.cat([problems, tokens[..., :-1]], -1), last=tokens.shape[-1])
        found = token_logp(logits, tokens)
        if not entropy:
            return found, None
        logp = logits.detach().log_softmax(-1)
        return found, -(logp.exp() * logp).sum(-1)


class Adam:
    """Adam with a learning rate and gradient clipping per replica. A step skips replicas without a finite gradient.

    Parameters and gradients become views of flat (R, N) tensors, so that one operation updates all of them.
    """

    def __init__(
        self, parameters: Parameters, rates: Tensor, betas: tuple[float, float] = BETAS,
        changed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`changed` is called after each change of the parameters."""
        self.rates, self.betas, self.steps, self.changed = rates, betas, torch.zeros_like(rates), changed
        self.parameters = list(parameters.values())
        sizes = [p[0].numel() for p in self.parameters]
        aligned = [n + -n % ALIGNED for n in sizes]
        new = partial(torch.zeros, len(rates), sum(aligned), device=rates.device)
        self.values, self.gradients, self.first, self.second = (new() for _ in range(4))
        parts = (x.split(aligned, 1) for x in (self.values, self.gradients))
        for p, n, value, gradient in zip(self.parameters, sizes, *parts, strict=True):
            own = value[:, :n].view(p.shape).copy_(p.detach())
            p.data, p.grad = own, gradient[:, :n].view(p.shape)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss."""
        with deterministic():
            found = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        into: Any = [p.grad for p in self.parameters]
        torch._foreach_add_(into, list(found))

    @torch.no_grad()
    def step(self) -> Tensor:
        """Take a step; return (R,) gradient norms before clipping."""
        norm = torch.linalg.vector_norm(self.gradients, dim=1)
        active = ((norm > 0) & norm.isfinite()).float()[:, None]
        scale = (MAX_GRADIENT_NORM / (norm + 1e-6)).clamp_max(1)[:, None]
        self.steps += active[:, 0]
        (b1, b2), count = self.betas, self.steps.clamp_min(1)[:, None]
        g = torch.where(active.bool(), self.gradients.mul_(scale), 0)  # a product with 0 would keep NaN
        self.first.lerp_(g, (1 - b1) * active)
        self.second.lerp_(g.square_(), (1 - b2) * active)
        root = torch.sqrt(self.second, out=g).div_((1 - b2**count).sqrt()).add_(1e-8)
        self.values.sub_(torch.div(self.first, root, out=root).mul_(self.rates[:, None] * active / (1 - b1**count)))
        self.gradients.zero_()
        self.changed()
        return norm

    def state(self) -> list[Tensor]:
        """The parameters and Adam's state."""
        return [self.values, self.steps, self.first, self.second]

    @torch.no_grad()
    def load(self, state: list[Tensor]) -> None:
        for own, kept in zip(self.state(), state, strict=True):
            own.copy_(kept)
        self.changed()


@contextmanager
def numerics() -> Iterator[None]:
    """Compute matrix products in TF32 on a GPU, with a fixed order of summation."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is initialised
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms, e.g. in the backward pass of attention: the same seed gives the same results."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # a debugging aid that writes every tensor twice
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
