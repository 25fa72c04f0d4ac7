"""A run that is killed and resumed is the run that was not: the same weights bit for bit, the same metrics."""

import json
import os
import signal

import pytest
import torch
from transformers import TrainerCallback

import trl_tiny as tiny
from dew.engines.trl.checkpoints import last_complete
from dew.engines.trl.sampling import PromptStream
from dew.errors import ConfigError
from dew.records import RunFolder


class Kill(TrainerCallback):
    """SIGKILL at the end of a step, before anything of it is logged or saved."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


SETTINGS = {
    "gtpo, several epochs": {"algorithm": "gtpo", "data": 4},
    "gtpo, killed inside a generation": {"algorithm": "gtpo", "data": 16, "num_iterations": 3},
    "grpo_s, several optimizer steps per generation": {
        "algorithm": "grpo_s",
        "data": 16,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
    },
    "dapo, dynamic sampling": {"algorithm": "dapo", "data": 6},
}
CHANGES_WITH_TIME = ("time", "seconds", "tokens_per_second", "step_time")


def make(folder, data, **settings):
    plain = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "logging_steps": 2}
    return tiny.trainer(folder, data=tiny.prompts(data), **{**plain, **settings})


def told(folder):
    lines = RunFolder(folder).metrics()
    return [{k: v for k, v in line.items() if not k.startswith(CHANGES_WITH_TIME)} for line in lines]


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


EVERY = [(name, at) for name in SETTINGS for at in range(2, 8)]
FIRST = list(zip(SETTINGS, (6, 5, 6, 3), strict=True))


@pytest.mark.parametrize(
    ("name", "at"), [pytest.param(*case, marks=[] if case in FIRST else pytest.mark.slow) for case in EVERY]
)
def test_killed_and_resumed_is_the_run_that_was_not(name, at, tmp_path):
    whole = make(tmp_path / "whole", **SETTINGS[name])
    whole.train()

    def killed(_):
        trainer = make(tmp_path / "cut", **SETTINGS[name])
        trainer.add_callback(Kill(at))
        trainer.train()

    assert tiny.in_children(killed) == [-signal.SIGKILL]
    assert RunFolder(tmp_path / "cut").run()["status"] == "running"
    resumed = make(tmp_path / "cut", **SETTINGS[name])
    resumed.train(resume_from_checkpoint=True)

    for parameter, expected in weights(whole).items():
        assert torch.equal(weights(resumed)[parameter], expected), parameter
    assert told(tmp_path / "cut") == told(tmp_path / "whole")
    assert RunFolder(tmp_path / "cut").run()["status"] == "done"


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path):
    for step, state in ((2, '{"epoch": 1.0}'), (4, '{"epoch": 2'), (6, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert last_complete(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        last_complete(str(tmp_path / "checkpoint-4"))


def test_the_prompt_stream_neither_repeats_nor_skips():
    stream = PromptStream(7, seed=3, shuffle=True)
    taken = [i for count in (2, 3, 1, 8) for i in stream.take(count)]
    assert sorted(taken[:7]) == sorted(taken[7:]) == list(range(7))
    again = PromptStream(7, seed=3, shuffle=True)
    again.position = 5
    assert again.take(9) == taken[5:14]
    assert json.dumps(taken[:7]) != json.dumps(taken[7:])
    assert PromptStream(3, seed=0, shuffle=False).take(5) == [0, 1, 2, 0, 1]
