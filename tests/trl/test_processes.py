"""Two processes train like one: the same advantages and updated weights, also where a group spans both."""

import os
import subprocess
import sys

import pytest
import torch

import trl_tiny as tiny
from dew.run.folder import RunFolder
from trl_tiny import outcome


def run(folder, per_device, algorithm, steps=2, problems=16, **settings):
    """Train on scripted answers, and save the advantages of every generation and the weights."""
    trainer = tiny.trainer(
        folder,
        outcome,
        data=tiny.prompts(problems),
        others={"rollout_func": tiny.scripted},
        algorithm=algorithm,
        per_device_train_batch_size=per_device,
        num_generations=8,
        max_steps=steps,
        optim="sgd",
        learning_rate=0.1,
        **settings,
    )
    seen = []
    inner = trainer._generate_and_score_completions

    def spy(inputs):
        batch = inner(inputs)
        texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
        means = batch["advantages"].sum(-1) / batch["completion_mask"].sum(-1).clamp_min(1)
        seen.extend(sorted(zip(texts, means.tolist(), strict=True)))
        return batch

    trainer._generate_and_score_completions = spy
    trainer.train()
    rank = trainer.accelerator.process_index
    weights = tiny.weights(trainer.model)
    torch.save({"advantages": seen, "weights": weights}, folder / f"rank{rank}.pt")


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


CASES = {
    "gtpo": {},
    "grpo_s": {"num_iterations": 2},
    "dapo": {"algorithm_kwargs": {"max_rounds": 2}},
}


@pytest.mark.parametrize(
    "algorithm", ["gtpo", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != "gtpo")]
)
def test_two_processes_train_like_one(algorithm, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()

    # 3 groups of 8 answers: with 12 rows on each of two processes, the second group spans both
    assert tiny.in_children(lambda _: run(tmp_path / "one", 24, algorithm, **CASES[algorithm])) == [0]
    assert tiny.in_children(lambda _: run(tmp_path / "two", 12, algorithm, **CASES[algorithm]), count=2) == [0, 0]

    one = torch.load(tmp_path / "one" / "rank0.pt")
    two = [torch.load(tmp_path / "two" / f"rank{rank}.pt") for rank in (0, 1)]
    expected = sorted(one["advantages"])
    found = sorted(two[0]["advantages"] + two[1]["advantages"])
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert max(abs(value) for _, value in expected) > 0.1
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-5)
    torch.testing.assert_close(two[0]["weights"], one["weights"], rtol=1e-5, atol=1e-6)
    assert torch.equal(two[0]["weights"], two[1]["weights"])

    steps = zip(RunFolder(tmp_path / "one").metrics(), RunFolder(tmp_path / "two").metrics(), strict=True)
    for alone, together in steps:
        for metric in ("accuracy", "entropy", "entropy/wrong", "credit/mean_correct", "loss", "grad_norm", "ratio/max"):
            assert (metric in together) == (metric in alone)
            if metric in alone:
                assert together[metric] == pytest.approx(alone[metric], rel=1e-3, abs=1e-5), metric


@pytest.mark.slow
def test_uneven_last_batches(tmp_path):
    """10 problems, 3 at a time: one is left over in each epoch, and its third step has half the micro-batches."""
    uneven = {"steps": 5, "problems": 10, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert tiny.in_children(lambda _: run(tmp_path / "one", 24, "gtpo", **uneven)) == [0]
    assert tiny.in_children(lambda _: run(tmp_path / "two", 12, "gtpo", **uneven), count=2) == [0, 0]
    one, two = (torch.load(tmp_path / name / "rank0.pt") for name in ("one", "two"))
    torch.testing.assert_close(two["weights"], one["weights"], rtol=1e-5, atol=1e-6)
    for folder in ("one", "two"):
        metrics = RunFolder(tmp_path / folder).metrics()
        assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
        assert all(x is not None for line in metrics for x in line.values())


@pytest.mark.slow
def test_accelerate_launch(tmp_path):
    """The same with accelerate's launcher."""
    script = tmp_path / "script.py"
    script.write_text(
        f"from pathlib import Path\nimport test_processes as here\nhere.run(Path({str(tmp_path)!r}), 12, 'gtpo')\n"
    )
    # --cpu would start one process and leave the others to MPI; --multi_gpu starts them all, here on gloo.
    settings = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *settings, str(script)]
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run(command, check=True, env=environment, timeout=600)
    (tmp_path / "one").mkdir()
    assert tiny.in_children(lambda _: run(tmp_path / "one", 24, "gtpo")) == [0]
    one = torch.load(tmp_path / "one" / "rank0.pt")
    torch.testing.assert_close(torch.load(tmp_path / "rank1.pt")["weights"], one["weights"], rtol=1e-5, atol=1e-6)
