"""A disk that is really full: the run reports it, earlier files are complete, and it resumes once there is space."""

import ctypes
import os

import pytest
import torch

import trl_tiny as tiny
from dew.engines.trl.checkpoints import newest_complete
from dew.errors import EngineError
from dew.run.folder import RunFolder

NEW_USER, NEW_MOUNTS, REMOUNT = 0x10000000, 0x00020000, 0x20
NOT_POSSIBLE = 77
STEPS = 7
"""Each leaves a checkpoint of 320 kB."""


def mount(folder, kilobytes, flags=0):
    """A disk of this many kilobytes, visible only to this process and its children."""
    options = f"size={kilobytes}k".encode()
    return ctypes.CDLL(None).mount(b"tmpfs", str(folder).encode(), b"tmpfs", flags, options)


def own_disk(folder, kilobytes):
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(NEW_USER | NEW_MOUNTS):
        os._exit(NOT_POSSIBLE)
    try:
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
    except OSError:
        os._exit(NOT_POSSIBLE)
    if mount(folder, kilobytes):
        os._exit(NOT_POSSIBLE)


def make(folder):
    return tiny.trainer(folder, max_steps=STEPS, save_strategy="steps", save_steps=1, records_every=1, logging_steps=1)


SIZES = [1400, 1500, 1600, 1750, 1900, 2100]


@pytest.mark.parametrize(
    "kilobytes", [pytest.param(size, marks=[] if size == SIZES[0] else pytest.mark.slow) for size in SIZES]
)
def test_a_full_disk(kilobytes, tmp_path):
    """The size decides where writing fails: in the weights, the optimizer, a record, a line of metrics."""
    whole = make(tmp_path / "whole")
    whole.train()
    (tmp_path / "small").mkdir()

    def child(_):
        own_disk(tmp_path / "small", kilobytes)
        with pytest.raises(EngineError, match="the disk is full") as error:
            make(tmp_path / "small").train()
        assert f"dew resume {tmp_path / 'small'}" in str(error.value)
        assert newest_complete(str(tmp_path / "small")) is not None
        mount(tmp_path / "small", 100_000, REMOUNT)
        resumed = make(tmp_path / "small")
        resumed.train(resume_from_checkpoint=True)
        assert torch.equal(tiny.weights(resumed.model), tiny.weights(whole.model))
        assert len(RunFolder(tmp_path / "small").metrics()) == STEPS

    (code,) = tiny.in_children(child)
    if code == NOT_POSSIBLE:
        pytest.skip("this system does not allow mounting a tmpfs in a user namespace")
    assert code == 0
