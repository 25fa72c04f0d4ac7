"""A key-value cache of fixed size, and the attention of one new token to it."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROUPED = "dew_grouped"
"""The name under which transformers finds `grouped_attention`."""


class FixedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, (B, heads, slots, width). A step writes to slot number `slot`."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, slot: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.slot = keys, values, slot
        self.visible = keys.shape[2]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The buffers are allocated from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys[:, :, : self.visible], self.values[:, :, : self.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.visible, 0

    def get_seq_length(self) -> int:
        return 0  # positions are passed with every call

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class FixedCache(Cache):  # type: ignore[misc]
    """The layers of a model. Attention sees the first `visible` slots."""

    def __init__(self, layers: list[FixedLayer]) -> None:
        super().__init__(layers=layers)

    def set_visible(self, visible: int) -> None:
        for layer in self.layers:
            layer.visible = visible

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for layer in self.layers for x in (layer.keys, layer.values))


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one token. Query heads that share a key head are treated as positions, so keys are not repeated."""
    rows, heads, one, width = query.shape
    shared = key.shape[1]
    grouped = query.reshape(rows, shared, heads // shared * one, width)
    mixed = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=scaling)
    return mixed.reshape(rows, heads, one, width).transpose(1, 2).contiguous(), None


def register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_attention)
