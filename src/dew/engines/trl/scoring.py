"""What the policy thought of the tokens that it sampled, brought together over all processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Sample and score with the policy itself, not with a random part of it.

    The outermost module stays as it is: TRL reads from it whether it trains or evaluates.
    """
    switched = [module for module in model.modules() if module is not model and module.training]
    for module in switched:
        module.training = False
    try:
        yield
    finally:
        for module in switched:
            module.training = True


def loss_mask(batch: dict[str, Any]) -> Tensor:
    """(B, T) True on the tokens that train: sampled by the policy, not a tool's, not cut away."""
    mask = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if batch.get("tool_mask") is not None else mask


def gather_rows(accelerator: Any, x: Tensor, fill: float = 0, left: bool = False) -> Tensor:
    """The rows of every process, one below the other; lengths differ, so rows are padded first."""
    kind = x.dtype
    if kind == torch.bool:
        x = x.to(torch.uint8)
    if x.ndim > 1:
        x = accelerator.pad_across_processes(x, dim=1, pad_index=fill, pad_first=left)
    return accelerator.gather(x.contiguous()).to(kind)


def own_rows(accelerator: Any, x: Tensor, length: int | None = None) -> Tensor:
    """This process's part of what `gather_rows` brought together, cut to its own length."""
    rows = len(x) // accelerator.num_processes
    part = x[accelerator.process_index * rows : (accelerator.process_index + 1) * rows]
    return part if length is None else part[:, :length]
