"""Pure functions of tensors that turn outcomes into token credit, computed once, on whole groups.

Results are float32 or wider, also for half-precision inputs, and have no gradient. Token masks are bool, or integers 0
and 1. Values under a False mask are never read; the entropy of a live token must be finite and not negative. A reward
that is NaN or infinite is an error: leave such answers out of their group, e.g. with `present=rewards.isfinite()`.
Tokens are compared by position: the answers of a group must start in the same column.
"""

from dew.credit.grpo import (
    group_overlong,
    group_relative,
    grpo_advantages,
    has_signal,
    maxrl_advantages,
    qae_advantages,
    reinforce_pp_advantages,
    soft_overlong,
    w_reinforce_advantages,
    wrong_sign,
)
from dew.credit.gtpo import grpo_s_advantages, grpo_s_rewards, gtpo_advantages, gtpo_rewards
from dew.credit.token_weights import (
    clip_cov_mask,
    entropy_advantages,
    entropy_bands,
    forking_mask,
    future_weights,
    kl_cov_mask,
    steer_weights,
    token_baseline_advantages,
)

__all__ = [
    "clip_cov_mask", "entropy_advantages", "entropy_bands", "forking_mask", "future_weights", "group_overlong",
    "group_relative", "grpo_advantages", "grpo_s_advantages", "grpo_s_rewards", "gtpo_advantages", "gtpo_rewards",
    "has_signal", "kl_cov_mask", "maxrl_advantages", "qae_advantages", "reinforce_pp_advantages", "soft_overlong",
    "steer_weights", "token_baseline_advantages", "w_reinforce_advantages", "wrong_sign",
]  # fmt: skip
