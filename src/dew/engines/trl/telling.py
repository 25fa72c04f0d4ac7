"""A GRPOTrainer that says what it does: metrics and alarms at every step, records on a cadence, TRL's table."""

import math
from contextlib import suppress
from typing import Any

from torch import Tensor

from dew.algorithms import Algorithm
from dew.engines.trl import recording
from dew.engines.trl.credit import Credit, Rows
from dew.engines.trl.failures import disk_full
from dew.engines.trl.generation import SamplingTrainer
from dew.engines.trl.health import Health, finite_only
from dew.engines.trl.metrics import Clock, Numbers, StepStatistics, answer_metrics, credit_metrics
from dew.engines.trl.resuming import ResumingTrainer
from dew.engines.trl.rollcall import RollCall
from dew.engines.trl.sampling import Sampled, gather_columns, join
from dew.engines.trl.tables import replace_last
from dew.errors import DewError

LOGS_KEPT = 1000
"""Of what transformers keeps in memory and writes into every checkpoint; metrics.jsonl has it all."""


class TellingTrainer(ResumingTrainer, SamplingTrainer):
    """Collects the numbers of a step and hands them to the trackers and to the run's folder."""

    algorithm: Algorithm
    _outcome: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = Clock()
        self._statistics = StepStatistics()
        self._health = Health()
        self._faults: list[str] = []
        self._recorder = recording.Recorder(self.args.output_dir, self._clock, self.accelerator.is_main_process)
        self.add_callback(self._recorder)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._recorder.begin(recording.run_facts(self.args, self.algorithm, self._model_name(), self._data_name()))
        recording.logger.info("%s", self.args.batches)
        processes = self.accelerator
        try:
            with RollCall(processes.process_index, processes.num_processes, lambda: self._recorder.end("failed")):
                result = super().train(*args, **kwargs)
        except BaseException as error:
            with suppress(OSError):  # where the disk is full, there is no room for this either
                self._recorder.end("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
            full = disk_full(error, self.args.output_dir)
            if full is None or isinstance(error, DewError):
                raise
            raise full from error
        self._recorder.end("done")
        return result

    def _model_name(self) -> str:
        return getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__

    def _data_name(self) -> str | None:
        return getattr(getattr(self.train_dataset, "info", None), "dataset_name", None)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            numbers = self._statistics.read(self.accelerator)
            faults = {name: numbers.pop(name) for name in list(numbers) if name.startswith("faults/")}
            self._faults = [name.removeprefix("faults/") for name, count in faults.items() if count > 0]
            self._put(numbers)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Between gradient and update: a step with a number that is none loses its gradient, and nothing moves."""
        norm = super()._get_grad_norm(*args, **kwargs)
        size = float(norm) if norm is not None else 0.0
        step = self.state.global_step + 1
        seen = self._health.judge(step, self._faults, size, scaled=self._scaled())
        if seen is not None:
            self.optimizer.zero_grad()
            if self.accelerator.is_main_process:
                recording.logger.warning("step %d is skipped, not finite: %s", step, seen)
        self._put({"steps/skipped": float(seen is not None)})
        if norm is not None:
            self._recorder.put(finite_only({"grad_norm": size}))
        return norm

    def _scaled(self) -> bool:
        scaler = self.accelerator.scaler
        return scaler is not None and scaler.get_scale() > 1

    def _put(self, numbers: Numbers) -> None:
        """To the trackers, which TRL tells every `logging_steps`, and to the run's folder, which has every step."""
        metrics, numbers = self._metrics["train" if self.model.training else "eval"], finite_only(numbers)
        for name, value in numbers.items():
            metrics[name].append(value)
        if self.model.training:
            self._recorder.put(numbers)

    def _tell(self, sampled: Sampled, rows: Rows, credit: Credit) -> None:
        answers = join(sampled.answers, {})
        groups = sampled.groups
        numbers = answer_metrics(answers, self.reward_func_names, self.algorithm.threshold)
        numbers.update(credit_metrics(rows, credit))
        numbers.update({f"groups/{name}": float(n) for name, n in groups.items() if name != "mixed"})
        numbers["groups/mixed_share"] = groups["mixed"] / groups["sampled"]
        if self._clock["generation"] > 0:
            numbers["tokens_per_second"] = float(answers["length"].sum()) / self._clock["generation"]
        if rows.guided.any():
            numbers["guide/accuracy"] = float(credit.correct[rows.guided].float().mean())
            numbers["guide/rescued_share"] = float(credit.failed.float().mean())
        self._put(numbers)
        self._show_advantages(sampled, rows, credit)
        if self._recording():
            self._record(sampled, credit)

    def _show_advantages(self, sampled: Sampled, rows: Rows, credit: Credit) -> None:
        """The completions table shows what was trained on: the mean advantage of each answer's tokens."""
        means = credit.advantages.sum(-1) / rows.mask.sum(-1).clamp_min(1)
        sampled_rows = sum(len(answers["outcome"]) for answers in sampled.answers)
        replace_last(self._logs, sampled_rows, sampled.shared["table"], means.tolist())

    def _recording(self) -> bool:
        steps = self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps
        return self.model.training and recording.due(self.state.global_step + 1, self.args.records_every, steps)

    def _record(self, sampled: Sampled, credit: Credit) -> None:
        columns = sampled.shared
        if "completion_ids" not in columns:
            wanted = {key: sampled.local[key] for key in ("prompt_ids", "prompt_mask", "completion_ids")}
            fills = {key: self._tokenizer.pad_token_id for key in ("prompt_ids", "completion_ids")}
            columns = {**columns, **gather_columns(self.accelerator, wanted, fills)}
        if self.accelerator.is_main_process:
            step = self.state.global_step + 1
            groups = recording.group_records(
                step,
                self.algorithm,
                columns,
                credit,
                self._tokenizer,
                self.args.records_groups,
                self.reward_func_names[self._outcome],
            )
            self._recorder.folder.write_records(step, groups, self.args.records_keep)

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "health": self._health.state()}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._health.restore(state["health"])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for told in self._metrics.values():
            for name in list(told):
                told[name][:] = [x for x in told[name] if math.isfinite(x)]
                if not told[name]:
                    del told[name]
        for name in set(logs) - set(finite_only(logs)):
            del logs[name]  # in place: TRL adds the evaluation's numbers to this very dictionary
        super().log(logs, start_time)
        del self.state.log_history[:-LOGS_KEPT]
        self._recorder.logged(self.state.global_step, logs)
