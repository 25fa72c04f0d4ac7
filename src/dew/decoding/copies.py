"""The weights that sample, where training keeps its own in another precision."""

import copy
from typing import Any

import torch
from torch import nn


class SamplingCopy:
    """A model in the precision that it samples in. Where that is its own precision, it is the model itself."""

    def __init__(self, model: Any, dtype: torch.dtype | None = None) -> None:
        self._sources = list(model.parameters())
        self._targets: list[torch.Tensor] = []
        self.model = model
        if dtype is None or all(p.dtype == dtype for p in self._sources):
            return
        # Parameters are cast on the way, so that no second copy in the old precision ever exists.
        cast = {id(p): nn.Parameter(p.detach().to(dtype, copy=True), requires_grad=False) for p in self._sources}
        self._targets = [cast[id(p)] for p in self._sources]
        self.model = copy.deepcopy(model, dict(cast))
        for name in ("forward", "_original_forward"):  # accelerate's wrapping still points at the trained model
            self.model.__dict__.pop(name, None)
        self.model.eval()

    def refresh(self) -> Any:
        """The model with the weights as they are now."""
        with torch.no_grad():
            for source, target in zip(self._sources, self._targets, strict=False):
                target.copy_(source)
        return self.model
