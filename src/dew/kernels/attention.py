"""Attention over sequences of different lengths that are joined into one row, without padding.

transformers finds it under the name PACKED. Calls without `cu_seq_lens_q` are those of "sdpa".
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "dew_packed"


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Query (1, heads, N, width) -> (1, N, heads, width); `cu_seq_lens_q` has the places where sequences begin."""
    ends = rest.get("cu_seq_lens_q")
    if ends is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **rest)
        return found
    if torch.is_autocast_enabled(query.device.type):
        kind = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(kind), key.to(kind), value.to(kind)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        longest = rest["max_length_q"]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, longest, longest, 0.0, True, False, scale=scaling
        )[0]
        return out[None], None
    parts = zip(*(x.split(ends.diff().tolist(), dim=2) for x in (query, key, value)), strict=True)
    attend = partial(scaled_dot_product_attention, is_causal=True, scale=scaling, enable_gqa=True)
    pieces = [attend(q, k, v) for q, k, v in parts]
    return torch.cat(pieces, dim=2).transpose(1, 2), None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
