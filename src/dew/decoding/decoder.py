"""Sample many answers at once, one token of each per step.

A decoding step of a small model launches a thousand short kernels, so the GPU waits for Python. Here a step is
captured as a CUDA graph and replayed. Weights may be updated in place between calls: a graph refers to their addresses.

    prompts, left-padded                   | answers
    . . the  prompt  of  row  one          | t0  t1  t2 ...
    the longer prompt  of  row  two        | t0  t1  t2 ...
    slot 0                                   slot P: the same for all rows, so one counter advances all of them

When rows have ended and prompts are waiting, these take their places: a new prompt goes into the slots before the
counter, which starts again at slot 0 after the last. When none is waiting, fewer rows continue without the rest.
"""

import copy
import importlib.util
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dew.decoding.draw import Draw
from dew.kernels import Head, plain_head
from dew.kernels.chunked import round_up, scores

try:
    from transformers.cache_utils import Cache, StaticLayer
except ImportError:  # not in every version: `refusal` says so, and `generate` samples
    Cache, StaticLayer = None, object

GROUPED = "dew_grouped"
"""The name under which transformers finds `grouped_attention`."""
LOOK = 16
"""Steps between checks whether all rows have ended: each check synchronises with the device."""
VISIBLE = 256
"""A graph attends to a multiple of this many slots."""
PREFILL = 65_536
REFILL = 1 / 16
"""Share of the rows that have ended when waiting prompts take their places."""
FEWEST = 128
"""Rows below which a step hardly gets faster."""
FREE = 0.7
"""Share of the free memory that keys and values may take; with less, fewer answers are sampled at a time."""
KEEP = 1 / 16
"""A cache above this share of the device's memory is released after each call, unless it is to be kept."""


def _fused_parts(model: Any) -> tuple[list[Any], str]:
    """Norms and rotary embeddings that one kernel computes, and the name of the attention."""
    if importlib.util.find_spec("triton") is None:
        return [], GROUPED
    from dew.decoding.fused import ATTENTION, fused_parts, same_attention

    return fused_parts(model), ATTENTION if same_attention(model, grouped_attention) else GROUPED


class SamplingCopy:
    """A copy of a model in the dtype used for sampling; the model itself if it already has that dtype."""

    def __init__(self, model: Any, dtype: torch.dtype | None = None) -> None:
        cast = [p for p in model.parameters() if dtype is not None and p.dtype != dtype]
        self._pairs = {p: nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in cast}
        self.model = model
        if self._pairs:
            # Parameters of the right dtype are shared and the others cast directly, without a copy in the old dtype.
            self.model = copy.deepcopy(model, {id(p): self._pairs.get(p, p) for p in model.parameters()}).eval()
            for name in ("forward", "_original_forward"):  # accelerate's wrappers still refer to the trained model
                self.model.__dict__.pop(name, None)

    def refresh(self) -> Any:
        with torch.no_grad():
            for source, target in self._pairs.items():
                target.copy_(source)
        return self.model


def refusal(model: Any, devices: Sequence[str] = ("cuda",)) -> str | None:
    """Why `Decoder` does not sample from this model, so that `generate` has to; None if it does."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        return "it is not a transformers model"
    if Cache is None:
        return f"transformers {transformers.__version__} has no static cache layers"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    attention = getattr(config, "_attn_implementation", None)
    parameters = [(p, f"{type(p).__name__} {type(p.data).__name__}") for p in model.parameters()]
    sharded = any(p.is_meta or hasattr(p, "ds_id") or "DTensor" in kind for p, kind in parameters)
    reasons = (
        (model.device.type not in devices, f"its device is {model.device.type}, not cuda"),
        (bool(getattr(config, "is_encoder_decoder", False)), "it has an encoder"),
        (hasattr(config, "vision_config") or hasattr(config, "audio_config"), "it is multimodal"),
        (kinds != {"full_attention"}, f"its layers are {', '.join(sorted(kinds))}"),
        (getattr(config, "attn_logit_softcapping", None) is not None, "its attention scores are soft-capped"),
        (not getattr(model, "_can_compile_fullgraph", False), "transformers cannot run it with a static cache"),
        (attention not in ("sdpa", "eager", None), f"its attention is {attention}"),
        (getattr(model, "is_quantized", False), "its weights are quantized"),
        (sharded, "its weights are sharded"),
    )
    return next((reason for found, reason in reasons if found), None)


class FixedLayer(StaticLayer):  # type: ignore[misc]
    """One layer's keys and values, (B, heads, slots, width). A step writes to slot number `slot`."""

    def __init__(self, keys_values: Tensor, slot: Tensor) -> None:
        super().__init__(max_cache_len=keys_values.shape[3])
        self.keys, self.values = keys_values
        self.slot, self.visible = slot, self.keys.shape[2]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys[:, :, : self.visible], self.values[:, :, : self.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.visible, 0

    def get_seq_length(self) -> int:
        return 0  # positions are passed with every call


def grouped_attention(
    _: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, **__: Any
) -> tuple[Tensor, None]:
    """Attention of one token. Query heads that share a key head are treated as positions, so keys are not repeated."""
    rows, heads, one, width = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1] * one, width)
    mixed = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
    return mixed.reshape(rows, heads, one, width).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_attention)


class Decoder:
    """Samples answers to prompts given as token ids. Without a GPU (in tests) the same steps run without graphs."""

    _most = 0
    """Rows of the largest call so far."""
    _kept: "dict[int, _Buffers]"
    _storage: Tensor
    """Keys and values of whichever buffers are in use."""
    _pool: Any
    """Memory that all graphs share: they run one after the other, and results are copied out."""

    def __init__(
        self, model: Any, draw: Draw, *, ends: Iterable[int], pad: int, keep: bool = False,
        arrange: Callable[[Tensor, int], None] | None = None,
    ) -> None:  # fmt: skip
        """`keep` buffers and graphs of any size. `arrange` is told the owners of the rows, (B,), before the model reads
        rows of so many tokens: rows of the same owner are neighbours."""
        self.model, self.draw, self.pad, self.keep, self.arrange = model, draw, pad, keep, arrange
        self.device = model.get_input_embeddings().weight.device
        self.ends = torch.tensor(sorted(ends), device=self.device)
        head = plain_head(model)
        self.head = head if isinstance(head, Head) else None
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
        self.forward = model if self.head is None else causal.base_model
        """The model that a step runs: without its head, if dew can compute that in float32."""
        self.parts, self.attention = _fused_parts(causal) if self.device.type == "cuda" else ([], GROUPED)
        """What a step of one token replaces in it."""
        self._release()

    def answers(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, at_once: int | None = None
    ) -> list[list[int]]:
        """One answer per prompt, up to and including the end token; `at_once` are sampled at a time."""
        return self.scored(prompts, max_new_tokens, at_once)[0]

    def scored(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, at_once: int | None = None
    ) -> tuple[list[list[int]], Tensor, Tensor]:
        """The answers, and of each of their tokens log-probability and entropy (nats), (B, `max_new_tokens`).

        Both are at the temperature and before any filter. What follows the end of an answer has no meaning.
        """
        tokens, lengths, logp, entropy = self.rows(prompts, max_new_tokens, at_once)
        return [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)], logp, entropy

    def rows(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, at_once: int | None = None,
        owners: Sequence[int] | None = None, uniforms: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Tokens (B, T), lengths (B,), log-probabilities and entropies (B, T), all on the device.

        `owners`, in ascending order, share no prompt. `uniforms`, (B, T, 2), decide the tokens, without filters.
        """
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                given = [tuple(ids) for ids in prompts], owners or [0] * len(prompts), uniforms
                tokens, logp, entropy = self._run(*given, max_new_tokens, at_once or len(prompts))
        finally:
            self.model.train(training)
        ended = torch.isin(tokens, self.ends)
        return tokens, torch.where(ended.any(1), ended.int().argmax(1) + 1, max_new_tokens), logp, entropy

    def is_end(self, tokens: Tensor) -> Tensor:
        """(B,) True on end tokens. torch.isin synchronises if there are many, which a graph cannot capture."""
        return (tokens[:, None] == self.ends).any(1)

    def logits(self, **inputs: Any) -> Tensor:
        """(B, V) logits of the last position, in float32 where the model has a plain head."""
        if self.head is None:
            logits: Tensor = self.forward(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
            return logits
        return scores(self.forward(**inputs, use_cache=True).last_hidden_state[:, -1], self.head, 0, None)[0]

    def _run(
        self, prompts: Sequence[tuple[int, ...]], owners: Sequence[int], uniforms: Tensor | None, new: int, at_once: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        width, total = max(map(len, prompts)), len(prompts)
        at_once = min(at_once, total, self.affordable(width + new))
        queue = _Queue(owners)
        place = torch.tensor(queue.first(at_once), device=self.device)  # which prompt each row answers
        buffers = self._fitting(len(place), width + new)
        buffers.start(width, new)
        made = [x.new_full((total, new), self.pad) for x in buffers.made]
        prefill = _Prefill(self, prompts, owners, queue.order, width, uniforms)
        prefill.load(place, torch.arange(len(place), device=self.device), buffers)
        prefill.arrange(place, len(buffers.hidden))
        step, last = 0, new - 1  # all rows have ended after step `last`
        while step < last or queue.waiting:
            step += 1
            buffers.step(self, min(width + step, buffers.slots))
            if step % LOOK:
                continue
            ended = buffers.ended[: len(place)]
            rows, live = ended.nonzero()[:, 0], (~ended).nonzero()[:, 0]
            if queue.waiting and len(rows) >= REFILL * len(place):
                prompt_numbers, chosen = queue.next(place.tolist(), rows.tolist())
                if chosen:
                    rows, numbers = (torch.tensor(x, device=self.device) for x in (chosen, prompt_numbers))
                    buffers.copy_made(made, place, rows)
                    place[rows] = numbers
                    prefill.load(numbers, rows, buffers)
                    prefill.arrange(place, len(buffers.hidden))
                    last = step + new - 1
            elif not queue.waiting and not len(live):
                break
            elif not queue.waiting and self._worthwhile(fewer := max(FEWEST, self._capacity(len(live))), buffers):
                buffers.copy_made(made, place, rows)
                larger, buffers, place = buffers, self._fitting(fewer, buffers.slots, exactly=True), place[live]
                buffers.take(larger, live)
                prefill.arrange(place, len(buffers.hidden))
        buffers.copy_made(made, place, torch.arange(len(place), device=self.device))
        memory = torch.cuda.mem_get_info(self.device)[1] if self.device.type == "cuda" else torch.inf
        if self._storage.nbytes > KEEP * memory and not self.keep:
            self._release()
        return made[0], made[1], made[2]

    def _worthwhile(self, fewer: int, buffers: "_Buffers") -> bool:
        """Whether to continue with fewer rows: graphs for another size pay off sooner if they are kept."""
        return fewer <= (0.85 if self.keep else 0.5) * len(buffers.hidden)

    def _capacity(self, rows: int) -> int:
        """Rows of the buffers for so many: few sizes to capture; kept ones are each a fifth smaller than another."""
        if not self.keep:
            return _capacity(rows)
        size = self._most = max(self._most, rows)
        while (smaller := int(size * 0.8)) >= rows:
            size = smaller
        return size

    def affordable(self, slots: int) -> int:
        """Rows whose keys and values fit into the free memory, rounded down to a capacity."""
        if self.device.type != "cuda":
            return sys.maxsize
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + unused + self._storage.nbytes
        shape = _cache_shape(self.model, 1, round_up(slots, VISIBLE))
        rows = int(FREE * free / math.prod(shape) / self.model.get_input_embeddings().weight.itemsize)
        return max(1, rows - rows % _spacing(rows))

    def _fitting(self, rows: int, slots: int, exactly: bool = False) -> "_Buffers":
        """Buffers for these answers, reused by calls of similar size: dynamic sampling varies the size."""
        capacity = self._capacity(rows)
        kept = self._kept[capacity].slots if capacity in self._kept else 0
        if kept < slots or (exactly and kept > slots):
            self._kept.pop(capacity, None)
            shape = _cache_shape(self.model, capacity, round_up(slots, VISIBLE))
            if self._storage.numel() < math.prod(shape):
                self._release()  # before allocating larger ones
                # zeros: masked slots must still be finite
                dtype = self.model.get_input_embeddings().weight.dtype
                self._storage = torch.zeros(math.prod(shape), dtype=dtype, device=self.device)
            cache = self._storage[: math.prod(shape)].view(shape)
            self._kept[capacity] = _Buffers(cache, self.pad)
        return self._kept[capacity]

    def _release(self) -> None:
        """Start without buffers. Graphs refer to the storage's address, so they go with it, and the pool with them."""
        self._kept, self._storage = {}, torch.empty(0)
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None


class _Queue:
    """The prompts that no row answers yet. A row that ends goes on with the next prompt of its owner."""

    def __init__(self, owners: Sequence[int]) -> None:
        self._owners, by_owner = owners, dict[int, list[int]]()
        for i, owner in enumerate(owners):
            by_owner.setdefault(owner, []).append(i)
        self.order = [i for turn in zip_longest(*by_owner.values()) for i in turn if i is not None]
        """In which prompts are started."""
        self._left, self.waiting = {owner: deque(numbers) for owner, numbers in by_owner.items()}, len(owners)

    def first(self, rows: int) -> list[int]:
        """Equally many prompts of each owner."""
        each = max(1, rows // len(self._left))
        return [self._take(left) for left in self._left.values() for _ in range(min(each, len(left)))]

    def next(self, place: Sequence[int], rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """The next prompts for some of these rows, and which rows."""
        found = [(self._take(left), row) for row in rows if (left := self._left[self._owners[place[row]]])]
        return [number for number, _ in found], [row for _, row in found]

    def _take(self, left: "deque[int]") -> int:
        self.waiting -= 1
        return left.popleft()


class _Prefill:
    """Keys, values and last logits of prompts: each distinct prompt once, many in one pass, in the order of use."""

    def __init__(
        self, decoder: Decoder, prompts: Sequence[tuple[int, ...]], owners: Sequence[int], order: Sequence[int],
        width: int, uniforms: Tensor | None,
    ) -> None:  # fmt: skip
        size = max(1, PREFILL // width)
        self._decoder, self._uniforms, self._prompts = decoder, uniforms, list(zip(owners, prompts, strict=True))
        texts = list(dict.fromkeys(self._prompts[i] for i in order))
        self._texts = [sorted(texts[i : i + size], key=lambda x: x[0]) for i in range(0, len(texts), size)]
        """Of each pass, with their owners."""
        self._place = {ids: (number, i) for number, some in enumerate(self._texts) for i, ids in enumerate(some)}
        self._owners = torch.tensor(owners, device=decoder.device)
        self._passes = dict[int, tuple[Any, Tensor, Tensor]]()

    def arrange(self, place: Tensor, rows: int) -> None:
        """Tell whose rows these are; rows that are not in use count as the last owner's."""
        if self._decoder.arrange:
            unused = self._owners[-1:].expand(rows - len(place))
            self._decoder.arrange(torch.cat([self._owners[place], unused]), 1)

    def load(self, prompts: Tensor, rows: Tensor, buffers: "_Buffers") -> None:
        """Put the prompts of these numbers into these rows, and sample the first token of each answer."""
        places = [self._place[self._prompts[i]] for i in prompts.tolist()]
        which = torch.tensor(places, device=rows.device)
        numbers, order, first = sorted({number for number, _ in places}), list[Tensor](), list[Tensor]()
        buffers.load_uniforms(rows, None if self._uniforms is None else self._uniforms[prompts])
        buffers.hidden[rows] = True
        for number in numbers:
            here = (which[:, 0] == number).nonzero()[:, 0]
            if number not in self._passes:
                self._passes = {n: x for n, x in self._passes.items() if n == number - 1} | {number: self._run(number)}
            cache, live, logits = self._passes[number]
            buffers.load_prompts(cache, rows[here], which[here, 1], live)
            order.append(rows[here])
            first.append(logits[which[here, 1]])
        chosen = torch.cat(order)
        drawn = self._decoder.draw.scored(torch.cat(first), buffers.uniforms[chosen, 0])
        buffers.load_tokens(chosen, *drawn, self._decoder)

    def _run(self, number: int) -> tuple[Any, Tensor, Tensor]:
        """A pass: the cache, where it holds prompts (B, width), and the logits."""
        chosen, model, pad = self._texts[number], self._decoder.model, self._decoder.pad
        texts, device = [text for _, text in chosen], self._decoder.device
        width = max(map(len, texts))
        if self._decoder.arrange:
            self._decoder.arrange(torch.tensor([owner for owner, _ in chosen], device=device), width)
        ids = torch.tensor([[pad] * (width - len(t)) + list(t) for t in texts], device=device)
        live = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts], device=device)
        cache, positions = DynamicCache(config=model.config), (live.cumsum(1) - 1).clamp_min(0)
        inputs = {"input_ids": ids, "attention_mask": live, "position_ids": positions, "past_key_values": cache}
        return cache, live, self._decoder.logits(**inputs)


def _cache_shape(model: Any, rows: int, slots: int) -> tuple[int, ...]:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, 2, rows, heads, slots, width


class _Buffers:
    """What a step reads and writes, at fixed addresses: cache, last tokens, position of each row."""

    def __init__(self, cache: Tensor, pad: int) -> None:
        _, _, rows, _, slots, _ = cache.shape
        device, self.dtype, self.slots, self.pad = cache.device, cache.dtype, slots, pad
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.cache = Cache(layers=[FixedLayer(layer, self.slot) for layer in cache])
        self.hidden = torch.empty(rows, slots, dtype=torch.bool, device=device)
        self.made = (
            torch.empty(rows, slots, dtype=torch.long, device=device),
            *torch.zeros(2, rows, slots, device=device),
        )
        """Tokens, their log-probabilities and entropies."""
        self.uniforms = torch.zeros(rows, slots, 2, device=device)
        """The random numbers that decide them."""
        self.token = torch.empty(rows, 1, dtype=torch.long, device=device)
        self.position = torch.empty(rows, 1, dtype=torch.long, device=device)
        self.written = torch.empty(rows, 1, dtype=torch.long, device=device)
        self.limit = torch.empty(1, dtype=torch.long, device=device)
        self.ended = torch.empty(rows, dtype=torch.bool, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}

    def start(self, width: int, limit: int) -> None:
        self.slot.fill_(width)
        self.limit.fill_(limit)
        self.written.zero_()
        self.token.fill_(self.pad)
        self.position.zero_()
        self.ended.fill_(True)
        self.hidden.fill_(True)

    def load_uniforms(self, rows: Tensor, given: Tensor | None) -> None:
        """These, or new ones."""
        some = torch.rand(len(rows), *self.uniforms.shape[1:], device=rows.device) if given is None else given
        self.uniforms[rows, : some.shape[1]] = some

    def load_prompts(self, cache: Any, rows: Tensor, which: Tensor, live: Tensor) -> None:
        """Copy keys and values of the prompts; rows with the same prompt get the same ones."""
        slots = self.slot + torch.arange(-live.shape[1], 0, device=rows.device)  # negative ones count from the last
        for ours, theirs in zip(self.cache.layers, cache.layers, strict=True):
            ours.keys[rows[:, None], :, slots] = theirs.keys[which].transpose(1, 2)
            ours.values[rows[:, None], :, slots] = theirs.values[which].transpose(1, 2)
        self.hidden[rows[:, None], slots] = ~live.bool()[which]
        self.position[rows, 0] = live.sum(1)[which]

    def load_tokens(self, rows: Tensor, tokens: Tensor, logp: Tensor, entropy: Tensor, decoder: Decoder) -> None:
        for made, new in zip(self.made, (tokens, logp, entropy), strict=True):
            made[rows, 0] = new.to(made.dtype)
        self.token[rows, 0] = tokens
        self.written[rows] = 1
        self.ended[rows] = decoder.is_end(tokens) | (self.limit <= 1)

    def copy_made(self, target: list[Tensor], place: Tensor, rows: Tensor) -> None:
        """Copy what these rows have sampled to their prompts' places in `target`."""
        for ours, theirs in zip(self.made, target, strict=True):
            theirs[place[rows]] = ours[rows, : theirs.shape[1]]

    def take(self, larger: "_Buffers", rows: Tensor) -> None:
        """Continue with these rows of larger buffers.

        Both caches lie in the same memory: a layer is copied to where it, or one before it, was.
        """
        self.start(0, 0)
        for ours, theirs in zip(self.cache.layers, larger.cache.layers, strict=True):
            copied = theirs.keys[rows], theirs.values[rows]
            ours.keys[: len(rows)], ours.values[: len(rows)] = copied
        for name in ("hidden", "token", "position", "written", "ended", "uniforms"):
            getattr(self, name)[: len(rows)] = getattr(larger, name)[rows]
        for made, before in zip(self.made, larger.made, strict=True):
            made[: len(rows)] = before[rows]
        self.slot.copy_(larger.slot)
        self.limit.copy_(larger.limit)

    def step(self, decoder: Decoder, filled: int) -> None:
        """Sample one more token. The first step per number of visible slots runs eagerly, the second is captured."""
        visible = round_up(filled, VISIBLE)
        if decoder.device.type != "cuda" or visible not in self._graphs:
            self._graphs[visible] = None
            self._forward(decoder, visible)
            return
        if (graph := self._graphs[visible]) is None:
            graph = torch.cuda.CUDAGraph()
            with _restored_on_failure(), torch.cuda.graph(graph, pool=decoder._pool):
                self._forward(decoder, visible)
            self._graphs[visible] = graph
        graph.replay()

    def _forward(self, decoder: Decoder, visible: int) -> None:
        for layer in self.cache.layers:
            layer.visible = visible
        self.hidden.index_fill_(1, self.slot, False)
        bias = torch.zeros(len(self.hidden), visible, dtype=self.dtype, device=self.slot.device)
        hidden = self.hidden[:, :visible]
        if decoder.attention != GROUPED:  # which reads nothing of a row that has ended
            hidden = hidden | self.ended[:, None]
        bias.masked_fill_(hidden, -torch.inf)
        inputs = {"input_ids": self.token, "attention_mask": bias[:, None, None], "position_ids": self.position}
        attention = (decoder.model.config.get_text_config(), "_attn_implementation_internal", decoder.attention)
        with replaced([*decoder.parts, attention]):  # prompts and training use the model's own
            logits = decoder.logits(**inputs, past_key_values=self.cache)
        uniforms = self.uniforms.gather(1, self.written[:, :, None].expand(-1, 1, 2))[:, 0]
        tokens, logp, entropy = decoder.draw.scored(logits, uniforms)
        tokens, live = tokens.masked_fill(self.ended, self.pad), ~self.ended[:, None]
        for made, new in zip(self.made, (tokens, logp, entropy), strict=True):
            made.scatter_(1, self.written, new[:, None].to(made.dtype))
        self.token.copy_(tokens[:, None])
        self.position += live
        self.written += live
        self.ended |= decoder.is_end(tokens) | (self.written[:, 0] >= self.limit)
        self.slot.add_(1).remainder_(self.slots)


@contextmanager
def _restored_on_failure() -> Iterator[None]:
    """After a failed capture PyTorch keeps the capturing stream current and the random generator in capture mode, in
    which it refuses to draw anything else: go back to the stream, and replace the generator's state by a copy.
    """
    stream = torch.cuda.current_stream()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        raise


@contextmanager
def replaced(parts: list[Any]) -> Iterator[None]:
    """Set attributes, given as (object, name, value), and restore them."""
    own = [(owner, name, vars(owner)[name]) for owner, name, _ in parts if name in vars(owner)]
    for part in parts:
        setattr(*part)
    try:
        yield
    finally:
        for owner, name, _ in parts:
            delattr(owner, name)
        for saved in own:
            setattr(*saved)


def _capacity(rows: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few sizes to capture, and more than half of the rows in use."""
    return round_up(rows, _spacing(rows))


def _spacing(rows: int) -> int:
    return max(1, 2 ** (rows.bit_length() - 2)) if rows else 1
