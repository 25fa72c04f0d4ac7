"""dew's trainer modes for verl, which pass the old policy's entropy to the estimator and dew's loss to the workers.

All modes compute the old log-probabilities and entropies once per batch, with the trainer's weights. In asynchronous
modes, this is the policy that verl calls old, not the one that sampled each token.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer
from verl.utils.config import omega_conf_to_dataclass

from dew.engines.verl import plugin
from dew.engines.verl.config import DEW_LOSS, LOSS_MODE, MODES, check, dew_estimators, read_run_settings, reduction
from dew.engines.verl.estimators import (
    OTHER_RELEASE,
    TOKENS_PER_ROW,
    BatchContext,
    actor_loss,
    batch_context,
    record_rows,
)
from dew.engines.verl.recorder import Recorder, record_columns
from dew.errors import EngineError, Problem
from dew.files import write_atomically

Info = dict[str, Any]
"""What the reward manager returned for a row in addition to the reward."""

plugin.register()


class CreditMixin:
    """Mixin for verl's trainers. Raises an error if the configuration would not train the algorithm that it names."""

    config: Any
    global_steps: int
    total_training_steps: int
    actor_rollout_wg: Any
    tokenizer: Any

    def __init__(self, config: Any) -> None:
        self.algorithm = check(config, estimators=ADV_ESTIMATOR_REGISTRY)
        self._credits = self.algorithm.name in dew_estimators()
        settings = read_run_settings(config)
        self._recorder = Recorder(settings, self.algorithm) if settings else None
        self._resolved = OmegaConf.to_yaml(config, resolve=True) if settings else ""
        config.trainer.v1.trainer_mode = MODES[config.trainer.v1.trainer_mode]  # verl compares it in several places
        if self._credits:
            for key, value in {LOSS_MODE: DEW_LOSS, **reduction(self.algorithm)}.items():
                OmegaConf.update(config, key, value)
        super().__init__(config)  # type: ignore[call-arg]

    def fit(self, agent_loop_manager: Any) -> None:
        recorder = self._recorder
        if recorder is None:
            return super().fit(agent_loop_manager)  # type: ignore[misc]
        recorder.start(self.config, self.total_training_steps, self.global_steps)
        write_atomically(recorder.folder.path / "config.yaml", self._resolved.encode())
        with recorder.running():
            super().fit(agent_loop_manager)  # type: ignore[misc]

    def on_train_begin(self) -> None:
        super().on_train_begin()  # type: ignore[misc]
        if self._credits:
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            without_kl = replace(self.algorithm, kl_coef=0.0)  # verl adds that term
            self.actor_rollout_wg.set_loss_fn(partial(actor_loss, actor, algorithm=without_kl))

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        context, infos = self._context(batch)
        with batch_context(context):
            credited = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        if self._credits and not context.credited:
            what = f"verl computed advantages without calling the estimator of {self.algorithm.name}."
            raise EngineError(Problem(what, remedy=OTHER_RELEASE))
        if context.credited:
            credited.extra_info[TOKENS_PER_ROW] = int(context.credited[0].rows.mask.sum()) / len(batch)
        if self._recorder is not None:
            metrics.update(self._record(self._recorder, batch, context, infos))
        return credited

    def _context(self, batch: Any) -> tuple[BatchContext, list[Info]]:
        """Return what the estimator needs beyond verl's arguments, and what the reward manager returned."""
        needed = ["old_log_probs"] * self.algorithm.needs_logp + ["responses"] * self.algorithm.needs_tokens
        data = _fetch(batch, "entropy", "extra_fields", "rm_scores", *needed)
        fields = _listed(data, "extra_fields") if "extra_fields" in data else [{}] * len(batch)
        infos = [(value.get("reward_extra_info") or {}) if isinstance(value, dict) else {} for value in fields]
        acc, score = _column(infos, "acc"), _column(infos, "score")
        if acc is None:  # rm_scores includes the reward manager's penalty for length, but not yet a KL term
            acc = score = _padded(data["rm_scores"]).sum(-1) if score is None else score
        context = BatchContext(
            algorithm=self.algorithm,
            entropy=_padded(data["entropy"]) if "entropy" in data else None,
            logp=_padded(data["old_log_probs"]) if "old_log_probs" in data else None,
            tokens=_padded(data["responses"]) if "responses" in data else None,
            keys=batch.keys,
            acc=acc,
            score=score,
            recorded=self._recorder is not None and self._recorder.due(self.global_steps),
        )
        return context, infos

    def _record(self, recorder: Recorder, batch: Any, context: BatchContext, infos: list[Info]) -> dict[str, float]:
        if context.credited:
            found = context.credited[0]
        else:  # one of verl's own estimators; its advantages are in the queue by now
            data = _fetch(batch, "uid", "response_mask", "rm_scores", "advantages")
            rewards, mask, advantages = (_padded(data[name]) for name in ("rm_scores", "response_mask", "advantages"))
            found = record_rows(context, rewards, mask.bool(), _listed(data, "uid"), advantages)
        ends = [batch.tags[b]["response_len"] for b in found.conversations.last_row]
        truncated = torch.tensor(ends) >= self.config.data.max_response_length
        numbers = recorder.add(self.global_steps, found, truncated)
        if context.recorded:
            columns = record_columns(found, {**_texts(batch), "reward_extra_info": infos}, truncated)
            recorder.record(self.global_steps, found, columns, self.tokenizer)
        return {f"dew/{name}": value for name, value in numbers.items()}

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], timing_raw: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)  # type: ignore[misc]
        if self._recorder is not None:
            self._recorder.step_end(self.global_steps, metrics, timing_raw)


def _fetch(batch: Any, *fields: str) -> Any:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))


def _padded(column: Any) -> Tensor:
    return column.to_padded_tensor(0) if column.is_nested else column  # type: ignore[no-any-return]


def _listed(data: Any, name: str) -> list[Any]:
    """Return a non-tensor column as a list. The queue returns several kinds of lists, with values wrapped or not."""
    return [getattr(value, "data", value) for value in data[name]]


def _column(infos: list[Info], name: str) -> Tensor | None:
    given = sum(info.get(name) is not None for info in infos)
    if not given:
        return None
    if given < len(infos):
        what = f"The reward function returned {name!r} for {given} of {len(infos)} answers."
        raise EngineError(Problem(what, remedy="Return it for every answer, or for none."))
    return torch.tensor([float(info[name]) for info in infos])


def _texts(batch: Any) -> dict[str, Any]:
    data = _fetch(batch, "prompts", "responses", "old_log_probs", "reward_model")
    lengths, prompts = data["prompts"].offsets().diff(), data["prompts"].to_padded_tensor(0)
    golds = _listed(data, "reward_model") if "reward_model" in data else [None] * len(batch)
    return {
        "prompts": prompts,
        "prompt_mask": torch.arange(prompts.shape[1]) < lengths[:, None],
        "responses": _padded(data["responses"]),
        "old_log_probs": _padded(data["old_log_probs"]),
        "gold": [str(g["ground_truth"]) if isinstance(g, dict) and "ground_truth" in g else None for g in golds],
    }


for _mode, _verls in MODES.items():
    register_trainer(_mode)(type(_mode, (CreditMixin, get_trainer_cls(_verls)), {}))
