"""The memory of a verl run by arithmetic, and the tables of docs/scale.md."""

import re
from pathlib import Path

import pytest
import scale_tables
from scale_tables import GPUS, SHAPES, Gpu, Shape, cache_tokens, estimate, fits, pace, paper_run, step_seconds

ROOT = Path(__file__).parents[2]
H100, H200 = GPUS
SCALE = (ROOT / "docs/scale.md").read_text()
FSDP = "actor_rollout_ref__actor__fsdp_config__"


# ---- golden ------------------------------------------------------------------------------------
def test_a_7b_model_on_8_gpus_by_hand():
    """7.616e9 parameters over 8 GPUs: 4 bytes each of weights and gradients, 8 of the optimizer."""
    job = paper_run("7b", 8)
    found = estimate(*job, H100.memory)[0]
    assert found["weights"] == found["gradients"] == 4 * 7.616e9 / 8  # 3.8 GB
    assert found["optimizer"] == 8 * 7.616e9 / 8
    assert found["logits"] == 4 * 16384 * 152064  # bf16 and their gradient: 10 GB
    # 16384 tokens · (2 bytes · 3584 wide · 28 layers + (16·3584 + 6·3584 + 4·512 + 8·18944))
    assert found["activations"] == 16384 * (200_704 + 232_448)
    sampling = estimate(*job, H100.memory)[1]
    assert sampling == {"weights": 3.808e9, "optimizer": 7.616e9, "sampler": 32e9}
    assert job[1].cache_bytes == 4 * 512 * 28  # 57 kB a token
    assert cache_tokens(*job, H100.memory) == (32e9 - 2 * 7.616e9) / 57_344


@pytest.mark.parametrize("s", SHAPES.values(), ids=lambda s: f"{s.parameters / 1e9:.1f}B")
def test_shapes_add_up_to_their_parameters(s):
    layer = 2 * s.width * s.query + 2 * s.width * s.key + 3 * s.width * s.inner
    assert s.layers * layer + s.vocabulary * s.width * 2 == pytest.approx(s.parameters, rel=2e-3)


def test_offloaded_state_is_not_counted():
    assert not fits(*paper_run("32b", 8), H100.memory)
    assert fits(*paper_run("32b", 8, **{f"{FSDP}offload_policy": True}), H100.memory)
    offloaded = paper_run("32b", 8, **{f"{FSDP}param_offload": True, f"{FSDP}optimizer_offload": True})
    assert estimate(*offloaded, H100.memory)[1] == {"weights": 0, "optimizer": 0, "sampler": 32e9}
    alone = paper_run("32b", 8, actor_rollout_ref__rollout__tensor_model_parallel_size=1)
    assert not fits(*alone, H200.memory)  # 66 GB of weights in 56 GB: no cache at all


# ---- the docs ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["memory", "pace"])
def test_the_docs_have_the_tables_of_the_script(name):
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", SCALE, re.DOTALL)
    assert found is not None and found[1] == getattr(scale_tables, f"{name}_table")()


def test_the_docs_have_the_measured_load():
    text = (ROOT / "benchmarks/results/verl_load-cpu.md").read_text()
    row = re.search(r"\| gtpo \| 4,096 x 8,192 \| \S+ \| (\S+) \| (\S+) \|", text)
    assert row and f"{row[1]} CPU seconds and {row[2]} MB" in " ".join(SCALE.split())


def test_the_docs_compare_the_formulas_with_published_runs():
    """The docs have a table of published seconds and of those that the formulas give."""
    h20, changes = Gpu("H20", 96e9, 148e12, 4e12), {"data__train_batch_size": 512, "data__max_response_length": 28672}
    changes["actor_rollout_ref__rollout__gpu_memory_utilization"] = 0.8
    for gpus, published in ((32, 790), (64, 365), (128, 356)):
        found = pace(*paper_run("7b", gpus, **changes), h20, 1000)
        assert f"| {gpus} | {published} | {found['generation'] + found['training']:.0f} |" in SCALE


def test_seconds_of_a_step_by_hand():
    """Effectively 1e12 bytes and operations a second; 1e9 parameters in bf16 and no cache: 2 ms per decoding step.

    4 answers of 100 tokens at once: 100 · 2 ms; one after the other: 4 times that; one of them of 1000 tokens: 2 s.
    Training: 4 · (50 + 100) tokens · (2 + 8) · 1e9 operations; (2 + 8 · 3) in three passes.
    """
    gpu, shape = Gpu("", 80e9, 1e12 / 0.4, 1e12 / 0.6), Shape(1e9, 1, 1, 1, 1, 0, 1)

    def seconds(limit, running, passes=1):
        return step_seconds(shape, gpu, 4, 50, 100, limit, running=running, passes=passes)

    assert seconds(100, 4) == pytest.approx((0.2, 6))
    assert seconds(100, 1) == pytest.approx((0.8, 6))
    assert seconds(1000, 4, passes=3) == pytest.approx((2, 15.6))
