"""The plan of a run on verl: bytes by hand, the tables of docs/scale.md, and the checks of preflight."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from dew.engines.verl.launch import prepare
from dew.engines.verl.recipe import Batches
from dew.errors import ConfigError
from dew.preflight import preflight, verl
from dew.run.config import make_run, read_run

ROOT = Path(__file__).parents[2]
TABLES = runpy.run_path(str(ROOT / "scripts/scale_tables.py"))
paper_job = TABLES["paper_job"]
SEVEN = paper_job("Qwen/Qwen2.5-7B", 8)
TINY = {"engine": "verl", "model_name_or_path": "tiny", "task": "countdown", "problems": 64, "max_steps": 2,
        "num_generations": 4, "per_device_train_batch_size": 16, "lr_scheduler_type": "constant"}  # fmt: skip


# ---- golden ------------------------------------------------------------------------------------
def test_bytes_by_hand():
    found = verl.estimate(SEVEN, verl.H100).training
    assert found["weights"] == found["gradients"] == 4 * 7.616e9 / 8  # 3.8 GB
    assert found["optimizer"] == 8 * 7.616e9 / 8
    assert found["logits"] == 4 * 16384 * 152064  # bf16 and their gradient: 10 GB
    # 16384 tokens · (2 bytes · 3584 wide · 28 layers + (16·3584 + 6·3584 + 4·512 + 8·18944))
    assert found["activations"] == 16384 * (200_704 + 232_448)
    sampling = verl.estimate(SEVEN, verl.H100).generation
    assert sampling == {"weights": 3.808e9, "optimizer": 7.616e9, "sampler": 32e9}
    assert SEVEN.shape.cache_bytes == 4 * 512 * 28  # 57 kB a token
    assert verl.cache_tokens(SEVEN, verl.H100) == (32e9 - 2 * 7.616e9) / 57_344


def test_a_layer_in_bf16_by_hand():
    for s in verl.SHAPES.values():
        assert s.layer_bytes == 16 * s.width + 6 * s.query + 4 * s.key + 8 * s.inner


@pytest.mark.parametrize("s", verl.SHAPES.values(), ids=lambda s: f"{s.parameters / 1e9:.1f}B")
def test_shapes_add_up_to_their_parameters(s):
    layer = 2 * s.width * s.query + 2 * s.width * s.key + 3 * s.width * s.inner
    tied = s.parameters < 2e9  # the small ones share embedding and head
    assert s.layers * layer + s.vocabulary * s.width * (1 if tied else 2) == pytest.approx(s.parameters, rel=2e-3)


# ---- properties --------------------------------------------------------------------------------
def test_more_gpus_hold_less_each_and_are_not_slower():
    jobs = [paper_job("Qwen/Qwen2.5-32B", n) for n in (8, 16, 64)]
    totals = [sum(verl.estimate(job, verl.H200).training.values()) for job in jobs]
    hours = [verl.pace(job, verl.H200, 1024)["hours"] for job in jobs]
    assert totals == sorted(totals, reverse=True) and hours == sorted(hours, reverse=True)


def test_seconds_of_a_step_by_hand():
    """Effectively 1e12 bytes and operations a second; 1e9 parameters in bf16 and no cache: 2 ms per decoding step.

    4 answers of 100 tokens at once: 100 · 2 ms; one after the other: 4 times that; one of them of 1000 tokens: 2 s.
    Training: 4 · (50 + 100) tokens · (2 + 8) · 1e9 operations.
    """
    gpu = verl.Gpu("", 80e9, 1e12 / verl.MFU, 1e12 / verl.BANDWIDTH_SHARE)
    shape = verl.Shape(1e9, 1, 1, 1, 1, 0, 1)

    def seconds(limit, running):
        return verl.step_seconds(shape, gpu, 4, 50, 100, limit, running=running, passes=1)

    assert seconds(100, 4) == pytest.approx((0.2, 6))
    assert seconds(100, 1) == pytest.approx((0.8, 6))
    assert seconds(1000, 4) == pytest.approx((2, 6))


def test_every_pass_over_a_generation_takes_time():
    """(2 + 8 · 1) P with one pass, (2 + 8 · 3) P with three."""
    job = paper_job("Qwen/Qwen2.5-7B", 8)
    thrice = replace(job, batches=replace(job.batches, passes=3))
    one, three = (verl.pace(x, verl.H200, 1024)["training"] for x in (job, thrice))
    assert three == pytest.approx(2.6 * one)


def test_offloaded_state_is_not_counted():
    job = paper_job("Qwen/Qwen2.5-32B", 8)
    assert not verl.fits(job, verl.H100)
    assert verl.fits(replace(job, offload_policy=True), verl.H100)
    offloaded = replace(job, param_offload=True, optimizer_offload=True)
    assert verl.estimate(offloaded, verl.H100).generation == {"weights": 0, "optimizer": 0, "sampler": 32e9}
    alone = replace(job, batches=replace(job.batches, tensor_parallel=1))
    assert not verl.fits(alone, verl.H200)  # 66 GB of weights in 56 GB: no cache at all


# ---- the docs ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "table"), [("memory", TABLES["memory_table"]), ("pace", TABLES["pace_table"])])
def test_the_docs_have_the_tables_of_the_script(name, table):
    text = (ROOT / "docs/scale.md").read_text()
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert found is not None and found[1].strip() == table()


def test_the_docs_have_the_measured_load():
    text = (ROOT / "docs/scale.md").read_text()
    measured = (ROOT / "benchmarks/results/verl_load-cpu.md").read_text().splitlines()
    rows = [line for line in measured if line.startswith("| gtpo") or "| 4,096 x" in line]
    assert rows and all(row in text for row in rows)


def test_the_docs_compare_the_formulas_with_published_runs():
    """790, 365 and 356 s were published for 32, 64 and 128 H20s; the docs quote what the formulas give."""
    h20 = verl.Gpu("H20", 96e9, 148e12, 4e12)
    found = []
    for gpus in (32, 64, 128):
        job = paper_job("Qwen/Qwen2.5-7B", gpus)
        more = replace(job.batches, prompts=512)
        job = replace(job, batches=more, answer_limit=28672, sampler_share=0.8)
        pace = verl.pace(job, h20, 1000)
        found.append(round(pace["generation"] + pace["training"]))
    text = " ".join((ROOT / "docs/scale.md").read_text().split())
    assert f"give {found[0]}, {found[1]} and {found[2]} s" in text


# ---- the plan of a run ------------------------------------------------------------------------------
def test_a_recipe_has_the_plan_of_the_docs():
    launch = prepare(read_run(ROOT / "recipes/paper/qwen2.5-7b.yaml"))
    assert verl.job_of(launch) == SEVEN
    assert "fits; training 39 GB, sampling 43 GB each" in verl.plan_lines(verl.plan_of(launch))[0]


def test_a_run_of_epochs_takes_time():
    """64 problems, 4 at a time, twice: 32 steps."""
    launch = prepare(make_run({**TINY, "max_steps": None, "num_train_epochs": 2}))
    assert verl.job_of(launch).steps == 32


def test_the_shape_of_a_local_model_is_read_from_its_folder():
    found = verl.job_of(prepare(make_run(TINY)))
    assert found is not None and 1e4 < found.shape.parameters < 1e7
    nowhere = verl.plan_of(prepare(make_run({**TINY, "model_name_or_path": "some/model"})))
    assert nowhere == {"model": "some/model"} and "No plan" in verl.plan_lines(nowhere)[0]
    keys = {"actor_rollout_ref.model.lora_rank": 64}
    lora = verl.job_of(prepare(read_run(ROOT / "recipes/paper/qwen2.5-7b.yaml", {"verl": keys})))
    assert lora is not None
    assert 0.01 < lora.shape.trained / lora.shape.parameters < 0.05  # rank 64 is 2 % of a 7B model


# ---- preflight ---------------------------------------------------------------------------------
def checks(**changes):
    return {check.name: check for check in preflight(make_run({**TINY, **changes}))}


def test_preflight_checks_what_it_can_and_skips_the_rest(tmp_path):
    pytest.importorskip("transformers")
    found = checks(output_dir=str(tmp_path / "run"))
    assert {name for name, check in found.items() if check.status == "failed"} == set()
    assert "64 training problems" in found["data"].says and "empty answers" in found["verifier"].says
    assert found["answers"].status == "skipped" and not (tmp_path / "run").exists()


def test_data_that_verl_cannot_read_fail(tmp_path):
    pytest.importorskip("transformers")
    rows = [{"prompt": f"{i}+1=", "answer": "one" if i == 5 else i} for i in range(64)]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = checks(task=str(tmp_path / "mixed.jsonl"), verifier="chain", output_dir=str(tmp_path / "run"))["data"]
    assert found.status == "failed" and "Parquet" in found.says and "one type" in found.remedy


def test_preflight_lists_every_invalid_setting():
    run = make_run({**TINY, "lr_scheduler_type": "linear", "num_generations": 5})
    with pytest.raises(ConfigError) as raised:
        prepare(run)
    found = preflight(run)
    failed = [check for check in found if check.name == "settings" and check.status == "failed"]
    assert len(failed) == len(raised.value.problems) and all(check.remedy for check in failed)
    assert found[-1].status == "skipped"


def test_preflight_counts_gpus():
    batches = Batches(prompts=128, mini=128, answers=16, nodes=2, gpus_per_node=8)
    assert verl.check_gpus(batches, [{}] * 8).status == "ok"
    few = verl.check_gpus(batches, [{}] * 4)
    assert few.status == "warning" and "this machine has 4" in few.says and "n_gpus_per_node=4" in few.remedy


def test_preflight_compares_the_plan_with_the_gpus_of_this_machine():
    translation = prepare(read_run(ROOT / "recipes/paper/qwen2.5-7b.yaml"))
    here = [{"name": "H100", "total": 80e9}]
    assert verl.check_memory(translation, here).status == "ok"
    small = verl.check_memory(translation, [{"name": "L4", "total": 24e9}])
    assert small.status == "warning" and "ppo_max_token_len_per_gpu" in small.remedy
