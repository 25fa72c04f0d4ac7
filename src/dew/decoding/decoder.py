"""Sample many answers at once, one token of each per step.

A decoding step of a small model launches a thousand short kernels, so the GPU waits for Python. Here a step is
captured as a CUDA graph and replayed. Weights may be updated in place between calls: a graph refers to their addresses.

Rows that have ended are refilled with waiting prompts. Once no prompt is waiting, the remaining rows continue in a
smaller batch.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dew.decoding.buffers import GATHERED, PAGE, Buffers, PagedLayer, cache_shape, evaluating, pages_of, uncompiled
from dew.decoding.draw import HAS_TRITON, Draw
from dew.decoding.page_runs import Runs, run_sizes
from dew.decoding.prompts import Prefill, Queue
from dew.kernels import Head, plain_head
from dew.kernels.chunked import round_up, scores

LOOK = 16
"""Steps between checks for ended rows: each check synchronises with the device."""
REFILL = 1 / 16
"""Ended rows are refilled with waiting prompts once they are this share of all rows."""
FEWEST = 128
"""Rows below which a step hardly gets faster."""
FREE = 0.7
"""Share of the free memory that the KV cache may take. If that is too little, fewer answers are sampled at a time."""
USED = 1 / 4
"""Share of a long limit that memory is planned for, per row: few answers reach the limit."""
NEARLY = 0.9
"""A KV cache limited by free memory is reused if it has at least this share of the size now wanted."""
KEEP = 1 / 16
"""A KV cache above this share of the device's memory is released after each call, unless `keep` is set."""


PLAIN = ("sdpa", "eager")
"""Attention of a model that also reads its prompts."""


def _fused_parts(model: Any) -> tuple[list[Any], str]:
    """The parts of the model to replace by fused kernels, and the name of the attention."""
    if not HAS_TRITON:
        return [], GATHERED
    from dew.decoding.fused import ATTENTION, fused_parts, product_parts, same_attention

    return fused_parts(model) + product_parts(model), ATTENTION if same_attention(model) else GATHERED


def _store(*given: Tensor) -> None:
    from dew.decoding.fused import store

    store(*given)


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
    """Why `Decoder` cannot sample from this model, so that `generate` has to; None if it can."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        return "it is not a transformers model"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    attention = getattr(config, "_attn_implementation", None) or "sdpa"
    usual = attention in PLAIN or "flash" in attention or attention == "flex_attention"
    parameters = [(p, f"{type(p).__name__} {type(p.data).__name__}") for p in model.parameters()]
    sharded = any(p.is_meta or hasattr(p, "ds_id") or "DTensor" in kind for p, kind in parameters)
    reasons = (
        (model.device.type not in devices, f"its device is {model.device.type}, not cuda"),
        (bool(getattr(config, "is_encoder_decoder", False)), "it has an encoder"),
        (hasattr(config, "vision_config") or hasattr(config, "audio_config"), "it is multimodal"),
        (kinds != {"full_attention"}, f"its layers are {', '.join(sorted(kinds))}"),
        (getattr(config, "attn_logit_softcapping", None) is not None, "its attention scores are soft-capped"),
        (not getattr(model, "_can_compile_fullgraph", False), "transformers cannot run it with a static cache"),
        (not usual, f"its attention is {attention}"),
        (getattr(model, "is_quantized", False), "its weights are quantized"),
        (sharded, "its weights are sharded"),
    )
    return next((reason for found, reason in reasons if found), None)


class Decoder:
    """Samples answers to prompts given as token ids. Without a GPU (in tests) the same steps run without graphs."""

    _most = 0
    """Rows of the largest call so far."""
    _kept: dict[int, Buffers]
    _storage: Tensor
    """The KV cache, shared by all buffers: only one of them is in use at a time."""
    _layers: Sequence[PagedLayer]
    _pool: Any
    """Memory pool shared by all graphs: they run one after the other, and results are copied out."""

    def __init__(
        self, model: Any, draw: Draw, *, ends: Iterable[int], pad: int, keep: bool = False,
        arrange: Callable[[Tensor, int], None] | None = None,
    ) -> None:  # fmt: skip
        """`keep`: keep buffers and graphs of any size between calls. `arrange(owners, tokens)` is called before each
        forward pass with the owner of each row, (B,), and the tokens per row; rows of an owner are neighbours."""
        self.model, self.draw, self.pad, self.keep, self.arrange = model, draw, pad, keep, arrange
        self.device = model.get_input_embeddings().weight.device
        self.ends = torch.tensor(sorted(ends), device=self.device)
        head = plain_head(model)
        self.head = head if isinstance(head, Head) else None
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
        self.forward = model if self.head is None else causal.base_model
        """The model that a step runs: without its head if dew can compute the head in float32."""
        self.parts, self.attention = _fused_parts(causal) if self.device.type == "cuda" else ([], GATHERED)
        """What a one-token step replaces in the model, as for `replaced`."""
        config = causal.config.get_text_config()
        plain = config._attn_implementation in (*PLAIN, None)
        self.prefill_parts = [] if plain else [(config, "_attn_implementation_internal", "sdpa")]
        """What a prefill pass replaces: flash and flex attention may not take these masks or this dtype."""
        self._release()

    def answers(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, at_once: int | None = None
    ) -> list[list[int]]:
        """Sample one answer per prompt, up to and including the end token, at most `at_once` at a time."""
        return self.scored(prompts, max_new_tokens, at_once)[0]

    def scored(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, at_once: int | None = None
    ) -> tuple[list[list[int]], Tensor, Tensor]:
        """The answers, and the log-probability and entropy (nats) of each token, (B, `max_new_tokens`).

        Both are at the sampling temperature, before any filter. Values after the end of an answer are undefined.
        """
        tokens, lengths, logp, entropy = self.rows(prompts, max_new_tokens, at_once)[:4]
        return [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)], logp, entropy

    def rows(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, at_once: int | None = None,
        owners: Sequence[int] | None = None, uniforms: Tensor | None = None,
        on_ended: Callable[[Sequence[int], Tensor], None] | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Tokens (B, T), lengths (B,), log-probabilities, entropies and, with `draw.sum_sq`, Σπ² (B, T), on the device.

        `owners`: owner of each prompt, ascending; equal prompts of different owners are read separately. `uniforms`
        (B, T, 2): decide the tokens. `on_ended(places, tokens)` is called as answers end.
        """
        with torch.no_grad(), evaluating(self.model), uncompiled(self.model):
            given = [tuple(ids) for ids in prompts], owners or [0] * len(prompts), uniforms, on_ended
            tokens, *signals = self._run(*given, max_new_tokens, at_once or len(prompts))
        ended = torch.isin(tokens, self.ends)
        return tokens, torch.where(ended.any(1), ended.int().argmax(1) + 1, max_new_tokens), *signals

    def is_end(self, tokens: Tensor) -> Tensor:
        """(B,) True on end tokens. Not torch.isin, which may synchronise: a graph cannot capture that."""
        return (tokens[:, None] == self.ends).any(1)

    def logits(self, **inputs: Any) -> Tensor:
        """(B, V) logits of the last position, in float32 if the model has a plain head."""
        if self.head is None:
            logits: Tensor = self.forward(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
            return logits
        hidden = self.forward(**inputs, use_cache=True).last_hidden_state[:, -1]
        return scores(hidden, self.head, 0, len(self.head.weight))[0]

    def _run(
        self, prompts: Sequence[tuple[int, ...]], owners: Sequence[int], uniforms: Tensor | None,
        on_ended: Callable[[Sequence[int], Tensor], None] | None, new: int, at_once: int,
    ) -> list[Tensor]:  # fmt: skip
        # Whole pages: buffers then fit all prompts that need as many, and their graphs are captured once.
        width, total, queue = PAGE * pages_of(max(map(len, prompts))), len(prompts), Queue(owners)
        prefill = Prefill(self, prompts, owners, queue, uniforms)
        place = queue.first(min(at_once, total, self.affordable(width, new, prefill.distinct)))
        """The prompt that each row answers."""
        buffers = self._fitting(len(place), width, new, prefill.make_room(len(place)))
        buffers.start(new)
        runs = Runs(self._storage, buffers.prompt_page(prefill.room), new)
        made = [x.new_full((total, new), self.pad) for x in buffers.made]

        copied: set[int] = set()

        def copy(rows: Iterable[int]) -> None:
            """Copy what these rows have sampled to the result, unless that was done before."""
            if fresh := [i for i in rows if i not in copied]:
                chosen, to = torch.tensor([fresh, [place[i] for i in fresh]], device=self.device)
                buffers.copy_made(made, chosen, to)
                copied.update(fresh)
                if on_ended:
                    on_ended([place[i] for i in fresh], made[0][to])

        prefill.load(place, range(len(place)), buffers)
        runs.begin(range(len(place)))
        step, last = 0, new - 1  # all rows have reached the limit after step `last`
        while step < last or queue.waiting or runs.waiting:
            if step % LOOK == 0 and runs.grow(buffers, LOOK):
                last = step + new - 1
            step += 1
            buffers.step(self)
            if step % LOOK:
                continue
            ended = [x and i not in runs.waiting for i, x in enumerate(buffers.ended[: len(place)].tolist())]
            rows, live = ([i for i, x in enumerate(ended) if x == which] for which in (True, False))
            copy(rows)
            runs.advance(LOOK, rows)
            if queue.waiting and len(rows) >= REFILL * len(place):
                numbers, rows = queue.next(place, rows)
                if rows:
                    prefill.release([place[i] for i in rows])
                    for row, number in zip(rows, numbers, strict=True):
                        place[row] = number
                    copied.difference_update(rows)
                    prefill.load(place, rows, buffers)
                    runs.begin(rows)
                    last = step + new - 1
            elif not queue.waiting and not live:
                break
            elif not queue.waiting and self._worthwhile(fewer := max(FEWEST, self._capacity(len(live))), buffers):
                larger, buffers, place = buffers, self._fitting(fewer, width, new), [place[i] for i in live]
                copied.clear()
                buffers.take(larger, torch.tensor(live, device=self.device))
                runs.keep(live)
                prefill.arrange(place, len(buffers))
        copy(range(len(place)))
        self._release_large()
        return made

    def _worthwhile(self, fewer: int, buffers: Buffers) -> bool:
        """Whether to continue with smaller buffers: capturing their graph pays off sooner if it is kept."""
        return fewer <= (0.85 if self.keep else 0.5) * len(buffers)

    def _capacity(self, rows: int) -> int:
        """Round up to one of a few buffer sizes. Kept sizes are fractions 1, 0.8, 0.64, ... of the largest call."""
        if not self.keep:
            return _capacity(rows)
        size = self._most = max(self._most, rows)
        while (smaller := int(size * 0.8)) >= rows:
            size = smaller
        return size

    def affordable(self, width: int, new: int, prompts: float = math.inf) -> int:
        """Number of rows whose KV cache fits into the free memory, rounded down to a buffer size, for answers of up to
        `new` tokens to `prompts` different prompts of `width` tokens."""
        pages, prompt, answer = self._room() - 1, pages_of(width), max(run_sizes(new)[0], int(USED * pages_of(new)))
        rows = max(pages // (prompt + answer), int(max(0, pages - prompts * prompt) // answer))
        return max(1, rows - rows % _spacing(rows))

    def _room(self) -> int:
        """Number of pages that fit into the memory allowed."""
        if self.device.type != "cuda":
            return sys.maxsize
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + unused + self._storage.nbytes
        page = math.prod(cache_shape(self.model, 1)) * self.model.get_input_embeddings().weight.itemsize
        return int(FREE * free / page)

    def _fitting(self, rows: int, width: int, new: int, prompts: int = 0) -> Buffers:
        """Buffers for this many rows, reused by calls of similar size. With `prompts=0` the KV cache is not changed."""
        capacity = self._capacity(rows)
        kept = self._kept.get(capacity)
        width, new = (width, new) if kept is None else (max(width, kept.width), max(new, kept.new))
        others, longest, most = 1 + prompts * pages_of(width), run_sizes(new)[-1], self._room()
        pages = max(others + longest, min(most, others + capacity * longest))
        shape = cache_shape(self.model, pages)
        if prompts and self._storage.numel() < math.prod(shape) * (NEARLY if pages == most else 1):
            self._release()  # before allocating a larger one
            # zeros, because masked slots must still be finite
            dtype = self.model.get_input_embeddings().weight.dtype
            self._storage, kept = torch.zeros(shape, dtype=dtype, device=self.device), None
            self._layers = [PagedLayer(layer, _store) for layer in self._storage]
        if kept is None or (kept.width, kept.new) != (width, new):
            self._kept.pop(capacity, None)
            if not any(x.graph for x in self._kept.values()) and self.device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()  # PyTorch refuses one whose last graph is gone
            kept = self._kept[capacity] = Buffers(self._layers, capacity, width, new, self.pad, 2 + self.draw.sum_sq)
        return kept

    def _release_large(self) -> None:
        memory = torch.cuda.mem_get_info(self.device)[1] if self.device.type == "cuda" else torch.inf
        if self._storage.nbytes > KEEP * memory and not self.keep:
            self._release()

    def _release(self) -> None:
        """Free the KV cache, and with it buffers, graphs and their pool: graphs refer to the cache's address."""
        self._kept, self._storage = {}, torch.empty(0)
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None


def _capacity(rows: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few sizes to capture, and more than half of the rows in use."""
    return round_up(rows, _spacing(rows))


def _spacing(rows: int) -> int:
    return max(1, 2 ** (rows.bit_length() - 2)) if rows else 1
