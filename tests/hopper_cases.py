"""Hopper's kernels without a Hopper: they compile for one, spill no register and fit its shared memory.

Run by test_kernels_triton.py.
"""

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from dew.kernels import hopper, hopper_product

SHARED_MEMORY = 227 * 1024
"""What a block may have on compute capability 9.0."""


def matrix(dtype, rows, columns):
    layout = hopper.gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return f"tensordesc<{dtype}[{rows}, {columns}],{layout!r}>"


def compiled(kernel, signature, **constants):
    place = kernel.arg_names.index
    values = {(place(name),): value for name, value in constants.items()}
    aligned = {(place(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"}
    source = GluonASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def assert_fits(kernel, tmp_path):
    assert kernel.metadata.shared <= SHARED_MEMORY
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True)
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    assert used["REG"] > 0 and used["STACK"] == used["LOCAL"] == 0, usage.stdout


@pytest.mark.parametrize("dtype, tiles, ragged", [("bf16", 6, False), ("bf16", 1, True), ("fp16", 2, True)])
def test_the_statistics_compile_without_spills(dtype, tiles, ragged, tmp_path):
    rows, weights = matrix(dtype, 64, 64), matrix(dtype, 256, 64)
    signature = {"x": rows, "together": rows, "w": weights, "place": "*i32", "part": "*fp32"}
    signature |= {"n": "i32", "v": "i32", "width": "i32", "s": "fp32"}
    assert_fits(compiled(hopper._statistics_kernel, signature, TILES=tiles, RAGGED=ragged), tmp_path)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_product_compiles_without_spills(dtype, tmp_path):
    signature = {"a": matrix(dtype, 64, 64), "b": matrix(dtype, 64, 256), "out": matrix(dtype, 64, 128)}
    signature |= {"r": "*fp32", "m": "i32", "n": "i32", "width": "i32"}
    assert_fits(compiled(hopper_product._product_kernel, signature), tmp_path)


@pytest.mark.parametrize(
    "rows, vocabulary, tiles",
    [(32_768, 49_152, 6), (16_384, 152_064, 6), (32_768, 32_000, 5), (768, 49_152, 2), (128, 49_152, 1), (1, 1, 1)],
)
def test_tiles_divide_the_vocabulary_and_leave_work_for_all(rows, vocabulary, tiles):
    """192, 594 and 125 blocks of columns. 6 · 192 of them: 192 items of six tiles, 576 of two; 4 · 132 are enough."""
    assert hopper._tiles(-(-rows // 128), -(-vocabulary // 256), 132) == tiles
