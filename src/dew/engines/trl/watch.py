"""`dew.watch(trainer)`: run folder, token records, alarms and report for a trainer, without changing its training.

The trainer's class is replaced by a subclass of it, whose methods call the original ones and record their results.
"""

import logging
import sys
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from dew.algorithms import ENGINE_ALGORITHM, get_algorithm
from dew.compare.grid import REPLACED
from dew.engines.compat import answers_of
from dew.engines.credit import Signals, give_credit
from dew.engines.trl import metrics
from dew.engines.trl.batch import Capture, loss_mask, make_batch, with_trl_advantages
from dew.engines.trl.config import LIMITS, RECORDS
from dew.engines.trl.loss import loss_inputs, observe_loss
from dew.engines.trl.rewards import index_of
from dew.engines.trl.rollout import dropout_off
from dew.engines.trl.trainer import DewTrainer
from dew.errors import ConfigError, Problem
from dew.run.folder import RunFolder

logger = logging.getLogger("dew")

AnyTrainer = TypeVar("AnyTrainer", bound=Any)


def watch(
    trainer: AnyTrainer, *, outcome_reward: str | None = None, threshold: float = 0.5, records_every: int = RECORDS[0]
) -> AnyTrainer:
    """Record the run of a GRPOTrainer in its `output_dir`, for `dew view`, `dew report` and `dew explain`.

    Its loss, random numbers and weights stay the same. An answer counts as correct if the reward named
    `outcome_reward` (default: the first) is above `threshold`. Token records are written at step 1 and every
    `records_every` steps (0: never); each costs one forward pass. Call this before `train()`.
    """
    metrics.show_logs()
    if not isinstance(trainer, GRPOTrainer):
        what = f"dew.watch: {type(trainer).__name__} is not a GRPOTrainer of TRL."
        late = " Import unsloth before dew." if "unsloth" in sys.modules else ""  # it replaces TRL's class
        raise ConfigError(Problem(what, remedy=f"Pass the trainer object: dew.watch(GRPOTrainer(...)).{late}"))
    if isinstance(trainer, DewTrainer):
        return trainer  # it already records all of this
    if problem := LIMITS["records_every"].problem("dew.watch: records_every", records_every):
        raise ConfigError(problem)
    args = trainer.args
    trainer.outcome_index = index_of(outcome_reward, trainer.reward_func_names)
    trainer.algorithm = get_algorithm(ENGINE_ALGORITHM, threshold=threshold, max_tokens=args.max_completion_length)
    args.records_every, args.records_groups, args.records_keep = records_every, *RECORDS[1:]
    args.outcome_reward = outcome_reward
    if isinstance(trainer, Watched):
        return trainer
    trainer.__class__ = type(type(trainer).__name__, (Watched, type(trainer)), {})
    trainer._capture, trainer._statistics = Capture(), metrics.StepStatistics()
    trainer._recorder = metrics.Recorder(args.output_dir, trainer.accelerator.is_main_process)
    trainer.add_callback(trainer._recorder)
    return trainer


class Watched(GRPOTrainer):  # type: ignore[misc]
    """Overrides of a watched trainer, which call the methods of its own class and return their results unchanged."""

    group_size, _mode, _record_due, _forward = (
        DewTrainer.group_size, DewTrainer._mode, DewTrainer._record_due, DewTrainer._forward
    )  # fmt: skip

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        self._statistics = metrics.StepStatistics()
        if not resume_from_checkpoint and self.accelerator.is_main_process:
            set_aside(Path(self.args.output_dir))
        self._recorder.start(self)
        with self._recorder.running():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _generate_and_score_completions(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(rows)
        capture = self._capture = Capture()
        with self._recorder.phase("scoring"):
            inputs: dict[str, Any] = super()._generate_and_score_completions(rows)
        with self._recorder.phase("records"):
            ids, scored = inputs["completion_ids"].tolist(), capture.completion_ids
            kept = [row[: len(answer)] for row, answer in zip(ids, scored, strict=False)]
            if not all(gather_object([kept == scored and len(ids) == len(scored)])):
                if self.state.global_step == 0:
                    text = "dew.watch: %s changes the answers after TRL scored them, so they are not recorded."
                    logger.warning(text, type(self).__name__)
                return inputs
            old = self._old_policy(inputs)
            batch = make_batch(self, inputs, capture, old, rows if self._record_due else None)
            credit = give_credit(self.algorithm, batch, for_records=self._record_due)
            credit = with_trl_advantages(credit, batch, self.accelerator)
            numbers = metrics.generation_metrics(self, batch, credit)
            sampler, logp = inputs.get("sampling_per_token_logps"), inputs.get("old_per_token_logps")
            if sampler is not None and logp is not None:
                numbers |= metrics.sampler_metrics(logp, sampler, loss_mask(inputs), self.accelerator)
            self._recorder.put(numbers)
            if self._record_due:
                self._recorder.record(batch, credit, self)
        return loss_inputs(self.algorithm, batch, credit, self.accelerator)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        with self._recorder.phase("generation"):
            generated: tuple[Any, ...] = super()._generate(prompts)
        self._capture.completion_ids, self._capture.tool_mask = answers_of(generated)
        return generated

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._recorder.phase("reward"):
            found: Tensor = super()._calculate_rewards(*args, **kwargs)
        self._capture.parts, self._capture.extra = found, dict(self._pending_extra_logs)
        return found

    def _old_policy(self, inputs: dict[str, Any]) -> Signals:
        """Return the sampling policy's signals, computed without dropout so that no random numbers are drawn."""
        if not self._record_due or "unsloth" in sys.modules:  # which shifts them by the padding of the prompts
            return Signals()
        with torch.no_grad(), dropout_off(self.model):
            rows = self.args.per_device_train_batch_size
            logp, entropy, _ = self._forward(self.model, inputs, batch_size=rows)
        return Signals(logp=logp, entropy=entropy)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._capture.passes.append(Signals(logp=found[0], entropy=found[1]))
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        capture = self._capture = Capture()
        loss: Tensor = super()._compute_loss(model, inputs)
        signals = next((x for x in capture.passes if x.entropy is not None), None)
        if self.model.training and signals is not None and "verdict" in inputs:
            observe_loss(self, inputs, signals)
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self._statistics.add_loss(loss)
        if self.accelerator.sync_gradients:
            self._recorder.put(self._statistics.read(self.accelerator))
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        self._recorder.put({} if norm is None else {"grad_norm": float(norm)})
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        self._recorder.logged(self.state.global_step, metrics.finite_only(logs))


def set_aside(folder: Path) -> None:
    """Move the log of an earlier run to a subfolder, because TRL allows a new run in a used folder."""
    names = ("run.json", "metrics.jsonl", "alarms.jsonl", "records")
    written = [path for name in names if (path := folder / name).exists()]
    if not written or not RunFolder(folder).used():
        return
    aside = folder / REPLACED
    aside = aside / str(1 + sum(1 for _ in aside.glob("*")))
    aside.mkdir(parents=True)
    for path in written:
        path.rename(aside / path.name)
    logger.warning("%s holds the log of an earlier run; it was moved to %s.", folder, aside)
