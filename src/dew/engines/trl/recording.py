"""What a run leaves in its folder: metrics and alarms step by step, token records on a cadence, facts of the run."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from dew.algorithms import Algorithm
from dew.engines.metrics import Numbers
from dew.engines.recording import (
    RunLog,
    due,
    git_commit,
    gold_of,
    group_records,
    logger,
    machine,
    versions,
)
from dew.engines.trl.metrics import Clock

__all__ = ["Recorder", "due", "git_commit", "gold_of", "group_records", "logger", "run_facts"]

EVERY_STEP = (
    "reward", "accuracy", "entropy", "credit/", "groups/", "clip/", "ratio/", "kl/", "length/", "guide/",
    "seconds/", "tokens_per_second", "loss", "grad_norm", "rewards/", "completions/", "step_time", "frac_reward",
)  # fmt: skip
"""What a step's own line says already, or TRL says in other words. Trackers get means over `logging_steps`."""

PHASES = ("generation", "scoring", "reward", "credit")


class Recorder(RunLog, TrainerCallback):  # type: ignore[misc]
    """Collects a step's numbers and writes them when it ends. Only the first process writes."""

    def __init__(self, folder: str, clock: Clock, writes: bool) -> None:
        super().__init__(folder, writes)
        self._clock = clock
        self._numbers: Numbers = {}
        self._begun = time.perf_counter()

    def put(self, numbers: Numbers) -> None:
        self._numbers.update(numbers)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.resume(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = self._clock.read()
        numbers, self._numbers = self._numbers, {}
        spent = {f"seconds/{name}": seconds[name] for name in PHASES if name in seconds}
        spent["seconds/update"] = time.perf_counter() - self._begun - sum(spent.values())
        self.write(state.global_step, {**numbers, **spent})

    def logged(self, step: int, logs: dict[str, Any]) -> None:
        """What else a tracker is told at this step: learning rate, evaluation, what TRL and reward functions log."""
        others = {
            name.replace("eval_", "eval/", 1) if name.startswith("eval_") else name: value
            for name, value in logs.items()
            if isinstance(value, int | float) and not name.startswith((*EVERY_STEP, "train_", "total_flos"))
        }
        if others:
            self.write(step, others)


def run_facts(args: Any, algorithm: Algorithm, model: str, data: str | None) -> dict[str, Any]:
    """Who ran what on which machine."""
    return {
        "name": Path(args.output_dir).name,
        "engine": "trl",
        "algorithm": {"name": algorithm.name, "settings": asdict(algorithm)},
        "model": model,
        "data": data,
        "seed": args.seed,
        "batches": str(args.batches),
        "versions": versions("torch", "transformers", "trl"),
        "machine": machine(args.batches.processes),
        "git_commit": git_commit(),
    }
