"""A long run of the tiny model in a process of its own, watched from within: memory, file handles, seconds.

python long_run.py FOLDER STEPS        leaves FOLDER/watched.json beside what every run leaves
"""

import json
import os
import sys
import time
from pathlib import Path

SETTINGS = {
    "model_name_or_path": "tiny",
    "task": "countdown",
    "problems": 256,
    "algorithm": "gtpo",
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 24,
    "learning_rate": 1e-5,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "logging_steps": 10,
    "records_every": 10,
    "records_keep": 40,
    "save_steps": 100,
    "save_total_limit": 2,
    "disable_tqdm": True,
}


def memory():
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def watch(every):
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self):
            self.seen = []
            self.before = time.process_time()

        def on_step_end(self, args, state, control, **_):
            if state.global_step % every == 0:
                now = time.process_time()
                sample = {"step": state.global_step, "memory": memory(), "files": len(os.listdir("/proc/self/fd"))}
                self.seen.append({**sample, "cpu_seconds": (now - self.before) / every})
                self.before = now
                print(self.seen[-1], flush=True)

    return Watch()


def main(folder, steps):
    import torch

    from dew.engines.trl import launch
    from dew.engines.trl.launch import parse
    from dew.run.config import make_run

    torch.set_num_threads(1)
    launch.quiet()
    watcher = watch(max(1, steps // 40))
    parsed = parse(make_run({**SETTINGS, "max_steps": steps, "output_dir": str(folder)}))
    trainer = launch.build_trainer(parsed)
    trainer.add_callback(watcher)
    launch.launch(parsed, trainer)
    (folder / "watched.json").write_text(json.dumps(watcher.seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
