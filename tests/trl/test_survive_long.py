"""A long run does not use more memory, file handles, seconds per step or files than a short one.

pytest tests/trl/test_survive_long.py -m slow                     400 steps
DEW_LONG_STEPS=2000 pytest tests/trl/test_survive_long.py -m slow      as in docs/reliability.md
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median

import pytest
from transformers import TrainerCallback

import trl_tiny as tiny
from dew.run.folder import RunFolder

STEPS = int(os.environ.get("DEW_LONG_STEPS", "400"))
SETTINGS = {
    **tiny.COUNTDOWN, "problems": 256, "num_generations": 4, "per_device_train_batch_size": 8,
    "max_completion_length": 24, "learning_rate": 1e-5, "logging_steps": 10, "records_every": 10, "records_keep": 40,
    "save_steps": 100, "save_total_limit": 2,
}  # fmt: skip


class Watch(TrainerCallback):
    """Resident bytes, file handles and CPU seconds, which do not depend on other load on the machine."""

    def __init__(self, every):
        self.every, self.seen, self.before = every, [], time.process_time()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.every == 0:
            now, memory = time.process_time(), int(Path("/proc/self/statm").read_text().split()[1])
            handles = len(os.listdir("/proc/self/fd"))
            self.seen.append({"memory": memory, "files": handles, "cpu_seconds": (now - self.before) / self.every})
            self.before = now


def watched_run(folder):
    import torch

    from dew.engines.trl import launch
    from dew.run.config import make_run

    torch.set_num_threads(1)
    launch.quiet()
    watch = Watch(max(1, STEPS // 40))
    parsed = launch.parse(make_run({**SETTINGS, "max_steps": STEPS, "output_dir": folder}))
    trainer = launch.build_trainer(parsed)
    trainer.add_callback(watch)
    launch.launch(parsed, trainer)
    (Path(folder) / "watched.json").write_text(json.dumps(watch.seen))


@pytest.mark.slow
def test_a_long_run_is_flat(tmp_path):
    """In a process of its own: this one has allocated and opened other things."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    code = f"import test_survive_long as here; here.watched_run({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env={**environment, "OMP_NUM_THREADS": "1"})
    seen = json.loads((tmp_path / "watched.json").read_text())

    def halves(name):
        values = [sample[name] for sample in seen]
        return values[: len(values) // 2], values[len(values) // 2 :]

    first, last = halves("memory")
    assert mean(last) < 1.02 * mean(first) and max(last) < 1.02 * max(first)
    first, last = halves("files")
    assert max(last) <= max(first)
    first, last = halves("cpu_seconds")
    assert median(last) < 1.25 * median(first)

    folder = RunFolder(tmp_path)
    assert len(folder.metrics()) == STEPS
    assert (tmp_path / "metrics.jsonl").stat().st_size < 1500 * STEPS
    assert (tmp_path / "alarms.jsonl").stat().st_size < 300 * STEPS
    assert len(folder.record_files()) <= 40
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
