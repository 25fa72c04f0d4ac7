"""Compile every Triton kernel for GPUs of one architecture, without one. Run by test_triton.py:

python compile_cases.py 90                      Hopper; 75 Turing, 80 Ampere, 89 Ada, 100 and 120 Blackwell
python compile_cases.py 90 decoder draws        some of the cases
"""

import sys
from functools import partial
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dew.decoding import draw_kernel, fused
from dew.engines.lab import kernels
from dew.engines.lab.adapters import Rows
from dew.engines.lab.lora_kernels import AdaptedLinear, Layout
from dew.kernels import Head, triton
from dew.kernels.chunked import Statistics

ARCHITECTURE = int(sys.argv[1])
SHARED = {75: 64, 80: 163, 89: 99, 90: 227, 100: 227, 120: 99}[ARCHITECTURE] * 1024
"""Bytes of shared memory that a program may have."""
used = dict[str, int]()
"""Kernels that were compiled, and the most shared memory that each needs."""


def compile_only(kernel, *args, grid, warmup, **settings):
    found = launch(kernel, *args, grid=grid, warmup=True, **settings)
    used[kernel.__name__] = max(found.metadata.shared, used.get(kernel.__name__, 0))


launch, JITFunction.run = JITFunction.run, compile_only
gpu = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", ARCHITECTURE, 32))
gpu.get_current_device = gpu.get_current_stream = lambda *_: 0
driver.set_active(gpu)


def rows(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def decoder(heads=14, shared=2, width=64, dtype=torch.bfloat16):
    """A step of one token."""
    q, k, angles = rows(4, heads, 1, width, dtype=dtype), rows(4, shared, 1, width, dtype=dtype), rows(4, 1, width)
    fused.rotary(q, k, angles, angles)
    pages, table = rows(6, shared, 64, width, dtype=dtype), rows(4, 1, 1, 4, dtype=torch.int32)
    for parts in (1, 8):
        fused.attention(None, q, pages, pages, table, parts=parts)
    fused.store(k, k, pages, pages, table)
    mlp = SimpleNamespace(down_proj=lambda y: y)
    fused.gated(mlp, rows(256, 64, dtype=dtype), None, rows(4, 1, 64, dtype=dtype))


def draws():
    for squares in (False, True):
        draw_kernel.draw(rows(4, 151_936).float(), 1.0, rows(4, 2).float(), squares)


def statistics(dtype=torch.bfloat16):
    for store in (None, rows(256, 1040, dtype=dtype)[:, :1031]):
        triton.statistics(rows(256, 64, dtype=dtype), Head(rows(1031, 64, dtype=dtype)), rows(256).long(), store)


def gradient(dtype=torch.bfloat16):
    hidden, head, one = rows(256, 64, dtype=dtype), Head(rows(1031, 64, dtype=dtype)), rows(256).float()
    for ge in (None, one):
        given = hidden, head, one.long(), Statistics(one, one, one, one), one, ge, 0
        triton.gradient_tile(*given, rows(256, 512, dtype=dtype))


def small_policies():
    kernels.Attention.apply(rows(2, 33, 3, 2, 32).float().requires_grad_()).sum().backward()
    kernels.query_attention(rows(4, 1, 3, 2, 32).float(), *[rows(4, 2, 45, 32).float()] * 2, 31, 7, 2)
    kernels.Norm.apply(rows(3, 5, 128).float())


def adapters(parts=3, gated=False):
    width, r, owners = 128, 16, Rows(2, "cpu")
    owners.count(torch.tensor([60, 40]), 100)
    x, weight, low = rows(100, width).requires_grad_(), rows(width * parts, width), rows(2, width * parts, r)
    layouts = [Layout([width], r * parts, x.device), Layout([width] * parts, r, x.device)]
    trained = [rows(2, width, r).float().requires_grad_() for _ in range(2 * parts)]
    given = (rows(2, width, r * parts), low), layouts, owners[100], 2.0, gated
    found = AdaptedLinear.apply(x, weight, None, *given, *trained)
    sum(y.float().sum() for y in (found if isinstance(found, tuple) else (found,))).backward()


CASES = {
    "decoder": [partial(decoder, dtype=x) for x in (torch.bfloat16, torch.float16, torch.float32)],
    "wide heads": [partial(decoder, 28, 4, 128)],
    "draws": [draws],
    "lab": [small_policies, adapters, partial(adapters, 2, True)],
}
if ARCHITECTURE in (90, 100):
    for case in (statistics, gradient):
        CASES[case.__name__] = [case, partial(case, torch.float16)]
for name, cases in CASES.items():
    for case in cases if name in sys.argv or len(sys.argv) == 2 else ():
        case()
for name, size in used.items():
    print(f"{name}: {size:,} bytes of shared memory")
    assert size <= SHARED, name
