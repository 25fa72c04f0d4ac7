"""Linear layers that read the same input (queries, keys and values; gate and up) as one product."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

SAME_INPUT = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def joined(weights: Sequence[Tensor]) -> Tensor:
    """These, which nobody trains, as one tensor of which they become parts, unless they are neighbours already."""
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
    """The first of some layers to be called with an input computes the outputs of all."""

    def __init__(self, product: Callable[[Tensor], Sequence[Tensor]]) -> None:
        self._product = product
        self._input: Any = None
        self._waiting = dict[int, Tensor]()

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        if self._input is not x or layer not in self._waiting:
            self._input, self._waiting = x, dict(enumerate(self._product(x)))
        found = self._waiting.pop(layer)
        if not self._waiting:  # a graph would keep their memory
            self._input = None
        return found
