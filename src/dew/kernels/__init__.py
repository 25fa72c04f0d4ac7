"""Log-probability and entropy of the next token from hidden states, without materialising the logits."""

from dew.kernels.linear import linear_logprob_entropy
from dew.kernels.reference import Head, plain_head

__all__ = ["Head", "linear_logprob_entropy", "plain_head"]
