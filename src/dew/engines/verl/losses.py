"""The algorithm's own loss inside verl's actor loss. It runs in the workers, on micro-batches of rows.

The trainer gives every worker `actor_loss` with the algorithm. It runs verl's `ppo_loss`, which adds the KL and entropy
terms, and in there `policy_loss` (`loss_mode=dew`) calls `algorithm.loss`.

verl's workers average gradients over D data-parallel processes and split a mini-batch into micro-batches. Each part is
divided by the divisor of the whole mini-batch over D, so the result does not depend on the split. A row is one of
verl's rows: an answer of several rows has a sequence ratio in each.
"""

from typing import Any

from torch import Tensor

from dew.algorithms import Algorithm
from dew.algorithms.base import Part
from dew.engines.verl.config import DEW_LOSS, SWITCH_ON
from dew.engines.verl.estimators import CURRENT, BatchContext, batch_context
from dew.errors import EngineError, Problem


def actor_loss(
    config: Any, model_output: Any, data: Any, dp_group: Any = None, *, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Any]]:
    """verl's `ppo_loss` with the algorithm's own policy loss."""
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    entropy = None
    if algorithm.needs_entropy == "current":  # config.check has seen to it that verl computes it
        entropy = no_padding_2_padding(model_output["entropy"], data).detach()
    penalty = data["returns"].to_padded_tensor(0) if algorithm.penalises else None  # see estimators.credit_rows
    with batch_context(BatchContext(algorithm=algorithm, entropy=entropy, penalty=penalty)):
        return ppo_loss(config, model_output, data, dp_group)  # type: ignore[no-any-return]


def policy_loss(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str = "",
    config: Any = None, rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """What verl calls for `loss_mode=dew`. The reduction is the algorithm's own; `loss_agg_mode` is not used."""
    context = CURRENT.get()
    if context is None:
        what = f"loss_mode={DEW_LOSS}: this trainer does not tell its workers which algorithm they train."
        raise EngineError(Problem(what, remedy=SWITCH_ON))
    algorithm, mask = context.algorithm, response_mask.bool()
    part = Part(
        mask=mask, old_logp=old_log_prob, weight=rollout_is_weights, entropy=context.entropy, penalty=context.penalty
    )
    batch, count = config.global_batch_info, None
    if batch:  # the divisor of this process's share: that of the whole mini-batch over D
        tokens, sequences, processes = (batch[key] for key in ("batch_num_tokens", "global_batch_size", "dp_size"))
        count = algorithm.divisor(tokens, sequences) / processes
    value, stats = algorithm.loss(log_prob, part, advantages, count=count)
    return value, _metrics(stats)


def _metrics(stats: dict[str, Tensor]) -> dict[str, float]:
    """verl's names where it has one, `actor/dew/...` for all. verl averages, so maxima are left out."""
    numbers = {name: float(value) for name, value in stats.items() if not name.endswith("/max")}
    return {
        "actor/pg_clipfrac": numbers.get("clip/low", 0.0) + numbers.get("clip/high", 0.0),
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": numbers.get("kl/approx", 0.0),
        **{f"actor/dew/{name}": value for name, value in numbers.items()},
    }
