"""Compile every Triton kernel for GPUs of one architecture, without one. Run by test_triton.py:

python compile_cases.py 90                      Hopper; 75 Turing, 80 Ampere, 89 Ada, 100 and 120 Blackwell
python compile_cases.py 90 decoder draws        some of the cases
"""

import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dew.decoding import draw_kernel, fused
from dew.engines.lab import kernels
from dew.engines.lab.adapters import Rows
from dew.engines.lab.lora_kernels import AdaptedLinear, Layout
from dew.engines.lab.tiny import OUTPUTS, SIGNALS
from dew.kernels import Head, triton
from dew.kernels.chunked import Statistics

KIB = 1024
SHARED = {75: 64 * KIB, 80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
"""Shared memory of a program on each architecture."""
ARCHITECTURE = int(sys.argv[1])
compiled: dict[str, int] = {}
"""Kernels, and the most shared memory that each needs."""


class Compiler:
    """Stands for a GPU's driver."""

    def get_current_target(self):
        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(kernel, *args, grid, warmup, **settings):
    found = launch(kernel, *args, grid=grid, warmup=True, **settings)
    assert found.asm["cubin"], kernel.__name__
    compiled[kernel.__name__] = max(found.metadata.shared, compiled.get(kernel.__name__, 0))


launch, JITFunction.run = JITFunction.run, compile_only
driver.set_active(Compiler())


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
        draw_kernel.draw(rows(4, 151_936, dtype=torch.float32), 1.0, rows(4, 2, dtype=torch.float32), squares)


def statistics(dtype=torch.bfloat16):
    for store in (None, *[rows(256, 1040)[:, :1031]] * (dtype == torch.bfloat16)):
        triton.statistics(rows(256, 64, dtype=dtype), Head(rows(1031, 64, dtype=dtype)), rows(256).long(), store)


def gradient(dtype=torch.bfloat16):
    hidden, head, one = rows(256, 64, dtype=dtype), Head(rows(1031, 64, dtype=dtype)), rows(256).float()
    for ge in (None, one):
        stats = Statistics(one, one, one, one)
        triton.gradient_tile(hidden, head, one.long(), stats, one, ge, 0, rows(256, 512, dtype=dtype))


def small_policies():
    qkv = rows(2, 33, 3, 2, 32).float().requires_grad_()
    kernels.Attention.apply(qkv).sum().backward()
    cache = rows(4, 2, 45, 32).float()
    kernels.query_attention(rows(4, 1, 3, 2, 32).float(), cache, cache, 31, 7, 2)
    kernels.Norm.apply(rows(3, 5, 128).float())
    made = {name: rows(2, 40, 3).float() for name in SIGNALS}
    kernels.draw(rows(2, 40, OUTPUTS).float(), rows(2, 40, 3).float(), rows(2, 40, 3).long(), made, 1)


def adapters(parts=3, gated=False):
    width, r, owners = 128, 16, Rows(2, "cpu")
    owners.count(torch.tensor([60, 40]), 100)
    x, weight, sizes = rows(100, width).requires_grad_(), rows(width * parts, width), [width] * parts
    low = rows(2, width, r * parts), rows(2, width * parts, r)
    layouts = [Layout([width], r * parts, x.device), Layout(sizes, r, x.device)]
    trained = [rows(2, width, r).float().requires_grad_() for _ in range(2 * parts)]
    found = AdaptedLinear.apply(x, weight, None, low, layouts, owners[100], 2.0, gated, *trained)
    sum(y.float().sum() for y in (found if isinstance(found, tuple) else (found,))).backward()


def gated_adapters():
    adapters(2, gated=True)


def other_types():
    for dtype in (torch.float16, torch.float32):
        decoder(dtype=dtype)
    decoder(28, 4, 128)
    if FOR_HEAD:
        statistics(torch.float16)
        gradient(torch.float16)


FOR_HEAD = SHARED[ARCHITECTURE] >= SHARED[90]
CASES = [decoder, draws, *[statistics, gradient] * FOR_HEAD, small_policies, adapters, gated_adapters, other_types]
for case in CASES:
    if len(sys.argv) == 2 or case.__name__ in sys.argv:
        case()
for name, shared in compiled.items():
    print(f"{name}: {shared / KIB:.1f} KiB of shared memory")
    assert shared <= SHARED[ARCHITECTURE], name
