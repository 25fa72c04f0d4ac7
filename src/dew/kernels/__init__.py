"""Log-probability and entropy of the next token from hidden states, without materialising the logits."""

from dew.kernels.head import Head, plain_head
from dew.kernels.linear import linear_logprob_entropy

__all__ = ["Head", "linear_logprob_entropy", "plain_head"]
