"""Norms and rotary embeddings of a transformers model in one kernel each, for steps of one token.

As written in transformers they take 8 and 10 kernels, which at this size is half of a step's time. A part is replaced
only if it is found to compute the same.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

Part = tuple[Any, str, Callable[..., Any]]
"""An object, the name of one of its attributes, and what to call instead."""
TOLERANCE = 0.02
"""Relative; bfloat16 rounds at other places."""


@triton.jit
def _rotary_kernel(x, x_row, x_head, cos, sin, c_row, out, heads, half, HALF: tl.constexpr):
    row, head, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, HALF)
    at, angle, to = x + row * x_row + head * x_head + i, row * c_row + i, (row * heads + head) * 2 * half + i
    live = i < half
    a, b = tl.load(at, mask=live).to(tl.float32), tl.load(at + half, mask=live).to(tl.float32)
    c, d = tl.load(cos + angle, mask=live).to(tl.float32), tl.load(cos + angle + half, mask=live).to(tl.float32)
    s, t = tl.load(sin + angle, mask=live).to(tl.float32), tl.load(sin + angle + half, mask=live).to(tl.float32)
    tl.store(out + to, a * c - b * s, mask=live)
    tl.store(out + to + half, b * d + a * t, mask=live)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of (B, heads, 1, D) queries and keys with (B or 1, 1, D) angles."""
    found = []
    for x in (q, k):
        rows, heads, _, width = x.shape
        out, shared = torch.empty(x.shape, dtype=x.dtype, device=x.device), cos.shape[0] == 1
        _rotary_kernel[(rows, heads)](
            x, x.stride(0), x.stride(1), cos, sin, 0 if shared else cos.stride(0), out, heads, width // 2,
            triton.next_power_of_2(width // 2), num_warps=1,
        )  # fmt: skip
        found.append(out)
    return found[0], found[1]


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def fused_parts(model: Any) -> list[Part]:
    """What can be replaced in this model."""
    like = model.get_input_embeddings().weight
    norms = [m for m in model.modules() if hasattr(m, "variance_epsilon") and type(m).__name__.endswith("RMSNorm")]
    parts: list[Part] = [(norm, "forward", partial(rms_norm, norm)) for norm in norms if _same_norm(norm, like)]
    home, name = sys.modules[type(model).__module__], "apply_rotary_pos_emb"
    if hasattr(home, name) and _same_rotary(getattr(home, name), model.config.get_text_config(), like):
        parts.append((home, name, rotary))
    return parts


def _same_norm(norm: Any, like: Tensor) -> bool:
    x = torch.linspace(-3, 2, norm.weight.numel(), dtype=like.dtype, device=like.device)[None]
    plain = "forward" not in vars(norm) and norm.weight.dtype == like.dtype
    return plain and _near(norm(x), rms_norm(norm, x))


def _same_rotary(own: Callable[..., Any], config: Any, like: Tensor) -> bool:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q = torch.linspace(-3, 2, 4 * width, dtype=like.dtype, device=like.device).view(2, 2, 1, width)
    angle = torch.linspace(0, 3, 2 * width, dtype=like.dtype, device=like.device).view(2, 1, width)
    given = (q, q.flip(0), angle.cos(), angle.sin())
    return all(map(_near, own(*given), rotary(*given)))


def _near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).norm() <= TOLERANCE * expected.norm())
