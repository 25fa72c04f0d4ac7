"""Two processes train like one: the same advantages, metrics and weights, also where a group spans both or where each
holds half of the weights (FSDP2)."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from safetensors.torch import load_file

import trl_tiny as tiny
from dew.algorithms import list_algorithms
from dew.engines.trl.launch import build_trainer, launch, parse
from dew.run.config import make_run
from dew.run.folder import RunFolder
from dew.tasks import model_folder
from trl_tiny import outcome

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
METRICS = ("accuracy", "entropy", "entropy/wrong", "credit/mean_correct", "loss", "grad_norm", "ratio/max")


def shard():
    """FSDP2 in this process. accelerate reads its settings on GPUs only, so it is told that these are some."""
    os.environ.update(FSDP2)
    inner = AcceleratorState.__init__

    def on_gpus(self, *args, **kwargs):
        if not AcceleratorState._shared_state:
            PartialState().distributed_type = DistributedType.MULTI_GPU
        inner(self, *args, **kwargs)

    AcceleratorState.__init__ = on_gpus


def run(
    folder, processes, sharded=False, tied=False, adapter=False, resume=None, scripted=True, problems=16, **settings
):
    """Train two steps, on scripted answers, and save the advantages of every generation and all weights."""
    if sharded:
        shard()
    others = {"rollout_func": tiny.scripted if scripted else None, "peft_config": LORA if adapter else None}
    # 3 groups of 8 answers: with 12 rows on each of two processes, the second group spans both
    sizes = {"per_device_train_batch_size": 24 // processes, "num_generations": 8, "max_steps": 2}
    settings = {**sizes, "optim": "sgd", "learning_rate": 0.1, **settings}
    data, policy = tiny.prompts(problems), tiny.model(tie_word_embeddings=tied)
    trainer = tiny.trainer(folder, outcome, data, policy, others, **settings)
    seen, inner = [], trainer._generate_and_score_completions

    def spy(inputs):
        batch = inner(inputs)
        means = batch["advantages"]
        if means.ndim > 1:
            means = means.sum(-1) / batch["completion_mask"].sum(-1).clamp_min(1)
        seen.extend(zip(tiny.texts(trainer, batch), means.tolist(), strict=True))
        return batch

    trainer._generate_and_score_completions = spy
    trainer.train(resume_from_checkpoint=resume)
    assert all(hasattr(p, "full_tensor") for p in trainer.model.parameters()) == sharded
    weights = {name: p.full_tensor() if sharded else p for name, p in trainer.model.named_parameters()}
    rank = trainer.accelerator.process_index
    torch.save({"advantages": seen, "weights": {k: p.detach().clone() for k, p in weights.items()}},
               folder / f"rank{rank}.pt")  # fmt: skip


def saved(folder, rank=0):
    return torch.load(folder / f"rank{rank}.pt")


def same_as_one_process(tmp_path, sharded=False, **settings):
    for name, processes in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        shards = sharded and processes > 1

        def child(_, n=processes, folder=tmp_path / name, shards=shards):
            run(folder, n, shards, **settings)

        assert tiny.in_children(child, processes) == [0] * processes
    one, two = saved(tmp_path / "one"), [saved(tmp_path / "two", rank) for rank in (0, 1)]
    torch.testing.assert_close(two[0]["weights"], one["weights"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(two[1]["weights"], two[0]["weights"], rtol=0, atol=0)
    expected, found = sorted(one["advantages"]), sorted(two[0]["advantages"] + two[1]["advantages"])
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert max(abs(value) for _, value in expected) > 0.1
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-5)
    steps = list(zip(RunFolder(tmp_path / "one").metrics(), RunFolder(tmp_path / "two").metrics(), strict=True))
    assert [line["step"] for line, _ in steps] == list(range(1, 1 + settings.get("max_steps", 2)))
    assert any(line["grad_norm"] > 0 for line, _ in steps), "nothing was learned, so nothing is compared"
    for alone, together in steps:
        assert all(x is not None for x in alone.values())
        for metric in METRICS:
            assert (metric in together) == (metric in alone)
            if metric in alone:
                assert together[metric] == pytest.approx(alone[metric], rel=1e-3, abs=1e-5), metric


CASES = {
    "gtpo": {},
    "grpo_s": {"num_iterations": 2, "gradient_accumulation_steps": 3},  # each has its own number of micro-batches
    "dapo": {"algorithm_kwargs": {"max_rounds": 2}},
}


@pytest.mark.parametrize(
    "algorithm", ["gtpo", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != "gtpo")]
)
def test_two_processes_train_like_one(algorithm, tmp_path):
    same_as_one_process(tmp_path, algorithm=algorithm, **CASES[algorithm])


@pytest.mark.slow
def test_uneven_last_batches(tmp_path):
    """10 problems, 3 at a time: one is left over in each epoch, and its third step has half the micro-batches."""
    uneven = {"max_steps": 5, "problems": 10, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    same_as_one_process(tmp_path, **uneven)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_evaluation_counts_every_prompt_once(processes, tmp_path):
    """5 prompts, 2 at a time: the last batch has one prompt, and on two processes a repeated one. All are truncated."""

    def solves_zero(completions, answer, **_):
        return [float(x == "0") for x in answer]

    def child(rank):
        others = {"eval_dataset": tiny.prompts(5), "rollout_func": lambda *x: tiny.scripted(*x, shortest=6)}
        settings = {"per_device_eval_batch_size": 8 // processes, "mask_truncated_completions": True}
        found = tiny.trainer(tmp_path, solves_zero, others=others, **settings).evaluate()
        assert {found[f"eval_{name}"] for name in ("accuracy", "reward", "pass@1", "pass@4")} == {0.2}

    assert tiny.in_children(child, processes) == [0] * processes


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [(1, 2), (2, 1)])
def test_a_run_resumes_inside_a_generation_with_another_number_of_processes(first, then, tmp_path):
    def train(processes, steps):
        settings = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 2}
        trainer = tiny.trainer(tmp_path, per_device_train_batch_size=8 // processes, **settings)
        trainer.train(resume_from_checkpoint=steps == 5)

    assert tiny.in_children(lambda rank: train(first, 3), first) == [0] * first
    assert tiny.in_children(lambda rank: train(then, 5), then) == [0] * then
    assert [line["step"] for line in RunFolder(tmp_path).metrics()] == [1, 2, 3, 4, 5]


# ── FSDP2 ─────────────────────────────────────────────────────────────────────────────────────────────────
SHARDED = {"sharded": True, "max_grad_norm": 0.5, "less_padding": False}
"""As sharded: else answers without an advantage are left out of the mean entropy."""


def test_two_shards_train_like_one_process(tmp_path):
    same_as_one_process(tmp_path, tied=True, **SHARDED)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("algorithm", list_algorithms())
def test_every_algorithm_sharded(algorithm, tied, adapter, tmp_path):
    settings = {**SHARDED, "learning_rate": 5.0 if adapter else 0.1, "num_iterations": 2}
    same_as_one_process(tmp_path, algorithm=algorithm, tied=tied, adapter=adapter, **settings)


@pytest.mark.slow
def test_sampling_and_resuming_sharded(tmp_path):
    """Two processes sample with `generate`; a run resumed from its checkpoint ends with the same weights."""
    settings = {**SHARDED, "scripted": False, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    assert tiny.in_children(lambda _: run(tmp_path / "whole", 2, **settings), 2) == [0, 0]
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    assert tiny.in_children(lambda _: run(tmp_path / "resumed", 2, resume=True, **settings), 2) == [0, 0]
    one, two = (saved(tmp_path / name)["weights"] for name in ("whole", "resumed"))
    torch.testing.assert_close(two, one, rtol=0, atol=0)


def run_config(folder, resume=False):
    """The run of a recipe, evaluated before and after two steps."""
    shard()
    settings = {"output_dir": str(folder), "per_device_train_batch_size": 4, "max_completion_length": 6}
    settings |= {"save_steps": 2, "learning_rate": 0.01}
    settings["weight_decay"] = 0.1  # moves the matrices, whatever the rewards are
    parsed = parse(make_run({**tiny.COUNTDOWN, **settings, "problems": 16, "scores": {"problems": 4, "k": 2}}))
    assert launch(parsed, build_trainer(parsed), resume=resume, say=lambda _: None) == "done"


def test_a_sharded_run_is_evaluated_and_leaves_a_whole_model(tmp_path):
    assert tiny.in_children(lambda _: run_config(tmp_path), 2) == [0, 0]
    assert [entry["when"] for entry in RunFolder(tmp_path).scores()] == ["before", "after"]
    trained, start = (load_file(Path(f) / "model.safetensors") for f in (tmp_path / "model", model_folder("tiny")))
    assert start.keys() <= trained.keys()
    assert all(not torch.equal(trained[name], start[name]) for name in start if "proj" in name)


@pytest.mark.slow
def test_a_sharded_run_that_lost_its_model_is_resumed(tmp_path):
    for resume in (False, True):
        assert tiny.in_children(lambda _, resume=resume: run_config(tmp_path, resume), 2) == [0, 0]
        (tmp_path / "model").rename(tmp_path / f"model-{resume}")
    first, again = (load_file(tmp_path / f"model-{resume}" / "model.safetensors") for resume in (False, True))
    assert all(torch.equal(again[name], first[name]) for name in again)
