"""Weights sharded with FSDP2 over two gloo processes train like one process with whole weights."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trl_tiny as tiny
from dew.algorithms import list_algorithms
from dew.engines.trl.launch import _weights_are_finite, build_trainer, launch, parse
from dew.run.config import Run, Scoring
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


def shard():
    """FSDP2 in this process. accelerate reads its settings on GPUs only, so it is told that these are some."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    os.environ.update(FSDP2)
    inner = AcceleratorState.__init__

    def on_gpus(self, *args, **kwargs):
        if not AcceleratorState._shared_state:
            PartialState().distributed_type = DistributedType.MULTI_GPU
        inner(self, *args, **kwargs)

    AcceleratorState.__init__ = on_gpus


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def run(folder, processes, algorithm, *, tied=True, adapter=False, resume=False, scripted=True, **settings):
    """Train two steps, on scripted answers, and save all weights."""
    if processes > 1:
        shard()
    trainer = tiny.trainer(
        folder,
        outcome,
        policy=tiny.model(tie_word_embeddings=tied),
        others={
            "rollout_func": tiny.scripted if scripted else None,
            "peft_config": lora() if adapter else None,
        },
        algorithm=algorithm,
        per_device_train_batch_size=24 // processes,
        num_generations=8,
        less_padding=False,  # as sharded: else completions without an advantage are left out of the mean entropy
        **{"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.5, **settings},
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train(resume_from_checkpoint=True if resume else None)
    assert all(hasattr(p, "full_tensor") for p in trainer.model.parameters()) == (processes > 1)
    after = {name: whole(p).detach().clone() for name, p in trainer.model.named_parameters()}
    assert any(not torch.equal(after[name], before[name]) for name in before)
    rank = trainer.accelerator.process_index
    torch.save(after, folder / f"rank{rank}.pt")
    assert _weights_are_finite(trainer)
    if rank == processes - 1:
        weights = next(trainer.model.parameters()).detach()
        (weights.to_local() if processes > 1 else weights).fill_(torch.nan)
    assert not _weights_are_finite(trainer), "every process finds it, in whichever shard it is"


def whole(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def compare(tmp_path, algorithm, **settings):
    for name, processes in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        codes = tiny.in_children(lambda _, n=processes, f=tmp_path / name: run(f, n, algorithm, **settings), processes)
        assert codes == [0] * processes
    one, two = (torch.load(tmp_path / name / "rank0.pt") for name in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    steps = zip(RunFolder(tmp_path / "one").metrics(), RunFolder(tmp_path / "two").metrics(), strict=True)
    for alone, together in steps:
        for metric in {"accuracy", "entropy", "loss", "grad_norm", "credit/mean_correct"} & set(alone):
            assert together[metric] == pytest.approx(alone[metric], rel=1e-3, abs=1e-5), metric


def test_two_shards_train_like_one_process(tmp_path):
    compare(tmp_path, "gtpo", tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("algorithm", list_algorithms())
def test_every_algorithm(algorithm, tied, adapter, tmp_path):
    settings = {"learning_rate": 5.0} if adapter else {}
    compare(tmp_path, algorithm, tied=tied, adapter=adapter, num_iterations=2, **settings)


@pytest.mark.slow
def test_sampling_and_resuming_sharded(tmp_path):
    """Two processes sample with `generate`; a run resumed from its checkpoint ends with the same weights."""
    settings = {"scripted": False, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    assert tiny.in_children(lambda _: run(tmp_path / "whole", 2, "gtpo", **settings), 2) == [0, 0]
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    assert tiny.in_children(lambda _: run(tmp_path / "resumed", 2, "gtpo", resume=True, **settings), 2) == [0, 0]
    one, two = (torch.load(tmp_path / name / "rank0.pt") for name in ("whole", "resumed"))
    torch.testing.assert_close(two, one, rtol=0, atol=0)


def run_config(folder, resume=False):
    """The run of a recipe, evaluated before and after two steps."""
    shard()
    settings = {
        "model_name_or_path": "tiny",
        "output_dir": str(folder),
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "save_steps": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,  # moves the matrices, whatever the rewards are
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    parsed = parse(Run(task="countdown", problems=16, scores=Scoring(problems=4, k=2), settings=settings))
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


# ZeRO-3


def zero_3(rank, folder, tied):
    """Two steps of DeepSpeed's ZeRO-3 with dew's operator as the head."""
    import deepspeed
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1e9,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,  # else DeepSpeed keeps weights from the forward pass, from the 2nd step on
        },
        "zero_allow_untested_optimizer": True,
    }
    announced = HfDeepSpeedConfig(config)  # a weak reference to it is how TRL knows that weights are partitioned
    net = fused_model(tied)
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), config=config)
    for _ in range(2):
        loss = fused_loss(engine, slice(2 * rank, 2 * rank + 2))
        assert net.lm_head.weight.numel() == 0
        engine.backward(loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        torch.save({name: p.detach().clone() for name, p in net.named_parameters()}, folder / f"rank{rank}.pt")
    del announced


def fused_model(tied):
    from trl.trainer.utils import add_fused_lm_head

    net = tiny.model(tie_word_embeddings=tied)
    add_fused_lm_head(net, outputs=("log_probs", "entropy"))
    return net


def fused_loss(net, rows):
    from dew.engines.trl.loss import exact_head

    ids = torch.randint(3, 25, (4, 9), generator=torch.Generator().manual_seed(1))[rows]
    with exact_head():
        return -net(ids, labels=ids, fused_lm_head=True).log_probs.sum()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_zero_3(tied, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    assert tiny.in_children(lambda rank: zero_3(rank, tmp_path, tied), 2) == [0, 0]
    net = fused_model(tied)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        (fused_loss(net, slice(None)) / 2).backward()  # processes average their gradients
        optimizer.step()
    torch.testing.assert_close(torch.load(tmp_path / "rank0.pt"), dict(net.named_parameters()), rtol=1e-5, atol=1e-6)
