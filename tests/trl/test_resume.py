"""A run that is killed and resumed gives the same weights, bit for bit, and the same metrics as one that was not."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

import trl_tiny as tiny
from dew.engines.trl import checkpoints
from dew.engines.trl.checkpoints import newest_complete, write_manifest
from dew.engines.trl.rollout import PromptStream
from dew.errors import ConfigError
from dew.run.folder import RunFolder


class Kill(TrainerCallback):
    """SIGKILL at the end of a step, before anything of it is logged or saved."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


STEPS = 6
SEVERAL = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
SETTINGS = {
    "gtpo, several epochs": {"algorithm": "gtpo", "data": 4},
    "gtpo, killed inside a generation": {"algorithm": "gtpo", "data": 16, "num_iterations": 3},
    "grpo_s, several optimizer steps per generation": {"algorithm": "grpo_s", "data": 16, **SEVERAL},
    "dapo, dynamic sampling": {"algorithm": "dapo", "data": 6},
}


def make(folder, data, **settings):
    plain = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "logging_steps": 2}
    return tiny.trainer(folder, data=tiny.prompts(data), **{**plain, **settings})


def assert_same(resumed, whole):
    for (name, found), expected in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(found, expected), name
    assert tiny.lasting_metrics(resumed.args.output_dir) == tiny.lasting_metrics(whole.args.output_dir)


EVERY = [(name, at) for name in SETTINGS for at in range(2, STEPS)]
DEFAULT = ("dapo, dynamic sampling", 3)


@pytest.mark.parametrize(
    ("name", "at"), [pytest.param(*case, marks=[] if case == DEFAULT else pytest.mark.slow) for case in EVERY]
)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(name, at, tmp_path):
    whole = make(tmp_path / "whole", **SETTINGS[name])
    whole.train()

    assert tiny.in_children(lambda _: _killed(tmp_path / "cut", at, SETTINGS[name])) == [-signal.SIGKILL]
    assert RunFolder(tmp_path / "cut").run()["status"] == "running"
    resumed = make(tmp_path / "cut", **SETTINGS[name])
    resumed.train(resume_from_checkpoint=True)

    assert_same(resumed, whole)
    assert RunFolder(tmp_path / "cut").run()["status"] == "done"


def test_a_trainer_that_was_interrupted_inside_a_step_resumes_without_its_micro_batches(tmp_path):
    """Ctrl-C in a notebook, then `train` of the same trainer."""
    settings = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 2, "save_steps": 1}

    def trainer(name):
        mixed = lambda completions, **_: [float(i % 2) for i in range(len(completions))]  # noqa: E731
        return tiny.trainer(tmp_path / name, mixed, save_strategy="steps", **settings)

    class Interrupt(TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            if state.global_step == 1:
                resumed.remove_callback(self)
                raise KeyboardInterrupt

    whole = trainer("whole")
    whole.train()
    resumed = trainer("cut")
    resumed.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        resumed.train()
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, whole)


def checkpoint(folder, step):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    for name, text in {"trainer_state.json": '{"epoch": 1.0}', "dew_state_0.pt": "x", "model": "weights"}.items():
        (path / name).write_text(text)
    write_manifest(path)
    return path


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["model", "trainer_state.json", "dew_state_0.pt", "dew_manifest.json"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(how, name, tmp_path, caplog):
    for step in (2, 4, 10):
        checkpoint(tmp_path, step)
    assert newest_complete(str(tmp_path)) == str(tmp_path / "checkpoint-10") and not caplog.text
    DAMAGES[how](tmp_path / "checkpoint-10" / name)
    assert newest_complete(str(tmp_path)) == str(tmp_path / "checkpoint-4")
    assert "checkpoint-10" in caplog.text
    if name != "dew_manifest.json":
        assert name in caplog.text and (tmp_path / "damaged-checkpoint-10").is_dir()
    assert not (tmp_path / "checkpoint-10").exists()


def test_an_interrupted_checkpoint_is_skipped(tmp_path, caplog):
    """One of dew lacks its manifest; one of plain TRL, which has none, lacks its last file or has half of it."""
    checkpoint(tmp_path, 8)
    (tmp_path / "checkpoint-8" / "dew_manifest.json").unlink()
    for step, state in ((2, '{"epoch": 1.0}'), (4, '{"epoch": 2'), (6, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert newest_complete(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert all(f"checkpoint-{step}" in caplog.text for step in (4, 6, 8))
    assert newest_complete(str(tmp_path / "checkpoint-2")) is None
    for given, problem in ((True, "no complete checkpoint"), (str(tmp_path / "checkpoint-9"), "not a checkpoint")):
        with pytest.raises(ConfigError, match=problem):
            make(tmp_path / "new", data=4).train(resume_from_checkpoint=given)


def test_older_checkpoints_go_only_when_the_new_one_is_sealed(tmp_path):
    """With room for one checkpoint, a run that is cut off while it writes still has the one before."""
    settings = {**SETTINGS["gtpo, several epochs"], "save_total_limit": 1}

    def killed(_):
        trainer = make(tmp_path, **settings)
        inner = checkpoints.write_manifest

        def killed_at_three(folder):
            if folder.name == "checkpoint-3":
                os.kill(os.getpid(), signal.SIGKILL)
            inner(folder)

        checkpoints.write_manifest = killed_at_three
        trainer.train()

    assert tiny.in_children(killed) == [-signal.SIGKILL]
    assert newest_complete(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    make(tmp_path, **settings).train(resume_from_checkpoint=True)
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == [f"checkpoint-{STEPS}"]


def _killed(folder, at, settings):
    trainer = make(folder, **settings)
    trainer.add_callback(Kill(at))
    trainer.train()


def test_another_number_of_processes_resumes_without_the_generation(tmp_path, caplog):
    """Each process has saved its part of it. A process without a file must not be the only one that samples."""
    state = {"batches": "on 1", "step": 3, "generation": [{"x": torch.ones(2)}]}
    torch.save(state, tmp_path / checkpoints.OWN_STATE.format(0))
    (tmp_path / "trainer_state.json").write_text('{"epoch": 1.5}')
    for rank in (0, 1):
        state = checkpoints.load_state(str(tmp_path), rank, "on 2", "gtpo", "cpu")
        assert (state["step"], state["generation"], state["epochs"]) == (0, None, 1)
    state = checkpoints.load_state(str(tmp_path), 0, "on 1", "gtpo", "cpu")
    assert state["step"] == 3 and state["generation"] is not None
    (tmp_path / checkpoints.OWN_STATE.format(0)).unlink()
    (tmp_path / checkpoints.MANIFEST).write_text("{}")
    assert checkpoints.load_state(str(tmp_path), 0, "on 1", "gtpo", "cpu") is None
    assert "has weights only (save_only_model)" in caplog.text


OTHERS = [{"steps_per_generation": 4}, {"per_device_train_batch_size": 4}, {"algorithm": "kl_cov(max_rounds=1)"}]


@pytest.mark.parametrize("changed", OTHERS)
def test_a_run_resumes_inside_a_generation_with_other_batch_sizes_or_another_algorithm(changed, tmp_path, caplog):
    """The generation in the checkpoint has other micro-batches than those that TRL would look up in it, or the other
    algorithm's advantages."""
    settings = {"steps_per_generation": 2, "save_strategy": "steps", "save_steps": 1}
    tiny.trainer(tmp_path, max_steps=3, **settings).train()
    tiny.trainer(tmp_path, max_steps=5, **{**settings, **changed}).train(resume_from_checkpoint=True)
    lines = RunFolder(tmp_path).metrics()
    assert len(lines) == 5 and [line["step"] for line in lines if "length/mean" in line] == [1, 3, 4], "sampled"
    assert ("batch sizes have changed" in caplog.text) != ("algorithm" in changed)


def test_a_resumed_run_trains_at_its_own_learning_rate(tmp_path, caplog):
    """The rate falls to 0 over the run's steps. Two of four are done: 4e-4 * (1 - 2/4), then 4e-4 * (1 - 3/4)."""
    caplog.set_level("INFO", "dew")
    saved = {"save_strategy": "steps", "save_steps": 2}
    tiny.trainer(tmp_path, learning_rate=1e-4, **saved).train()
    with pytest.raises(ConfigError, match="optim=sgd: the checkpoint has the state of another optimizer"):
        tiny.trainer(tmp_path, max_steps=4, optim="sgd", **saved).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="checkpoint-2 is of a run without an adapter"):
        lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
        tiny.trainer(tmp_path, max_steps=4, others=lora, **saved).train(resume_from_checkpoint=True)
    resumed = tiny.trainer(tmp_path, max_steps=4, learning_rate=4e-4, adam_beta2=0.9, algorithm="grpo", **saved)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.optimizer.param_groups[0]["betas"] == (0.9, 0.9)
    assert "algorithm: grpo from now on; the checkpoint was trained with" in caplog.text
    rates = [line["learning_rate"] for line in resumed.state.log_history if "learning_rate" in line]
    assert rates == pytest.approx([1e-4, 5e-5, 2e-4, 1e-4])
    assert "learning_rate: 0.0004 from now on; the checkpoint was trained with 0.0001." in caplog.text


def test_other_schedules_go_on_from_the_rate_in_the_checkpoint():
    optimizer = torch.optim.SGD([{"params": [torch.ones(1)], "lr": x} for x in (3e-4, 1e-5)])
    args, schedule = SimpleNamespace(learning_rate=1e-5), torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    trainer = SimpleNamespace(lr_scheduler=schedule, optimizer=optimizer, args=args, described="dew")
    for old in (1e-4, None, 1e-5):  # None: written by dew 0.2
        checkpoints.use_own_settings(trainer, [{}, {"momentum": 0}], {"learning_rate": old})
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([3e-5, 1e-6])


def test_the_prompt_stream_visits_each_prompt_once_per_epoch():
    stream = PromptStream(range(7), seed=3, shuffle=True)
    taken = [i for count in (2, 3, 1, 8) for i in stream.take(count)]
    assert sorted(taken[:7]) == sorted(taken[7:]) == list(range(7))
    again = PromptStream(range(7), seed=3, shuffle=True)
    again.position = 5
    assert again.take(9) == taken[5:14]
    assert taken[:7] != taken[7:]
    assert PromptStream(range(3), seed=0, shuffle=False).take(5) == [0, 1, 2, 0, 1]


def test_checkpoints_are_rotated_by_step_not_by_a_clock_that_was_corrected(tmp_path):
    make(tmp_path, 4, max_steps=2, save_total_limit=1).train()
    os.utime(tmp_path / "checkpoint-2", (2**32, 2**32))  # the year 2106
    make(tmp_path, 4, max_steps=3, save_total_limit=1).train(resume_from_checkpoint=True)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


@pytest.mark.parametrize("length", [{"max_steps": 2}, {"max_steps": -1, "num_train_epochs": 1}], ids=["steps", "epoch"])
def test_a_finished_run_is_loaded_and_not_trained_further(length, tmp_path):
    first = make(tmp_path, 2, save_total_limit=1, **length)
    first.train()
    again = make(tmp_path, 2, **length)
    assert again.train(resume_from_checkpoint=True).global_step == again.state.global_step == first.state.global_step
    assert torch.equal(tiny.weights(again.model), tiny.weights(first.model))
    assert RunFolder(tmp_path).run()["status"] == "done"
    longer = {"max_steps": 3} if length["max_steps"] > 0 else {"max_steps": -1, "num_train_epochs": 2}
    more = make(tmp_path, 2, **longer)
    assert more.train(resume_from_checkpoint=True).global_step > first.state.global_step
