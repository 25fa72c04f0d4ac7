"""verl's policy losses, from `dew.losses`. They run in the workers, on micro-batches of rows.

verl's workers average gradients over D data-parallel processes, and a mini-batch is split into micro-batches. Given
the mini-batch's live tokens or rows, the loss of each part is its share times D, so that the whole does not depend on
the split. A row is verl's row: an answer of several rows has a sequence ratio in each.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dew.credit import entropy_advantages
from dew.errors import EngineError
from dew.losses import Ratio, Reduce, policy_loss

LOSSES: dict[str, tuple[Ratio, Reduce]] = {
    "gtpo": ("token", "tokens"),
    "grpo_s": ("sequence_mean", "sequences"),
    "grpo_s_geometric": ("sequence_geometric", "sequences"),
}
"""By the name that `actor_rollout_ref.actor.policy_loss.loss_mode` knows."""


def loss(name: str) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """The function that verl calls for `loss_mode=name`. `loss_agg_mode` is the name's own, verl's is not read."""
    ratio, reduce = LOSSES[name]

    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        value, stats = policy_loss(
            log_prob,
            old_log_prob,
            advantages,
            response_mask.bool(),
            ratio=ratio,
            reduce=reduce,
            clip_low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
            clip_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
            count=_count(reduce, config.global_batch_info),
            weight=rollout_is_weights,
        )
        return value, _metrics(stats)

    compute.__name__ = f"{name}_loss"
    return compute


def _count(reduce: Reduce, batch: dict[str, Any]) -> float | None:
    """The divisor of this process's share: that of the whole mini-batch over D."""
    whole = batch.get("batch_num_tokens" if reduce == "tokens" else "global_batch_size")
    processes = batch.get("dp_size", 1)
    if whole is None:
        if processes > 1:
            raise EngineError(
                f"verl gives no size of the whole mini-batch to its policy loss ({processes} processes): each would "
                "divide by its own share. Install a release of verl that dew is tested with."
            )
        return None
    return whole / processes


def _metrics(stats: dict[str, Tensor]) -> dict[str, float]:
    """Under verl's names where it has one; the others under dew's. `ratio/max` would be averaged, so it is left out."""
    numbers = {name: float(value) for name, value in stats.items() if name != "ratio/max"}
    return {
        "actor/pg_clipfrac": numbers["clip/low"] + numbers["clip/high"],
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": numbers["kl/approx"],
        **{f"actor/dew/{name}": value for name, value in numbers.items()},
    }


def entropy_shaped_loss(
    config: Any, model_output: Any, data: Any, dp_group: Any = None, *, alpha: float, kappa: float
) -> tuple[Tensor, dict[str, Any]]:
    """verl's own PPO loss on A + min(α·H, |A|/κ), H of the policy being trained. A policy loss of verl's gets no H."""
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    if model_output.get("entropy", None) is None:
        raise EngineError(
            "entropy_advantage needs the current policy's entropy: set actor_rollout_ref.actor.calculate_entropy=True."
        )
    entropy = no_padding_2_padding(model_output["entropy"], data).detach()
    rows = data.select("advantages", "response_mask").to_padded_tensor()
    mask = rows["response_mask"].bool()
    shaped = data.copy()
    shaped["advantages"] = entropy_advantages(rows["advantages"], entropy, mask, alpha=alpha, kappa=kappa)
    value, metrics = ppo_loss(config, model_output, shaped, dp_group)
    bonus = (shaped["advantages"] - rows["advantages"])[mask].sum() / mask.sum().clamp_min(1)
    return value, {**metrics, "actor/dew/credit/bonus": float(bonus)}
