"""What a run leaves in its folder (metrics, alarms, facts of the run) and in TRL's table of completions."""

import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from dew.algorithms import Algorithm
from dew.engines.metrics import Numbers
from dew.engines.recording import RunLog, git_commit, group_records, machine, versions
from dew.engines.trl.batch import Batch, gather_columns
from dew.engines.trl.metrics import Clock

EVERY_STEP = (
    "reward", "accuracy", "entropy", "credit/", "groups/", "clip/", "ratio/", "kl/", "length/", "guide/",
    "seconds/", "tokens_per_second", "loss", "grad_norm", "rewards/", "completions/", "step_time", "frac_reward",
)  # fmt: skip
"""Metrics that a step's own line has already, or that TRL logs under another name."""

PHASES = ("generation", "scoring", "reward", "credit")


class Recorder(RunLog, TrainerCallback):  # type: ignore[misc]
    """Collects the metrics of a step and writes them when it ends. Only the main process writes."""

    def __init__(self, folder: str, clock: Clock, writes: bool) -> None:
        super().__init__(folder, writes)
        self._clock = clock
        self._numbers: Numbers = {}
        self._start = time.perf_counter()

    def put(self, numbers: Numbers) -> None:
        self._numbers.update(numbers)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.resume(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = self._clock.read()
        numbers, self._numbers = self._numbers, {}
        spent = {f"seconds/{name}": seconds[name] for name in PHASES if name in seconds}
        spent["seconds/update"] = time.perf_counter() - self._start - sum(spent.values())
        self.write(state.global_step, {**numbers, **spent})

    def record(self, batch: Batch, trainer: Any) -> None:
        """Write the token record of a batch. A collective call."""
        assert batch.credit is not None
        tokenizer, args = trainer._tokenizer, trainer.args
        ids = {key: batch.inputs[key] for key in ("prompt_ids", "prompt_mask", "completion_ids")}
        fills = dict.fromkeys(("prompt_ids", "completion_ids"), tokenizer.pad_token_id)
        columns = {**batch.columns, **gather_columns(trainer.accelerator, ids, fills)}
        if self._writes:
            step, outcome = trainer.state.global_step + 1, trainer.reward_func_names[trainer.outcome_index]
            groups, credit = args.records_groups, batch.credit
            records = group_records(step, trainer.algorithm, columns, credit, tokenizer, groups, outcome)
            self.folder.write_records(step, records, args.records_keep)

    def logged(self, step: int, logs: dict[str, Any]) -> None:
        """Write what else is logged at this step: learning rate, evaluation, metrics of TRL and reward functions."""
        others = {
            name.replace("eval_", "eval/", 1) if name.startswith("eval_") else name: value
            for name, value in logs.items()
            if isinstance(value, int | float) and not name.startswith((*EVERY_STEP, "train_", "total_flos"))
        }
        if others:
            self.write(step, others)


def run_facts(args: Any, algorithm: Algorithm, model: Any, dataset: Any) -> dict[str, Any]:
    """What run.json says about a run when it starts."""
    return {
        "name": Path(args.output_dir).name,
        "engine": "trl",
        "algorithm": {"name": algorithm.name, "settings": asdict(algorithm)},
        "model": getattr(model.config, "_name_or_path", "") or type(model).__name__,
        "data": getattr(getattr(dataset, "info", None), "dataset_name", None),
        "seed": args.seed,
        "batches": str(args.batches),
        "versions": versions("torch", "transformers", "trl"),
        "machine": machine(args.batches.processes),
        "git_commit": git_commit(),
    }


# ── TRL's table of completions (console, parquet, trackers) ─────────────────────────────────────────────────


def extend_table(logs: dict[str, Any]) -> None:
    """Make room for all answers of a sampling round, of which TRL would keep only a batch."""
    for name in ("prompt", "completion", "advantages"):
        logs[name] = deque(logs[name])
    for part in ("rewards", "extra"):
        logs[part].default_factory = deque


def last_rows(logs: dict[str, Any], count: int) -> list[dict[tuple[str, ...], Any]]:
    """The newest `count` rows of the table, by column."""
    columns = {name: list(column) for name, column in _columns(logs).items()}
    return [{name: x[i] for name, x in columns.items() if len(x) >= -i} for i in range(-count, 0)]


def show_trained(logs: dict[str, Any], batch: Batch, limit: int) -> None:
    """Replace the newest rows by those that train, with the mean advantage of their tokens, and keep `limit` rows."""
    assert batch.credit is not None
    advantages = (batch.credit.advantages.sum(-1) / batch.mask.sum(-1).clamp_min(1)).tolist()
    for name, column in _columns(logs).items():
        rows = list(column)[: -len(batch.answers["outcome"])]
        rows += advantages if name == ("advantages",) else [row.get(name) for row in batch.table]
        column.clear()
        column.extend(rows[-limit:])


def _columns(logs: dict[str, Any]) -> dict[tuple[str, ...], deque[Any]]:
    """Every column except images, which not every row has."""
    flat: dict[tuple[str, ...], deque[Any]] = {(key,): logs[key] for key in ("prompt", "completion", "advantages")}
    for part in ("rewards", "extra"):
        flat.update({(part, name): column for name, column in logs[part].items()})
    return flat
