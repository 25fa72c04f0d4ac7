"""Choose the next token from logits, with its log-probability and the entropy of the distribution."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dew.kernels.chunked import logp_entropy, wide

HAS_TRITON = find_spec("triton") is not None


@dataclass(frozen=True)
class Draw:
    """Settings for choosing the next token. Drawing never synchronises with the device: CUDA graphs can capture it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    greedy: bool = False
    sum_sq: bool = False
    """Also return Σπ² of each distribution."""

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the whole vocabulary."""
        return not (self.greedy or self.top_k > 0 or self.top_p < 1 or self.min_p)

    def scored(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, ...]:
        """Logits (B, V) -> token, log-probability, entropy and, with `sum_sq`, Σπ², each (B,) and before any filter.

        The (B, 2) uniform numbers decide the tokens, by inverse transform sampling.
        """
        if self.plain and logits.is_cuda and HAS_TRITON:
            from dew.decoding.draw_kernel import draw

            return draw(logits, self.temperature, uniforms, self.sum_sq)
        z = logits.to(wide(logits.dtype)) / self.temperature
        if self.greedy:
            tokens = z.argmax(-1)
        else:  # the first token at which the cumulative probability passes the uniform number, never one of weight 0
            total = self.filtered(z).softmax(-1).cumsum(-1)
            last = total[:, -1:]
            tokens = torch.minimum((total <= uniforms[:, :1] * last).sum(-1), (total < last).sum(-1))
        squares = [z.softmax(-1).square().sum(-1)] if self.sum_sq else []
        return tokens, *logp_entropy(z, tokens[:, None])[:2], *squares

    def filtered(self, z: Tensor) -> Tensor:
        """Set to -inf the scores that top_k, then top_p, then min_p remove."""
        z = TopKLogitsWarper(self.top_k)(None, z) if self.top_k > 0 else z
        z = TopPLogitsWarper(self.top_p)(None, z) if self.top_p < 1 else z
        return MinPLogitsWarper(self.min_p)(None, z) if self.min_p else z
