"""Sample many answers at once, one token of each per step.

A step of a small model is a thousand short kernels; launched one by one, the GPU waits for Python. Here a step is
captured as a CUDA graph and replayed. Weights may change in place between calls: a graph reads them where they lie.

    prompts, padded on the left            | answers
    . . the  prompt  of  row  one          | t0  t1  t2 ...
    the longer prompt  of  row  two        | t0  t1  t2 ...
    slot 0                                   slot P: the same for all rows, so one number moves all of them
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dew.decoding.draw import Draw

LOOK = 16
"""Steps between two looks at whether all rows have ended: each look waits for the device."""
VISIBLE = 256
"""A graph attends to a multiple of this many slots."""
PREFILL = 65_536
"""Prompt tokens in one pass."""
KEEP = 1 / 16
"""Buffers above this share of the device's memory are given back after each call."""


def refusal(model: Any) -> str | None:
    """Why this model cannot be sampled here; None if it can."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        return "it is not a transformers model"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    attention = getattr(config, "_attn_implementation", None)
    reasons = (
        (bool(getattr(config, "is_encoder_decoder", False)), "it has an encoder"),
        (hasattr(config, "vision_config") or hasattr(config, "audio_config"), "it reads more than text"),
        (kinds != {"full_attention"}, f"its layers are {', '.join(sorted(kinds))}"),
        (getattr(config, "attn_logit_softcapping", None) is not None, "its attention is capped"),
        (not getattr(model, "_can_compile_fullgraph", False), "transformers cannot run it with a cache of fixed size"),
        (attention not in ("sdpa", "eager", None), f"its attention is {attention}"),
        (getattr(model, "is_quantized", False), "its weights are quantised"),
        (any(p.is_meta or hasattr(p, "ds_id") or _sharded(p) for p in model.parameters()), "its weights are sharded"),
    )
    return next((reason for found, reason in reasons if found), None)


def _sharded(parameter: Tensor) -> bool:
    return type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor"


class Decoder:
    """Answers to prompts of token ids. On a CPU the same steps run without graphs."""

    def __init__(self, model: Any, draw: Draw, *, ends: Iterable[int], pad: int) -> None:
        self.model, self.forward, self.draw, self.pad = model, model, draw, pad
        self.device = model.get_input_embeddings().weight.device
        self.ends = torch.tensor(sorted(ends), device=self.device)
        self._kept: dict[int, _Buffers] = {}

    def answers(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """One answer to each prompt, up to and with the token that ends it."""
        if not prompts:
            return []
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                tokens = self._run(prompts, max_new_tokens)
        finally:
            self.model.train(training)
        return self._cut(tokens)

    def _run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Tensor:
        width = max(len(ids) for ids in prompts)
        buffers = self._fitting(len(prompts), width + max_new_tokens)
        buffers.start(width)
        self._prefill(prompts, buffers, width)
        for n in range(1, max_new_tokens):
            buffers.step(self, width + n)
            if n % LOOK == 0 and bool(buffers.ended.all()):
                break
        tokens = buffers.tokens[: len(prompts), :max_new_tokens].clone()
        if sum(kept.cache.bytes for kept in self._kept.values()) > KEEP * _memory(self.device):
            self._kept.clear()
        return tokens

    def _fitting(self, rows: int, slots: int) -> "_Buffers":
        """Buffers that these answers fit into, kept for later calls of about this size: dynamic sampling varies it."""
        room = _room(rows)
        if room not in self._kept or self._kept[room].slots < slots:
            self._kept.pop(room, None)  # give them back before new ones are made
            self._kept[room] = _Buffers(self.model, room, -(-slots // VISIBLE) * VISIBLE, self.pad)
        return self._kept[room]

    def _prefill(self, prompts: Sequence[Sequence[int]], buffers: "_Buffers", width: int) -> None:
        """Read every different prompt once, and draw the first token of each answer."""
        from transformers import DynamicCache

        different = {tuple(ids): i for i, ids in enumerate(dict.fromkeys(map(tuple, prompts)))}
        which = torch.tensor([different[tuple(ids)] for ids in prompts], device=self.device)
        texts, first = list(different), list[Tensor]()
        for part in _parts(len(texts), max(1, PREFILL // width)):
            ids = torch.tensor([[self.pad] * (width - len(t)) + list(t) for t in texts[part]], device=self.device)
            live = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts[part]], device=self.device)
            places = (live.cumsum(1) - 1).clamp_min(0)
            cache = DynamicCache(config=self.model.config)
            output = self.model(
                input_ids=ids,
                attention_mask=live,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            first.append(output.logits[:, -1])
            rows = ((which >= part.start) & (which < part.stop)).nonzero()[:, 0]
            buffers.read(cache, rows, which[rows] - part.start, live)
        buffers.first(self.draw(torch.cat(first)[which]), self.ends)

    def _cut(self, tokens: Tensor) -> list[list[int]]:
        ended = torch.isin(tokens, self.ends)
        last = torch.where(ended.any(1), ended.int().argmax(1) + 1, tokens.shape[1])
        return [row[:n] for row, n in zip(tokens.tolist(), last.tolist(), strict=True)]


class _Buffers:
    """What a step reads and writes, at addresses that stay: cache, last tokens, where each row stands."""

    def __init__(self, model: Any, rows: int, slots: int, pad: int) -> None:
        from dew.decoding.slots import SlotCache, Slots, register

        register()
        config = model.config.get_text_config()
        weight = model.get_input_embeddings().weight
        device, dtype = weight.device, weight.dtype
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rows, self.slots, self.pad = rows, slots, pad
        self.place = torch.zeros(1, dtype=torch.long, device=device)

        def empty() -> Tensor:  # zeros: what no row looks at must still be a number
            return torch.zeros(rows, heads, slots, head, dtype=dtype, device=device)

        self.cache = SlotCache([Slots(empty(), empty(), self.place) for _ in range(config.num_hidden_layers)])
        self.hidden = torch.zeros(rows, slots, dtype=torch.bool, device=device)
        self.tokens = torch.full((rows, slots), pad, device=device)
        self.token = torch.full((rows, 1), pad, device=device)
        self.position = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.written = torch.ones(1, dtype=torch.long, device=device)
        self.ended = torch.ones(rows, dtype=torch.bool, device=device)
        self._order = torch.arange(slots, device=device)
        self._bias_dtype = dtype
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}

    def start(self, width: int) -> None:
        self.place.fill_(width)
        self.written.fill_(1)
        self.tokens.fill_(self.pad)
        self.token.fill_(self.pad)
        self.position.zero_()
        self.ended.fill_(True)
        self.hidden.zero_()

    def read(self, cache: Any, rows: Tensor, which: Tensor, live: Tensor) -> None:
        """Take over keys and values of prompts; rows of one prompt share them."""
        width = live.shape[1]
        for ours, theirs in zip(self.cache.layers, cache.layers, strict=True):
            ours.keys[rows, :, :width] = theirs.keys[which]
            ours.values[rows, :, :width] = theirs.values[which]
        self.hidden[rows, :width] = ~live.bool()[which]
        self.position[rows, 0] = live.sum(1)[which]

    def first(self, tokens: Tensor, ends: Tensor) -> None:
        rows = len(tokens)
        self.tokens[:rows, 0] = tokens
        self.token[:rows, 0] = tokens
        self.ended[:rows] = torch.isin(tokens, ends)

    def step(self, decoder: Decoder, filled: int) -> None:
        """One token more. The first step with so many visible slots runs plainly, the second is captured."""
        visible = -(-filled // VISIBLE) * VISIBLE
        if decoder.device.type != "cuda" or visible not in self._graphs:
            self._graphs[visible] = None
            self._forward(decoder, visible)
            return
        graph = self._graphs[visible]
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._forward(decoder, visible)
            self._graphs[visible] = graph
        graph.replay()

    def _forward(self, decoder: Decoder, visible: int) -> None:
        self.cache.look_at(visible)
        unseen = self.hidden[:, :visible] | (self._order[:visible] > self.place)
        bias = torch.zeros(unseen.shape, dtype=self._bias_dtype, device=unseen.device)
        bias.masked_fill_(unseen, -torch.inf)
        with _attention(decoder.model):
            logits = decoder.forward(
                input_ids=self.token,
                attention_mask=bias[:, None, None],
                position_ids=self.position,
                past_key_values=self.cache,
                use_cache=True,
            ).logits[:, -1]
        tokens = decoder.draw(logits).masked_fill(self.ended, self.pad)
        self.tokens.index_copy_(1, self.written, tokens[:, None])
        self.ended |= torch.isin(tokens, decoder.ends)
        self.token.copy_(tokens[:, None])
        self.position += 1
        self.place += 1
        self.written += 1


@contextmanager
def _attention(model: Any) -> Iterator[None]:
    """One token attends by `grouped_attention`; prompts, and training, by the model's own."""
    from dew.decoding.slots import GROUPED

    config = model.config.get_text_config()
    own = config._attn_implementation
    config._attn_implementation_internal = GROUPED
    try:
        yield
    finally:
        config._attn_implementation_internal = own


def _room(rows: int) -> int:
    """Rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few sizes to capture, and never half of the rows idle."""
    step = max(1, 2 ** (rows.bit_length() - 2))
    return -(-rows // step) * step


def _parts(n: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, n)) for i in range(0, n, size))


def _memory(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else float("inf")
