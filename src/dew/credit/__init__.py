"""Outcomes -> token credit: pure functions of tensors, one file per paper. Computed once, on whole groups."""

from dew.credit.covariance import clip_cov_mask, kl_cov_mask
from dew.credit.dapo import has_signal, soft_overlong
from dew.credit.entropy_shaped import entropy_advantages
from dew.credit.fipo import future_weights
from dew.credit.forking import forking_mask
from dew.credit.gepo import entropy_bands
from dew.credit.group_credit import (
    maxrl_advantages,
    qae_advantages,
    reinforce_pp_advantages,
    w_reinforce_advantages,
)
from dew.credit.group_overlong import group_overlong
from dew.credit.grpo import group_relative, grpo_advantages, wrong_sign
from dew.credit.grpo_s import grpo_s_advantages, grpo_s_rewards
from dew.credit.gtpo import gtpo_advantages, gtpo_rewards
from dew.credit.steer import steer_weights
from dew.credit.token_baseline import token_baseline_advantages

__all__ = [
    "clip_cov_mask",
    "entropy_advantages",
    "entropy_bands",
    "forking_mask",
    "future_weights",
    "group_overlong",
    "group_relative",
    "grpo_advantages",
    "grpo_s_advantages",
    "grpo_s_rewards",
    "gtpo_advantages",
    "gtpo_rewards",
    "has_signal",
    "kl_cov_mask",
    "maxrl_advantages",
    "qae_advantages",
    "reinforce_pp_advantages",
    "soft_overlong",
    "steer_weights",
    "token_baseline_advantages",
    "w_reinforce_advantages",
    "wrong_sign",
]
