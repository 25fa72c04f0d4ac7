"""One of two processes dies: the other ends, soon, with an error that names it; one that is slow is waited for."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import TrainerCallback

import trl_tiny as tiny
from dew.engines.trl import rollcall
from dew.errors import DewError
from dew.records import RunFolder

MINUTE = 60


class At(TrainerCallback):
    """Something that one process does at the beginning of step 3."""

    def __init__(self, act):
        self.act = act

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 2:
            self.act()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def nap():
    time.sleep(3 * rollcall.BEAT)


def hang_in_generation(trainer):
    """As NCCL would: the call does not come back, whatever becomes of the others."""
    inner = trainer._generate

    def generate(prompts):
        if trainer.state.global_step == 2:
            time.sleep(600)
        return inner(prompts)

    trainer._generate = generate


def run(folder, rank, *, victim=None, act=die, reward=tiny.has_a, hang=False, data=16, resume=False, **settings):
    """Trains; what it fails with is left in a file, and when."""
    trainer = tiny.trainer(
        folder, reward, data=tiny.prompts(data), **{"per_device_train_batch_size": 4, "max_steps": 4, **settings}
    )
    if rank == victim:
        trainer.add_callback(At(act))
    elif hang:
        hang_in_generation(trainer)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except DewError as error:
        (folder / f"error{rank}").write_text(str(error))
        raise SystemExit(1) from None
    torch.save([p.detach() for p in trainer.model.parameters()], folder / f"rank{rank}.pt")


@pytest.mark.parametrize(("victim", "survivor"), [(1, 0), pytest.param(0, 1, marks=pytest.mark.slow)])
def test_the_one_that_is_left_names_the_one_that_died(victim, survivor, tmp_path):
    begun = time.monotonic()
    codes = tiny.in_children(lambda rank: run(tmp_path, rank, victim=victim), count=2)
    assert codes[victim] == -signal.SIGKILL and codes[survivor] == 1
    assert time.monotonic() - begun < MINUTE
    words = (tmp_path / f"error{survivor}").read_text()
    assert f"process {victim} of 2" in words and "gone" in words and "dew resume" in words
    if survivor == 0:
        assert RunFolder(tmp_path).run()["status"] == "failed"


@pytest.mark.slow
def test_who_finds_one_missing_tells_the_others(tmp_path, monkeypatch):
    """Of three, each looks only at the next."""
    monkeypatch.setattr(rollcall, "NEIGHBOURS", 1)
    assert tiny.in_children(lambda rank: run(tmp_path, rank, victim=2), count=3) == [1, 1, -signal.SIGKILL]
    for rank in (0, 1):
        assert "process 2 of 3" in (tmp_path / f"error{rank}").read_text()


@pytest.mark.slow
def test_a_group_goes_on_after_one_of_it_died(tmp_path):
    """Both are started again: the same weights as of two that were left in peace, bit for bit."""
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5, "steps_per_generation": 2, "data": 6}
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    assert tiny.in_children(lambda rank: run(tmp_path / "whole", rank, **saving), count=2) == [0, 0]
    assert tiny.in_children(lambda rank: run(tmp_path / "cut", rank, victim=1, **saving), count=2) == [1, -9]
    (tmp_path / "cut" / "checkpoint-2" / "rng_state_1.pth").write_bytes(b"")  # and one file of the second's is damaged
    again = {**saving, "resume": True}
    assert tiny.in_children(lambda rank: run(tmp_path / "cut", rank, **again), count=2) == [0, 0]
    assert (tmp_path / "cut" / "damaged-checkpoint-2").is_dir()
    for rank in (0, 1):
        cut, whole = (torch.load(tmp_path / name / f"rank{rank}.pt") for name in ("cut", "whole"))
        assert all(torch.equal(a, b) for a, b in zip(cut, whole, strict=True))


@pytest.mark.slow
def test_one_that_waits_for_ever_is_ended(tmp_path, capfd):
    """The call that it waits in does not come back: the thread speaks in its place."""
    rollcall.GRACE, before = 2.0, rollcall.GRACE
    try:
        codes = tiny.in_children(lambda rank: run(tmp_path, rank, victim=1, hang=True), count=2)
    finally:
        rollcall.GRACE = before
    assert codes == [1, -signal.SIGKILL]
    assert "process 1 of 2" in capfd.readouterr().err
    assert RunFolder(tmp_path).run()["status"] == "failed"


def test_one_that_fails_is_quoted(tmp_path):
    def reward(completions, trainer_state, **_):
        if trainer_state.global_step == 2 and os.environ["RANK"] == "1":
            raise ZeroDivisionError("by a reward of one's own")
        return tiny.has_a(completions)

    codes = tiny.in_children(lambda rank: run(tmp_path, rank, reward=reward), count=2)
    assert codes == [1, 1]
    assert "raised ZeroDivisionError: by a reward of one's own" in (tmp_path / "error1").read_text()
    words = (tmp_path / "error0").read_text()
    assert "process 1 of 2" in words and "failed: RewardError" in words and "by a reward of one's own" in words


def test_a_machine_that_falls_silent_is_given_up():
    """Two machines cannot look at each other's processes: a beat that has stopped is all that one sees."""
    sign = rollcall.Sign(place="another machine", pid=1, beat=7, seen=100.0)
    assert rollcall.RollCall._problem(sign, 100.0 + rollcall.SILENCE) is None
    assert "silent for 41 s" in rollcall.RollCall._problem(sign, 101.0 + rollcall.SILENCE)
    left, failed = (rollcall.Sign(place="another machine", pid=1, beat=7, ended=words) for words in ("", "E: x"))
    assert rollcall.RollCall._problem(left, 1e9) is None
    assert "failed: E: x" in rollcall.RollCall._problem(failed, 0.0)


@pytest.mark.slow
def test_one_that_is_slow_is_waited_for(tmp_path):
    assert tiny.in_children(lambda rank: run(tmp_path, rank, victim=1, act=nap), count=2) == [0, 0]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [line["step"] for line in RunFolder(tmp_path).metrics()] == [1, 2, 3, 4]


@pytest.mark.slow
def test_processes_that_come_and_go_in_peace_are_not_missed(tmp_path):
    """A second training in the same processes, and one process that is long gone when the other ends."""

    def twice(rank):
        for name in ("first", "second"):
            (tmp_path / name).mkdir(exist_ok=True)
            run(tmp_path / name, rank, max_steps=2)
        if rank == 0:
            time.sleep(2 * rollcall.BEAT)

    assert tiny.in_children(twice, count=2) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_through_accelerate_launch(victim, tmp_path):
    """The launcher ends with an error, nobody is left behind, and somebody has named the one that died."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nimport test_rollcall as here\n"
        f"folder, rank = Path({str(tmp_path)!r}), int(os.environ['RANK'])\n"
        "(folder / f'pid{rank}').write_text(str(os.getpid()))\n"
        f"here.run(folder, rank, victim={victim})\n"
    )
    settings = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "accelerate.commands.launch", *settings, str(script)]
    done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.search(rf"rank\s*: {victim} ", done.stderr) and "-9" in done.stderr, done.stderr
    for rank in (0, 1):
        assert not rollcall._runs(int((tmp_path / f"pid{rank}").read_text()))
