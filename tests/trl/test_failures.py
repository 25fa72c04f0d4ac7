"""Processes that a signal stops or kills, and a disk that is full."""

import os
import signal

import pytest
import torch
from transformers import TrainerCallback

import trl_tiny as tiny
from dew.engines.trl.checkpoints import explain_full_disk
from dew.engines.trl.launch import StopAtSignal
from dew.errors import ConfigError
from dew.run.folder import RunFolder


class AtStepThree(TrainerCallback):
    """Calls a function at the start of step 3."""

    def __init__(self, act):
        self.act = act

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 2:
            self.act()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def run(folder, rank, *, victim=None, act=die, data=16, resume=False, others=None, **settings):
    """Train, and leave the weights in a file."""
    settings = {"per_device_train_batch_size": 4, "max_steps": 4, **settings}
    trainer = tiny.trainer(folder, tiny.has_a, tiny.prompts(data), others=others, **settings)
    if rank == victim:
        trainer.add_callback(AtStepThree(act))
    trainer.train(resume_from_checkpoint=resume)
    torch.save([p.detach() for p in trainer.model.parameters()], folder / f"rank{rank}.pt")


def test_processes_stop_together_at_a_signal_that_reaches_one_of_them(tmp_path):
    def train(rank):
        stop = {"callbacks": [StopAtSignal()]}
        run(tmp_path, rank, victim=1, act=lambda: os.kill(os.getpid(), signal.SIGTERM), others=stop)

    assert tiny.in_children(train, count=2) == [0, 0]
    assert [line["step"] for line in RunFolder(tmp_path).metrics()] == [1, 2, 3]
    assert (tmp_path / "checkpoint-3" / "dew_manifest.json").exists()


def test_a_run_names_the_error_of_the_process_that_failed(tmp_path):
    assert tiny.in_children(lambda rank: run(tmp_path, rank, victim=1, act=lambda: 1 / 0), count=2) == [1, 1]
    facts = RunFolder(tmp_path).run()
    assert facts["status"] == "failed" and "division by zero" in facts["error"]


@pytest.mark.slow
def test_two_processes_resume_after_one_was_killed(tmp_path):
    """Started again, they end with the same weights, bit for bit, as two that were not killed."""
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5, "steps_per_generation": 2, "data": 6}
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    assert tiny.in_children(lambda rank: run(tmp_path / "whole", rank, **saving), count=2) == [0, 0]
    assert tiny.in_children(lambda rank: run(tmp_path / "cut", rank, victim=1, **saving), count=2) == [1, -9]
    (tmp_path / "cut" / "checkpoint-2" / "rng_state_1.pth").write_bytes(b"")  # and one of its files is damaged
    again = {**saving, "resume": True}
    assert tiny.in_children(lambda rank: run(tmp_path / "cut", rank, **again), count=2) == [0, 0]
    assert (tmp_path / "cut" / "damaged-checkpoint-2").is_dir()
    for rank in (0, 1):
        cut, whole = (torch.load(tmp_path / name / f"rank{rank}.pt") for name in ("cut", "whole"))
        assert all(torch.equal(a, b) for a, b in zip(cut, whole, strict=True))


def test_a_full_disk_is_explained_and_nothing_else(tmp_path):
    full = [RuntimeError(text) for text in ("Disk quota exceeded", "I/O error: No space left on device (os error 28)")]
    for error in (*full, RuntimeError("CUDA out of memory"), OSError(13, "Permission denied"), ConfigError("quota")):
        with pytest.raises((RuntimeError, OSError, ConfigError)) as found, explain_full_disk(tmp_path):
            raise error
        assert ("disk is full" in str(found.value)) == (found.value is not error) == (error in full)
