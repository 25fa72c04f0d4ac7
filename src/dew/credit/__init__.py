"""Outcomes -> token credit: pure functions of tensors, one file per paper. Computed once, on whole groups."""

from dew.credit.dapo import has_signal, soft_overlong
from dew.credit.entropy_shaped import entropy_advantages
from dew.credit.forking import forking_mask
from dew.credit.group_overlong import group_overlong
from dew.credit.grpo import group_relative, grpo_advantages, wrong_sign
from dew.credit.grpo_s import grpo_s_advantages, grpo_s_rewards
from dew.credit.gtpo import gtpo_advantages, gtpo_rewards

__all__ = [
    "entropy_advantages",
    "forking_mask",
    "group_overlong",
    "group_relative",
    "grpo_advantages",
    "grpo_s_advantages",
    "grpo_s_rewards",
    "gtpo_advantages",
    "gtpo_rewards",
    "has_signal",
    "soft_overlong",
    "wrong_sign",
]
