"""Choose the next token from logits, with its log-probability and the entropy of the distribution."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from dew.kernels.chunked import logp_entropy

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
        return not (self.greedy or self.top_k or self.top_p < 1 or self.min_p)

    def scored(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, ...]:
        """Logits (B, V) -> token, log-probability, entropy and, with `sum_sq`, Σπ², each (B,) and before any filter.

        Without filters, the (B, 2) uniform numbers decide the tokens, by inverse transform sampling.
        """
        if self.plain and logits.is_cuda and HAS_TRITON:
            from dew.decoding.draw_kernel import draw

            return draw(logits, self.temperature, uniforms, self.sum_sq)
        z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        if self.plain:  # the first token at which the cumulative probability passes the uniform number
            total = z.softmax(-1).cumsum(-1)
            tokens = (total <= uniforms[:, :1] * total[:, -1:]).sum(-1).clamp_max(z.shape[-1] - 1)
        else:
            tokens = self(logits)
        squares = [z.softmax(-1).square().sum(-1)] if self.sum_sq else []
        return tokens, *logp_entropy(z, tokens[:, None])[:2], *squares

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits (B, V) -> one token per row (B,)."""
        if self.greedy:
            return logits.argmax(-1)
        if self.top_k or self.top_p < 1 or self.min_p:
            logits = self.filter(logits.float())
        # Gumbel-max trick: argmax z/T - log E, with E exponential, is distributed as softmax(z/T).
        noise = torch.empty(logits.shape, device=logits.device).exponential_().log_()
        return torch.sub(logits, noise, alpha=self.temperature).argmax(-1)

    def filter(self, logits: Tensor) -> Tensor:
        """Set to -inf the logits that top_k, then top_p, then min_p remove at this temperature."""
        if 0 < self.top_k < logits.shape[-1]:
            lowest = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            p = (ordered / self.temperature).softmax(-1)
            removed = p.cumsum(-1) - p > self.top_p  # never the most likely token
            logits = logits.masked_fill(torch.zeros_like(removed).scatter(1, order, removed), -torch.inf)
        if self.min_p > 0:
            p = (logits / self.temperature).softmax(-1)
            logits = logits.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), -torch.inf)
        return logits
