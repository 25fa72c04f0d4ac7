"""How the next token is chosen from logits: the four settings that generation configurations share."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """Nothing here waits for the device, so that a CUDA graph can hold it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    greedy: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        """(B, V) -> (B,), a token for each row."""
        if self.greedy:
            return logits.argmax(-1)
        if self.top_k or self.top_p < 1 or self.min_p:
            logits = self.kept(logits.float())
        # The winner of a race of exponential clocks: argmax z/T - log E is distributed as softmax(z/T).
        race = torch.empty(logits.shape, device=logits.device).exponential_().log_()
        return torch.sub(logits, race, alpha=self.temperature).argmax(-1)

    def kept(self, logits: Tensor) -> Tensor:
        """Logits with those tokens at -inf that top_k, then top_p, then min_p leave out at this temperature."""
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, places = logits.sort(descending=True)
            p = (ordered / self.temperature).softmax(-1)
            beyond = p.cumsum(-1) - p > self.top_p  # the first is never beyond
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, places, beyond), -torch.inf)
        if self.min_p > 0:
            p = (logits / self.temperature).softmax(-1)
            logits = logits.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), -torch.inf)
        return logits
