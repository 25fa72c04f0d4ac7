"""Draw a token from each row of logits, with its log-probability and the row's entropy, in one pass over the logits.

The vocabulary is cut into blocks. A first uniform number chooses the block and a second the token within it, each by
the cumulative sum of e^{z/T}: the block of the chosen token is the only one that is read twice. Statistics are
those of `dew.kernels.chunked`, in base 2 and merged over blocks, with q = (z − m) log2(e) / T of a block:

    m = max z      n = Σ 2^q      r = n without the maximum's own term      t = Σ 2^q q
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
BLOCK = 4096
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _ln1p(r):
    """log(1 + r), r ≥ 0, accurate for small r."""
    return tl.where(r < 1e-3, r * (1 - r * (0.5 - r / 3)), tl.log(1 + r))


@triton.jit
def _pick(weights, places, u):
    """The place at which the cumulative sum passes the share u of the total; never one of weight 0."""
    total = tl.cumsum(weights, axis=0)
    chosen = tl.sum((total <= u * tl.max(total, axis=0)).to(tl.int32), axis=0)
    return tl.minimum(chosen, tl.max(tl.where(weights > 0, places, 0), axis=0))


@triton.jit
def draw_kernel(z, stride, u, token, logp, entropy, v, s, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    at = z + row.to(tl.int64) * stride
    places = tl.arange(0, BLOCKS)
    inner = tl.arange(0, BLOCK)
    m = tl.full((BLOCKS,), LOWEST, tl.float32)
    n = tl.zeros((BLOCKS,), tl.float32)
    r = tl.zeros((BLOCKS,), tl.float32)
    t = tl.zeros((BLOCKS,), tl.float32)
    for block in range(tl.cdiv(v, BLOCK)):
        k = block * BLOCK + inner
        x = tl.maximum(tl.load(at + k, mask=k < v, other=LOWEST).to(tl.float32) * s, LOWEST)
        top = tl.max(x, axis=0)
        q = x - top
        e = tl.where(x > LOWEST, tl.exp2(q), 0.0)
        rest = tl.sum(tl.where(q < 0, e, 0.0), axis=0)
        ties = tl.sum(tl.where(q < 0, 0.0, e), axis=0)
        here = places == block
        m = tl.where(here, top, m)
        n = tl.where(here, rest + ties, n)
        r = tl.where(here, rest + (ties - 1), r)  # in this order: it keeps the digits of a small rest
        t = tl.where(here, tl.sum(e * q, axis=0), t)
    most = tl.max(m, axis=0)
    first = tl.min(tl.where(m == most, places, BLOCKS), axis=0)
    d = m - most
    share = tl.exp2(d)
    weights = share * n
    others = tl.sum(tl.where(places == first, r, weights), axis=0)
    spread = tl.sum(share * (t + n * d), axis=0)
    ln = _ln1p(others)
    h = ln - spread / (1 + others) * 0.6931471805599453

    block = _pick(weights, places, tl.load(u + 2 * row))
    k = block * BLOCK + inner
    x = tl.maximum(tl.load(at + k, mask=k < v, other=LOWEST).to(tl.float32) * s, LOWEST)
    top = tl.sum(tl.where(places == block, m, 0.0), axis=0)
    e = tl.where(x > LOWEST, tl.exp2(x - top), 0.0)
    chosen = _pick(e, inner, tl.load(u + 2 * row + 1))
    own = tl.sum(tl.where(inner == chosen, x, 0.0), axis=0)
    tl.store(token + row, (block * BLOCK + chosen).to(tl.int64))
    tl.store(logp + row, (own - most) * 0.6931471805599453 - ln)
    tl.store(entropy + row, tl.maximum(h, 0.0))


def draw(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, V) -> token, log-probability and entropy (B,)."""
    rows, v = logits.shape
    u = torch.rand(rows, 2, device=logits.device)
    token = torch.empty(rows, dtype=torch.long, device=logits.device)
    logp, entropy = torch.empty(2, rows, device=logits.device)
    blocks = triton.next_power_of_2(triton.cdiv(v, BLOCK))
    draw_kernel[(rows,)](
        logits, logits.stride(0), u, token, logp, entropy, v, LOG2E / temperature,
        BLOCK=BLOCK, BLOCKS=blocks, num_warps=8,
    )  # fmt: skip
    return token, logp, entropy
