"""The Hopper kernel without a Hopper GPU: it compiles, spills no registers and fits into shared memory."""

import multiprocessing
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from dew.kernels import hopper

SHARED_MEMORY = 227 * 1024
"""Maximum per block on compute capability 9.0."""


def compiled(dtype, tiles, ragged, sum_sq):
    """Bytes of shared memory, and the binary."""
    layout = hopper.gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows, weights = (f"tensordesc<{dtype}[{n}, {hopper.BK.value}],{layout!r}>" for n in (64, hopper.BN.value))
    signature = {"x": rows, "compact": rows, "w": weights, "place": "*i32", "part": "*fp32"}
    signature |= {"n": "i32", "v": "i32", "width": "i32", "s": "fp32"} | dict.fromkeys(
        ("TILES", "RAGGED", "SUM_SQ"), "constexpr"
    )
    kernel, constants = hopper._statistics_kernel, {"TILES": tiles, "RAGGED": ragged, "SUM_SQ": sum_sq}
    values = {(kernel.arg_names.index(k),): value for k, value in constants.items()}
    aligned = {(kernel.arg_names.index(k),): [["tt.divisibility", 16]] for k in ("place", "part")}
    source = GluonASTSource(kernel, signature, values, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return kernel.metadata.shared, kernel.asm["cubin"]


@pytest.mark.parametrize("sum_sq", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_for_hopper_without_spills(tmp_path, sum_sq):
    """With several tiles per item, a ragged vocabulary and Σπ²: other variants leave out some of this code."""
    with multiprocessing.get_context("fork").Pool(1) as child:  # a process that has compiled reports leaks at its end
        shared, binary = child.apply(compiled, ("bf16", 6, True, sum_sq))
    assert shared <= SHARED_MEMORY
    (tmp_path / "kernel.cubin").write_bytes(binary)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True)
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    assert used["REG"] > 0 and used["STACK"] == used["LOCAL"] == 0, usage.stdout


@pytest.mark.parametrize(
    "rows, vocabulary, tiles",
    [(32_768, 49_152, 6), (16_384, 152_064, 6), (32_768, 32_000, 5), (768, 49_152, 2), (128, 49_152, 1), (1, 1, 1)],
)
def test_tiles_divide_the_vocabulary_and_leave_several_items_per_processor(rows, vocabulary, tiles):
    """192, 594 and 125 column blocks. Of 6 · 192 blocks: 192 items of six tiles, 576 of two; 4 · 132 are enough."""
    assert hopper._tiles(-(-rows // 128), -(-vocabulary // 256), 132) == tiles
