"""verl's trainer modes with one thing more: they carry the old policy's entropy to the estimator.

    dew_sync             trainer and rollout take turns
    dew_colocate_async   rollout goes on over steps, on the trainer's GPUs
    dew_separate_async   rollout goes on over steps, on GPUs of its own

All three compute the old log-probabilities with the trainer's own weights, once per batch, and the entropy with them.
In the asynchronous modes an answer may have been sampled by several versions of the policy; the entropy, like the old
log-probabilities, is that of verl's old policy, not of each token's sampler.
"""

from functools import partial
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass

from dew.engines.verl import plugin
from dew.engines.verl.carrying import Carried, Found, carrying
from dew.engines.verl.contract import require_verl
from dew.engines.verl.estimators import judge_rows
from dew.engines.verl.losses import entropy_shaped_loss
from dew.engines.verl.recording import Recorder, record_columns, run_facts
from dew.engines.verl.settings import MODES, OURS, check, run_settings_of
from dew.errors import EngineError
from dew.files import write_atomically

require_verl()
plugin.register()


class Crediting:
    """Goes before one of verl's trainers. Refuses a configuration that would train something else than it says."""

    config: Any
    global_steps: int

    def __init__(self, config: Any) -> None:
        self.algorithm = check(config, known=ADV_ESTIMATOR_REGISTRY)
        self._ours = str(config.algorithm.adv_estimator) in OURS
        settings = run_settings_of(config)
        limit = int(config.data.max_response_length)
        self._recorder = Recorder(settings, self.algorithm, limit) if settings else None
        self._resolved = OmegaConf.to_yaml(config, resolve=True)
        config.trainer.v1.trainer_mode = MODES[config.trainer.v1.trainer_mode]  # verl compares this word all over
        super().__init__(config)  # type: ignore[call-arg]

    def fit(self, agent_loop_manager: Any) -> None:
        if self._recorder is None:
            return super().fit(agent_loop_manager)  # type: ignore[misc]
        log, status = self._recorder.log, "failed"
        log.begin(run_facts(self.config, self.algorithm, self._recorder.settings))
        write_atomically(log.folder.path / "config.yaml", self._resolved.encode())
        log.resume(self.global_steps)
        try:
            super().fit(agent_loop_manager)  # type: ignore[misc]
            status = "done"
        except KeyboardInterrupt:
            status = "stopped"
            raise
        finally:
            log.end(status)

    def on_train_begin(self) -> None:
        super().on_train_begin()  # type: ignore[misc]
        if self._ours and self.algorithm.needs_entropy == "current":
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            shape = {name: getattr(self.algorithm, name) for name in ("alpha", "kappa")}
            self.actor_rollout_wg.set_loss_fn(partial(entropy_shaped_loss, actor, **shape))  # type: ignore[attr-defined]

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's, with what it leaves in its queue carried to the estimator."""
        data = _fetch(batch, ["entropy", "extra_fields", "rm_scores"])
        infos, raw = _reward_infos(data, len(batch)), _padded(data, "rm_scores")
        acc, score = _column(infos, "acc"), _column(infos, "score")
        if acc is None and raw is not None:  # before any KL term is subtracted
            acc = score = raw.sum(-1)
        carried = Carried(
            algorithm=self.algorithm, entropy=_padded(data, "entropy"), keys=batch.keys, acc=acc, score=score
        )
        with carrying(carried):
            credited = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        if self._ours and not carried.found:
            raise EngineError(
                f"verl computed advantages without asking {self.algorithm.name}. This verl calls estimators otherwise "
                "than 0.9 does; install a release that dew is tested with."
            )
        if self._recorder is not None:
            self._tell(batch, carried, infos, metrics)
        return credited

    def _tell(self, batch: Any, carried: Carried, infos: list[dict[str, Any]], metrics: dict[str, Any]) -> None:
        assert self._recorder is not None
        found = carried.found[0] if carried.found else self._judged(batch, carried)
        ends = [batch.tags[b]["response_len"] for b in found.conversations.last_row.tolist()]
        truncated = torch.tensor(ends) >= self._recorder.limit
        numbers = self._recorder.put(found, truncated)
        metrics.update({f"dew/{name}": value for name, value in numbers.items()})
        if self._recorder.due(self.global_steps):
            columns = record_columns(found, {**_texts(batch), "reward_extra_info": infos}, truncated)
            self._recorder.record(self.global_steps, found, columns, self.tokenizer)  # type: ignore[attr-defined]

    def _judged(self, batch: Any, carried: Carried) -> Found:
        """For verl's own estimators, whose advantages lie in the queue by now."""
        data = _fetch(batch, ["uid", "response_mask", "rm_scores", "advantages"])
        rewards, mask, advantages = (_padded(data, name) for name in ("rm_scores", "response_mask", "advantages"))
        assert rewards is not None and mask is not None and advantages is not None
        return judge_rows(carried, rewards, mask.bool(), _listed(data, "uid"), advantages)

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], **kwargs: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)  # type: ignore[misc]
        if self._recorder is not None:
            self._recorder.step_end(self.global_steps, metrics, timing_raw)


def _fetch(batch: Any, fields: list[str]) -> Any:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)


def _padded(data: Any, name: str) -> Tensor | None:
    """(B, T) of a column that verl keeps ragged; None if it is not there."""
    if name not in data:
        return None
    x = data[name]
    return x.to_padded_tensor(0) if x.is_nested else x


def _listed(data: Any, name: str) -> list[Any]:
    """A column that is no tensor. The queue hands it back as one of several kinds of list, wrapped or not."""
    return [getattr(value, "data", value) for value in data[name]]


def _reward_infos(data: Any, rows: int) -> list[dict[str, Any]]:
    """What the reward manager said about each row, besides the reward."""
    if "extra_fields" not in data:
        return [{}] * rows
    fields = _listed(data, "extra_fields")
    return [(value.get("reward_extra_info") or {}) if isinstance(value, dict) else {} for value in fields]


def _column(infos: list[dict[str, Any]], name: str) -> Tensor | None:
    there = [info.get(name) is not None for info in infos]
    if not any(there):
        return None
    if not all(there):
        raise EngineError(
            f"the reward function gave {name!r} for {sum(there)} of {len(there)} answers: correctness would mean two "
            "things in one batch. Return it always, or never."
        )
    return torch.tensor([float(info[name]) for info in infos])


def _texts(batch: Any) -> dict[str, Any]:
    """What a token record shows, by verl's names."""
    data = _fetch(batch, ["prompts", "responses", "old_log_probs", "reward_model"])
    lengths = data["prompts"].offsets().diff()
    prompts = data["prompts"].to_padded_tensor(0)
    golds = _listed(data, "reward_model") if "reward_model" in data else []
    return {
        "prompts": prompts,
        "prompt_mask": torch.arange(prompts.shape[1]) < lengths[:, None],
        "responses": data["responses"].to_padded_tensor(0),
        "old_log_probs": _padded(data, "old_log_probs"),
        "gold": [str(g["ground_truth"]) if isinstance(g, dict) and "ground_truth" in g else None for g in golds]
        or [None] * len(batch),
    }


@register_trainer("dew_sync")
class DewSync(Crediting, PPOTrainerSync):  # type: ignore[misc]
    """Trainer and rollout take turns."""


@register_trainer("dew_colocate_async")
class DewColocateAsync(Crediting, PPOTrainerColocateAsync):  # type: ignore[misc]
    """Rollout goes on over steps, on the trainer's GPUs."""


@register_trainer("dew_separate_async")
class DewSeparateAsync(Crediting, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """Rollout goes on over steps, on GPUs of its own."""
