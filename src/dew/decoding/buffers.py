"""The paged KV cache and the per-row state of a sampling step, at fixed addresses so that a CUDA graph can use them.

    pages      | unused | prompt 0 | prompt 1 | ... | answers

Each answer has its own pages (page_runs.py). All answers to a prompt share the prompt's pages; their rows are
neighbours, so the GPU reads the prompt from memory once for all of them. The page table says where a row's pages begin
and how many tokens they hold. transformers passes it to attention in place of a mask.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

GATHERED = "dew_gathered"
"""The name under which `gathered_attention` is registered with transformers."""
LONG, LONGER = "_long", 32
"""Suffix of the attention used when a row may have more than LONGER pages: several programs share the pages of a row,
because towards the end only a few long answers are left."""
PAGE = 64
"""Tokens per page."""
COLUMNS = 4
"""Columns of the int32 page table: first page and length of the prompt, first page and length of the answer."""


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def gather(pages: Tensor, table: Tensor, spans: Sequence[int]) -> Tensor:
    """(N, heads, PAGE, width) pages -> (B, heads, slots, width): each row's prompt pages, then its answer pages."""
    both = zip(table[:, ::2].T, spans, strict=True)
    numbers = torch.cat([first[:, None] + torch.arange(n, device=table.device) for first, n in both], 1)
    # A short prompt has fewer pages than the longest one: `hidden` masks what is read beyond them.
    return pages[numbers.clamp_max(len(pages) - 1)].transpose(1, 2).flatten(2, 3)


def hidden(table: Tensor, spans: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Attention mask (B, 1, 1, slots): -inf for empty slots, else 0."""
    both = zip(table[:, 1::2].T, spans, strict=True)
    empty = torch.cat([torch.arange(n * PAGE, device=table.device) >= length[:, None] for length, n in both], 1)
    return torch.zeros(empty.shape, dtype=dtype, device=table.device).masked_fill_(empty, -torch.inf)[:, None, None]


def gathered_attention(
    _: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, **__: Any
) -> tuple[Tensor, None]:
    """Attention of one token per row. Query heads that share a key head become positions, so keys are not repeated."""
    rows, heads, one, width = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1] * one, width)
    mixed = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
    return mixed.reshape(rows, heads, one, width).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(GATHERED, gathered_attention)


class PagedLayer(StaticLayer):  # type: ignore[misc]
    """One layer's keys and values, each (pages, heads, PAGE, width)."""

    table: Tensor
    """The page table of the current step."""
    spans: Sequence[int] | None
    """Pages per prompt and per answer; None if the attention kernel reads pages itself."""

    def __init__(self, keys_values: Tensor, store: Callable[..., None]) -> None:
        """`keys_values` is (2, pages, heads, PAGE, width); `store` is the kernel that writes to the pages."""
        super().__init__(max_cache_len=keys_values.shape[1] * PAGE)
        self.keys, self.values = keys_values
        self.store, self.is_initialized = store, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the new tokens; return what attention reads."""
        if self.spans is None:
            self.store(key_states, value_states, self.keys, self.values, self.table)
            return self.keys, self.values
        last = self.table[:, 3] - 1
        page, slot = self.table[:, 2] + last // PAGE, last % PAGE
        self.keys[page, :, slot], self.values[page, :, slot] = key_states[:, :, 0], value_states[:, :, 0]
        return gather(self.keys, self.table, self.spans), gather(self.values, self.table, self.spans)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(self.max_cache_len), 0

    def get_seq_length(self) -> int:
        return 0  # positions are passed with every call


def cache_shape(model: Any, pages: int) -> tuple[int, ...]:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, 2, pages, heads, PAGE, width


class Buffers:
    """The state of the rows that are sampled together."""

    def __init__(
        self, layers: Sequence[PagedLayer], rows: int, width: int, new: int, pad: int, signals: int = 2
    ) -> None:
        """For prompts of up to `width` tokens and answers of up to `new`, with this many `signals` per token."""
        device, self.layers, self.pad = layers[0].keys.device, layers, pad
        self.width, self.new = width, new
        self.spans = pages_of(width), pages_of(new)
        self.table = torch.zeros(rows, COLUMNS, dtype=torch.int32, device=device)
        self.length, self.written = self.table[:, 1], self.table[:, 3:]
        tokens = self.spans[1] * PAGE + 1  # rows that ended at the limit keep writing to the last one
        self.made = (
            torch.empty(rows, tokens, dtype=torch.long, device=device),
            *torch.zeros(signals, rows, tokens, device=device),
        )
        """Sampled tokens, their log-probabilities, entropies and (with three signals) Σπ², each (rows, tokens)."""
        self.uniforms = torch.zeros(rows, tokens, 2, device=device)
        """The uniform random numbers that decide the tokens."""
        self.token = torch.empty(rows, 1, dtype=torch.long, device=device)
        self.limit = torch.empty(1, dtype=torch.long, device=device)
        self.ended = torch.empty(rows, dtype=torch.bool, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._ran = False

    def __len__(self) -> int:
        return len(self.table)

    def start(self, limit: int) -> None:
        """Mark all rows as unused: they count as ended and write to page 0, which is never read."""
        self.limit.fill_(limit)
        self.table.zero_()
        self.written.fill_(1)
        self.token.fill_(self.pad)
        self.ended.fill_(True)

    def prompt_page(self, number: int) -> int:
        """First page of this prompt; for the number after the last prompt, the first page of the answers."""
        return 1 + self.spans[0] * number

    def load_uniforms(self, rows: Tensor, given: Tensor | None) -> None:
        """Set the uniform numbers of these rows: the given ones, or new ones."""
        some = torch.rand(len(rows), *self.uniforms.shape[1:], device=rows.device) if given is None else given
        self.uniforms[rows, : some.shape[1]] = some

    def load_prompts(self, cache: Any, live: Tensor, which: Tensor, pages: Tensor) -> None:
        """Copy the keys and values of the prompts `which` of a prefill pass to their pages, which begin at `pages`."""
        prompt, column = live[which].nonzero().T
        place = column - (live.shape[1] - live.sum(1))[which][prompt]
        page, slot = pages[prompt] + place // PAGE, place % PAGE
        for ours, theirs in zip(self.layers, cache.layers, strict=True):
            ours.keys[page, :, slot] = theirs.keys[which[prompt], :, column]
            ours.values[page, :, slot] = theirs.values[which[prompt], :, column]

    def load_tokens(self, rows: Tensor, drawn: Sequence[Tensor], ended: Tensor) -> None:
        """Set the first token of each row's answer, with its signals."""
        for made, new in zip(self.made, drawn, strict=True):
            made[rows, 0] = new.to(made.dtype)
        self.token[rows, 0] = drawn[0]
        self.written[rows] = 1
        self.ended[rows] = ended | (self.limit <= 1)

    def copy_made(self, target: Sequence[Tensor], rows: Tensor, to: Tensor) -> None:
        """Copy what these rows have sampled to the rows `to` of `target`."""
        for ours, theirs in zip(self.made, target, strict=True):
            theirs[to] = ours[rows, : theirs.shape[1]]

    def take(self, larger: "Buffers", rows: Tensor) -> None:
        """Take over these rows from larger buffers. Their pages are not moved."""
        self.start(0)
        for name in ("table", "token", "ended"):
            getattr(self, name)[: len(rows)] = getattr(larger, name)[rows]
        tokens = min(self.uniforms.shape[1], larger.uniforms.shape[1])  # reused buffers may be longer
        for ours, before in zip((*self.made, self.uniforms), (*larger.made, larger.uniforms), strict=True):
            ours[: len(rows), :tokens] = before[rows, :tokens]
        self.limit.copy_(larger.limit)

    def step(self, decoder: Any) -> None:
        """Sample one more token per row. The first step runs eagerly, the second is captured as a CUDA graph."""
        if decoder.device.type != "cuda" or not self._ran:
            self._ran = True
            self._forward(decoder)
            return
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with _restored_on_failure(), torch.cuda.graph(graph, pool=decoder._pool):
                self._forward(decoder)
            self.graph = graph
        self.graph.replay()

    def _forward(self, decoder: Any) -> None:
        plain = decoder.attention == GATHERED
        table = self.table.masked_fill(self.ended[:, None], 0)  # a row that has ended reads nothing
        if plain:  # ... except page 0, because a softmax over nothing is NaN
            table[:, 3].clamp_min_(1)
        for layer in self.layers:
            layer.table, layer.spans = table, self.spans if plain else None
        mask = hidden(table, self.spans, self.layers[0].keys.dtype) if plain else table[:, None, None]
        positions = (self.length[:, None] + self.written - 1).long()
        inputs = {"input_ids": self.token, "attention_mask": mask, "position_ids": positions}
        name = decoder.attention + LONG * (not plain and sum(self.spans) > LONGER)
        attention = (decoder.model.config.get_text_config(), "_attn_implementation_internal", name)
        with replaced([*decoder.parts, attention]):  # prefill and training use the model's own
            logits = decoder.logits(**inputs, past_key_values=Cache(layers=list(self.layers)))
        written = self.written.long()
        uniforms = self.uniforms.gather(1, written[:, :, None].expand(-1, 1, 2))[:, 0]
        tokens, *signals = decoder.draw.scored(logits, uniforms)
        tokens, live = tokens.masked_fill(self.ended, self.pad), ~self.ended[:, None]
        for made, new in zip(self.made, (tokens, *signals), strict=True):
            made.scatter_(1, written, new[:, None].to(made.dtype))
        self.token.copy_(tokens[:, None])
        self.written += live
        self.ended |= decoder.is_end(tokens) | (self.written[:, 0] >= self.limit)


@contextmanager
def _restored_on_failure() -> Iterator[None]:
    """Restore the current stream and the random generator if a capture fails: PyTorch would stay on the capturing
    stream, with a generator in capture mode that refuses to draw anything else."""
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
    """Set attributes, given as (object, name, value), and restore them on exit."""
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


def evaluating(model: torch.nn.Module) -> AbstractContextManager[None]:
    """In evaluation mode, without dropout."""
    return replaced([(m, "training", False) for m in model.modules() if m.training])


def uncompiled(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Without the compiled layers of training, which would be compiled again for the cache of every layer."""
    return replaced([(m, "_compiled_call_impl", None) for m in model.modules() if m._compiled_call_impl])
