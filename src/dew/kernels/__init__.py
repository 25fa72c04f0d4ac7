"""Log-probability and entropy of the next token from hidden states, without ever holding the logits."""

from dew.kernels.head import Head, plain_head
from dew.kernels.linear import linear_logprob_entropy
from dew.kernels.policy import linear_policy_loss

__all__ = ["Head", "linear_logprob_entropy", "linear_policy_loss", "plain_head"]
