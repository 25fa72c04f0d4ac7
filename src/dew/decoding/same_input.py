"""Linear layers that read the same input (queries, keys and values; gate and up) as one product."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

SAME_INPUT = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Concatenate frozen weights along the first axis; they become views of the result. No copy if they already are."""
    first, sizes = weights[0].data, [len(x) for x in weights]
    ends = [n * first.stride(0) for n in accumulate(sizes)]
    found = [(x.untyped_storage().data_ptr(), x.storage_offset()) for x in weights]
    if found == [(first.untyped_storage().data_ptr(), n) for n in (0, *ends[:-1])]:
        return first.as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = torch.cat([x.data for x in weights])
    for x, part in zip(weights, whole.split(sizes), strict=True):
        x.data = part
    return whole


class ComputedTogether:
    """Computes the outputs of several layers when the first of them is called with an input, and keeps the others."""

    def __init__(self, product: Callable[[Tensor], Sequence[Tensor]]) -> None:
        self._product = product
        self._input: Any = None
        self._waiting = dict[int, Tensor]()

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        if self._input is not x or layer not in self._waiting:
            self._input, self._waiting = x, dict(enumerate(self._product(x)))
        found = self._waiting.pop(layer)
        if not self._waiting:  # otherwise a graph would keep the memory of the input
            self._input = None
        return found
