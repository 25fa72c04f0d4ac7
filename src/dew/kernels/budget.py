"""How much memory one chunk may use, given the free memory of the device."""

from collections.abc import Iterator

import torch

MIB = 1 << 20
GIB = 1 << 30
HOST_FREE = 8 * GIB
"""Free memory assumed on devices that do not report it."""

TILE = (1 / 64, 32 * MIB, 256 * MIB)
"""Share of the free memory, minimum and maximum bytes: for a tile of scores that is overwritten after use."""
KEPT = (1 / 16, 0, 8 * GIB)
"""The same for weights kept from the forward to the backward pass."""
CHUNK = (1 / 8, 64 * MIB, 8 * GIB)
"""The same for a chunk of tokens whose ∂logp/∂h is computed in the forward pass (frozen head)."""

Limit = tuple[float, int, int]


def free_memory(device: torch.device) -> int:
    """Bytes that a new tensor could use, including memory cached by the allocator."""
    if device.type != "cuda":
        return HOST_FREE
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def allowed(limit: Limit, device: torch.device) -> int:
    """Bytes that this limit currently permits on this device."""
    share, least, most = limit
    return max(least, min(most, int(share * free_memory(device))))


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def spans(length: int, bytes_each: int, nbytes: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Cut `length` into equal spans, multiples of `multiple` that fit into `nbytes` (if a single multiple does)."""
    if length == 0:
        return
    fit = max(1, nbytes // max(1, bytes_each))
    step = length if fit >= length else fit // multiple * multiple or fit
    parts = -(-length // step)
    step = round_up(-(-length // parts), multiple) if step >= multiple else step
    for low in range(0, length, step):
        yield low, min(low + step, length)
