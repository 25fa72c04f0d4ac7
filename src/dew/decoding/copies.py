"""The weights that sample, where training keeps its own in another precision."""

import copy
from typing import Any

import torch
from torch import nn


class SamplingCopy:
    """A model in the precision that it samples in. Where that is its own precision, it is the model itself."""

    def __init__(self, model: Any, dtype: torch.dtype | None = None) -> None:
        self._pairs = {p: _cast(p, dtype) for p in model.parameters() if dtype is not None and p.dtype != dtype}
        self.model = model
        if not self._pairs:
            return
        # What has the right precision is shared, the rest cast on the way: a copy in the old one never exists.
        shared = {id(p): self._pairs.get(p, p) for p in model.parameters()}
        self.model = copy.deepcopy(model, dict(shared))
        for name in ("forward", "_original_forward"):  # accelerate's wrapping still points at the trained model
            self.model.__dict__.pop(name, None)
        self.model.eval()

    def refresh(self) -> Any:
        """The model with the weights as they are now."""
        with torch.no_grad():
            for source, target in self._pairs.items():
                target.copy_(source)
        return self.model


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
