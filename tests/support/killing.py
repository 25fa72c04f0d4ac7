"""Moments at which a run may be killed: each starts the run in a child process that gets a SIGKILL at that moment.

A moment is a function that is called in the child before the run starts and patches a function of Python, torch or
transformers, or a method of the trainer, so that it kills the process. dew has no hooks for this.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerState, modeling_utils

import trl_tiny as tiny
from dew.cli import main
from dew.engines.trl import DewTrainer
from dew.run.folder import RunFolder

SMALL = {
    **tiny.COUNTDOWN, "problems": 10, "max_steps": 6, "num_generations": 8, "steps_per_generation": 2,
    "gradient_accumulation_steps": 1, "learning_rate": 2e-4, "max_completion_length": 26, "records_every": 1,
    "save_steps": 1, "save_total_limit": 2, "scores": {"problems": 2, "k": 2},
}  # fmt: skip


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(owner, name, count=1, after=None):
    """Die when something is called for the `count`-th time: before it, or `after` it did its work."""
    inner, calls = getattr(owner, name), []

    def deadly(*args, **kwargs):
        calls.append(1)
        if len(calls) < count:
            return inner(*args, **kwargs)
        if after is not None:
            inner(*args, **kwargs)
            after(*args, **kwargs)
        return die()

    setattr(owner, name, deadly)


def halve(path):
    """What a torn write leaves."""
    os.truncate(path, os.path.getsize(path) // 2)


def while_syncing(part, count=1):
    """Die when the file whose name has `part` is half written."""
    inner, calls = os.fsync, []

    def deadly(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        if part in os.path.basename(path) and os.path.isfile(path):
            calls.append(1)
            if len(calls) == count:
                halve(path)
                die()
        inner(handle)

    os.fsync = deadly


def while_renaming(part, count=1, after=False):
    inner, calls = os.replace, []

    def deadly(source, target, **kwargs):
        calls.extend([1] * (part in os.path.basename(target)))
        if len(calls) == count and not after:
            die()
        inner(source, target, **kwargs)
        if len(calls) == count:
            die()

    os.replace = deadly


def while_saving(owner, name, count):
    """Die when the file that is the second argument of a function is half written."""
    at_call(owner, name, count, after=lambda content, path, **_: halve(path))


def in_rotation():
    """Half of an old checkpoint is deleted."""
    inner = shutil.rmtree

    def deadly(path, *args, **kwargs):
        files = sorted(Path(path).glob("*")) if "checkpoint" in str(path) else []
        if not files:
            return inner(path, *args, **kwargs)
        for file in files[::2]:
            file.unlink()
        return die()

    shutil.rmtree = deadly


def in_log(name, count):
    inner, calls = RunFolder._append, []

    def deadly(self, file, line):
        inner(self, file, line)
        calls.append(file)
        if calls.count(name) == count:
            path = self.path / file
            os.truncate(path, path.stat().st_size - 40)
            die()

    RunFolder._append = deadly


def in_update():
    """Half of the weights have moved."""
    inner, calls = torch.optim.AdamW.step, []

    def deadly(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            for group in self.param_groups:
                group["params"] = group["params"][::2]
            inner(self, *args, **kwargs)
            die()
        return inner(self, *args, **kwargs)

    torch.optim.AdamW.step = deadly


def at_model():
    inner = Path.rename

    def deadly(self, target):
        if self.name == ".model.part":
            die()
        return inner(self, target)

    Path.rename = deadly


MOMENTS = {
    "writing config.yaml": lambda: while_syncing("config.yaml"),
    "scoring before": lambda: while_syncing("scores.json"),
    "writing run.json": lambda: while_syncing("run.json"),
    "sampling": lambda: at_call(DewTrainer, "_generate", 2),
    "scoring rewards": lambda: at_call(DewTrainer, "_calculate_rewards", 2),
    "forward": lambda: at_call(DewTrainer, "_compute_loss", 4),
    "half an update": in_update,
    "between gradient and update": lambda: at_call(DewTrainer, "_get_grad_norm", 3),
    "a torn line of metrics": lambda: in_log("metrics.jsonl", 4),
    "half a record": lambda: while_syncing("step-0000000", 2),
    "a record before its name": lambda: while_renaming("step-0000000", 2),
    "a record after its name": lambda: while_renaming("step-0000000", 2, after=True),
    "half a checkpoint's weights": lambda: while_saving(modeling_utils, "safe_save_file", 2),
    "half a checkpoint's own state": lambda: while_saving(torch, "save", 1),
    "half a checkpoint's optimizer": lambda: while_saving(torch, "save", 6),
    "half a checkpoint's state": lambda: while_saving(TrainerState, "save_to_json", 2),
    "half a manifest": lambda: while_syncing("dew_manifest", 3),
    "a manifest before its name": lambda: while_renaming("dew_manifest", 1),
    "a manifest after its name": lambda: while_renaming("dew_manifest", 2, after=True),
    "half a rotation": in_rotation,
    "half the model": lambda: while_saving(modeling_utils, "safe_save_file", 7),
    "the model before its name": at_model,
    "scoring after": lambda: while_syncing("answers-after"),
    "half a report": lambda: while_syncing("report.html"),
    "a report before its name": lambda: while_renaming("report.html"),
    "between page and numbers": lambda: while_renaming("report.json", after=True),
}


def configuration(folder):
    path = folder.with_name(f"{folder.name}.yaml")
    path.write_text(json.dumps({**SMALL, "output_dir": str(folder)}))
    return path


def child(folder, moment=None):
    """A function for a child process: it starts the run, or resumes it if it was started before."""
    moment = moment or (lambda: None)

    def start(_):
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        moment()
        started = (folder / "config.yaml").exists()
        sys.argv = ["dew", *(["resume", str(folder)] if started else ["train", str(configuration(folder))])]
        main()

    return start


def run(folder, moment=None):
    """Run a child until it ends; returns its exit code: 0, or -9."""
    return tiny.in_children(child(folder, moment))[0]


def run_for(folder, seconds):
    """Run a child that is killed after this many seconds, wherever it is then."""
    process = multiprocessing.get_context("fork").Process(target=tiny._child, args=(child(folder), 0, 1, 0))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
    process.join()
    return process.exitcode


def kill_at_random(home, kills, seed, check):
    """Start runs and kill them at random moments, again and again, until there were `kills` kills.

    Every run that finishes is passed to `check`. Returns the number of runs.
    """
    dice = random.Random(seed)
    start = time.monotonic()
    assert run(home / "timed") == 0
    duration = time.monotonic() - start
    killed, runs = 0, 0
    while killed < kills:
        folder, before, runs = home / f"run{runs}", killed, runs + 1
        while run_for(folder, dice.uniform(0, duration)) != 0:
            killed += 1
        if killed == before:  # never killed: the machine is faster now than when it was timed
            duration *= 0.9
        check(folder)
        print(f"{killed} kills, {runs} runs", flush=True)
    return runs
