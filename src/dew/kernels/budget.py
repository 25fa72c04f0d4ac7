"""How much memory one chunk may take, from what the device has free and the shape of the problem."""

from collections.abc import Iterator

import torch

MIB = 1 << 20
GIB = 1 << 30
HOST_FREE = 8 * GIB
"""What a device that cannot be asked is assumed to have free."""

TILE = (1 / 64, 32 * MIB, 256 * MIB)
"""Share of the free memory, least and most bytes: a tile of scores that is used once and overwritten."""
KEPT = (1 / 16, 0, 8 * GIB)
"""Likewise, for weights kept from the forward to the backward pass."""
CHUNK = (1 / 8, 64 * MIB, 8 * GIB)
"""Likewise, for a chunk of tokens whose gradient is formed while its weights exist."""

Limit = tuple[float, int, int]


def free_memory(device: torch.device) -> int:
    """Bytes that a new tensor could take, memory that the allocator holds unused included."""
    if device.type != "cuda":
        return HOST_FREE
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def allowed(limit: Limit, device: torch.device) -> int:
    """Bytes that this limit grants on this device now."""
    share, least, most = limit
    return max(least, min(most, int(share * free_memory(device))))


def round_up(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


def spans(length: int, bytes_each: int, nbytes: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Cut `length` into equal spans, each a multiple long and within `nbytes` where one multiple fits at all."""
    if length == 0:
        return
    fit = max(1, nbytes // max(1, bytes_each))
    step = length if fit >= length else fit // multiple * multiple or fit
    parts = -(-length // step)
    step = round_up(-(-length // parts), multiple) if step >= multiple else step
    for low in range(0, length, step):
        yield low, min(low + step, length)
