"""What dew's trainers do around TRL's: claim the run's folder, record every step, skip non-finite ones, resume."""

import logging
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerState
from transformers.trainer_utils import TrainOutput, rotate_checkpoints

from dew.engines.metrics import Numbers
from dew.engines.recorder import RESUME
from dew.engines.trl import checkpoints, failures
from dew.engines.trl.metrics import Recorder
from dew.engines.trl.nonfinite import NonFinite, finite_only
from dew.errors import ConfigError, Problem
from dew.run.folder import RunFolder

logger = logging.getLogger("dew")

LOGS_KEPT = 1000
"""Log entries that transformers keeps in memory and writes into every checkpoint; metrics.jsonl has all of them."""


def own_config(args: Any, kind: Any, model: Any) -> Any:
    """`args`, or the defaults if there are none. Another class, such as TRL's, is an error."""
    if args is None:
        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        return kind(f"{Path(name).name or 'model'}-dew")
    if not isinstance(args, kind):
        remedy = f"Write {kind.__name__}, which takes the same settings."
        raise ConfigError(Problem(f"args is a {type(args).__name__}.", remedy=remedy))
    return args


class RecordedTrainer(Trainer):  # type: ignore[misc]
    """Comes before one of TRL's trainers among the base classes. The subclass sets `algorithm` (a dataclass with a
    name) and `args.batches`, and extends `_own_state` and `_restore`."""

    _verified: str | None = None
    """The checkpoint that was compared with its manifest; a second time would read all of it again."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # cuDNN's attention builds a plan for every new shape, which takes longer than a micro-batch; and since PyTorch
        # 2.11 its gradient can be NaN on Hopper at padded lengths of 64 modulo 128 (pytorch/pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._nonfinite = NonFinite()
        self._recorder = Recorder(self.args.output_dir, self.accelerator.is_main_process)
        self.add_callback(self._recorder)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL's trainer does. True resumes from the newest complete checkpoint."""
        if not resume_from_checkpoint:
            resume_from_checkpoint = self._claim_folder()
        self._recorder.start(self)
        logger.info("%s", self.args.batches)
        try:
            if resume_from_checkpoint is True:
                resume_from_checkpoint = self.last_good_checkpoint()
                if resume_from_checkpoint is None:
                    what = f"resume: {self.args.output_dir} has no complete checkpoint."
                    raise ConfigError(Problem(what, remedy="Start without resume_from_checkpoint, and set save_steps."))
            elif resume_from_checkpoint not in (None, False, self._verified) and self.accelerator.is_main_process:
                checkpoints.check_complete(str(resume_from_checkpoint))
            done = self._load_finished(str(resume_from_checkpoint)) if resume_from_checkpoint else None
            result = done or super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            with suppress(OSError):  # a full disk has no room for this either
                self._recorder.end("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
            rank, processes = self.accelerator.process_index, self.accelerator.num_processes
            explained = failures.explain(error, self.args.output_dir, rank, processes)
            if explained is None:
                raise
            raise explained from error
        self._recorder.end("done")
        return result

    def _load_finished(self, checkpoint: str) -> TrainOutput | None:
        """Load a checkpoint of the last step, after which transformers would train one more; None for earlier ones."""
        state, args = TrainerState.load_from_json(str(Path(checkpoint) / checkpoints.STATE)), self.args
        finished = state.global_step >= (args.max_steps if args.max_steps > 0 else state.max_steps)
        if not finished or (args.max_steps <= 0 and args.num_train_epochs > state.num_train_epochs):
            return None
        self._load_from_checkpoint(checkpoint)
        self.state = state
        return TrainOutput(state.global_step, 0.0, {})

    def _claim_folder(self) -> str | None:
        """Refuse or clear the folder of an earlier run. `dew resume` runs a script again: then its checkpoint."""
        folder = self.args.output_dir
        (used,) = broadcast_object_list([RunFolder(folder).used()])
        again = os.environ.get(RESUME) == str(Path(folder).resolve())
        if used and again and (found := self.last_good_checkpoint()) is not None:
            return found
        if used and not again and not self.args.overwrite_output_dir:
            why = "A second one would be mixed into its metrics, records and checkpoints."
            remedy = "Choose another output_dir, train(resume_from_checkpoint=True), or set overwrite_output_dir=True."
            raise ConfigError(Problem(f"output_dir={folder!r} holds an earlier run.", why, remedy))
        if used and self.accelerator.is_main_process:
            RunFolder(folder).clear()
        self.accelerator.wait_for_everyone()
        return None

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Tied weights are saved once and are not missing."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def last_good_checkpoint(self) -> str | None:
        """The newest complete checkpoint, verified by the main process for all processes."""
        found = [checkpoints.newest_complete(self.args.output_dir) if self.accelerator.is_main_process else None]
        self._verified = broadcast_object_list(found)[0]
        return self._verified

    @property
    def sharded(self) -> bool:
        """Whether a process may hold only a part of the weights: then all of them must make as many passes."""
        return bool(self.is_deepspeed_enabled or self.is_fsdp_enabled)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _put(self, numbers: Numbers) -> None:
        """Report to the trackers, which log every `logging_steps`, and to the run's folder, which has every step."""
        for name, value in finite_only(numbers).items():
            self._metrics[self._mode][name].append(value)
        if self.model.training:
            self._recorder.put(numbers)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Called between gradient and update: a step with an infinity or a NaN loses its gradient."""
        norm = super()._get_grad_norm(*args, **kwargs)
        value = float(norm) if norm is not None else 0.0
        step, scaler = self.state.global_step + 1, self.accelerator.scaler
        found = self._nonfinite.check(step, value, scaled=scaler is not None and scaler.get_scale() > 1)
        if found is not None:
            self.optimizer.zero_grad()
            if self.accelerator.is_main_process:
                logger.warning("Skipping step %d, not finite: %s", step, found)
        self._put({"steps/skipped": float(found is not None)})
        if norm is not None:
            self._recorder.put({"grad_norm": value})
        return norm

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """TRL gives its metrics the same names on every evaluation set: `eval_reward` becomes `eval_<set>_reward`."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if metric_key_prefix.startswith("eval_"):
            metrics = self._metrics["eval"]
            for name in list(metrics):
                metrics[f"{metric_key_prefix.removeprefix('eval_')}_{name}"] = metrics.pop(name)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for metrics in self._metrics.values():
            for name in list(metrics):
                metrics[name][:] = [x for x in metrics[name] if math.isfinite(x)]
                if not metrics[name]:
                    del metrics[name]
        for name in set(logs) - set(finite_only(logs)):
            del logs[name]  # in place: TRL adds the metrics of an evaluation to this very dictionary
        super().log(logs, start_time)
        del self.state.log_history[:-LOGS_KEPT]
        self._recorder.logged(self.state.global_step, logs)

    def _own_state(self) -> dict[str, Any]:
        """What TRL does not save. `generation`: what is being trained on, moved to the device when loaded."""
        own = {"batches": str(self.args.batches), "generation": None, "health": self._nonfinite.state()}
        return {**own, "metrics": dict(self._metrics["train"])}

    def _restore(self, state: dict[str, Any]) -> None:
        self._metrics["train"].update(state["metrics"])
        self._nonfinite.restore(state["health"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        rank, device, batches = self.accelerator.process_index, self.accelerator.device, str(self.args.batches)
        state = checkpoints.load_state(checkpoint, rank, batches, device) if checkpoint else None
        if state is not None:
            self._restore(state)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Everything, then the manifest; only then are older checkpoints removed."""
        run = self._get_output_dir(trial=None)
        folder = Path(run) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (folder / checkpoints.MANIFEST).unlink(missing_ok=True)  # if the step is saved again
        self.accelerator.wait_for_everyone()
        if not self.args.save_only_model:
            checkpoints.save_state(folder, self.accelerator.process_index, self._own_state())
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            RunFolder(run).sync()
            checkpoints.write_manifest(folder)
            rotate_checkpoints(run, limit, self.state.best_model_checkpoint)  # by step: clocks may be adjusted
