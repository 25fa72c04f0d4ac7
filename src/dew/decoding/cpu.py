"""Sampling from a small Llama or Qwen2 on a CPU, with the interface of `Decoder`.

`generate` spends most of a small model's step in Python: masks, cache objects, checks of its arguments. Here a step
reads the weights directly and writes into buffers that are allocated once; answers that have ended are removed from
the batch. The prompts go through the model itself, each distinct prompt once.

The queries of a row are one matrix (heads, key heads · head) with zeros outside of each head's own columns. One product
of this matrix with the keys of all heads, (slots, key heads · head), is faster than a small product per head, and rows
that answer the same prompt form a block, whose matrices are stacked for the product with the prompt's keys.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM, Qwen2ForCausalLM

from dew.decoding.decoder import refusal
from dew.decoding.draw import Draw

LOOK = 4
"""Steps between checks for answers that have ended."""
WORTHWHILE = 1 / 4
"""Remove the answers that have ended once they are this share of the batch: it copies the cache."""
SIZES = (16, 8, 4, 2, 1)
"""Answers in a block."""
SPARE = 0.1
"""Largest share of answers that are repeated to fill blocks."""
LARGEST = 50_000_000
"""Parameters of the largest model: every call copies the weights, and a larger one spends its time in arithmetic."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not depend on the length of the text."""


def cpu_refusal(model: Any) -> str | None:
    """Why `CpuDecoder` does not support this model; None if it does."""
    if (reason := refusal(model)) is not None:
        return reason
    if type(model) not in (LlamaForCausalLM, Qwen2ForCausalLM):
        return f"a {type(model).__name__} has no fast decoding on a CPU"
    if any(type(m) is not nn.Linear for m in model.modules() if hasattr(m, "in_features")):
        return "some of its linear layers were replaced"
    if model.num_parameters() > LARGEST:
        return f"it has more than {LARGEST:,} parameters"
    rope = model.model.rotary_emb.rope_type
    return None if rope in STATIC_ROPE else f"its rotary embeddings are of type {rope}"


class Layer(NamedTuple):
    """The weights of one layer, transposed, with matrices that read the same input joined.

    Folded into them: the weights of the norms, the scale of the attention scores, and the order of a head's
    components, which lets a rotation be one product of complex numbers. The first two have a last row for their bias.
    """

    query_key_value: Tensor
    gate_up: Tensor
    out: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]

    @classmethod
    def of(cls, layer: Any, order: Tensor, scale: Tensor) -> "Layer":
        attention, mlp, dtype = layer.self_attn, layer.mlp, scale.dtype
        states = _join([attention.q_proj, attention.k_proj, attention.v_proj], layer.input_layernorm.weight, dtype)
        return cls(
            states[:, order] * scale,
            _join([mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm.weight, dtype),
            *((x.weight.to(dtype).T.contiguous(), x.bias) for x in (attention.o_proj, mlp.down_proj)),
        )


def _join(parts: list[nn.Linear], norm: Tensor, dtype: torch.dtype) -> Tensor:
    """(D + 1, ...), the last row the bias, for rows that the norm has divided by their length √D · rms."""
    weight = torch.cat([p.weight for p in parts]).to(dtype).T * (norm.to(dtype) * len(norm) ** 0.5)[:, None]
    bias = [weight.new_zeros(p.out_features) if p.bias is None else p.bias.to(dtype) for p in parts]
    return torch.cat((weight, torch.cat(bias)[None]))


def _add_product(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """x += y · weight + bias"""
    x.addmm_(y, weight)
    if bias is not None:
        x += bias


def blocks_of(prompts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Arrange answers to these prompts in blocks with the same prompt, as large as `SPARE` allows.

    The answer at each of R places, True (R,) where it only fills a block, and the prompt of each block.
    """
    counts, most = Counter(prompts), (1 + SPARE) * len(prompts)
    size = next(n for n in SIZES if n * sum(-(-count // n) for count in counts.values()) <= most)
    answers, spare, blocks = list[int](), list[bool](), list[int]()
    left = sorted(range(len(prompts)), key=prompts.__getitem__)
    for prompt, count in sorted(counts.items()):
        own, left, fill = left[:count], left[count:], -count % size
        answers += own + own[:1] * fill
        spare += [False] * count + [True] * fill
        blocks += [prompt] * -(-count // size)
    return torch.tensor(answers), torch.tensor(spare), torch.tensor(blocks)


class CpuDecoder:
    """Samples answers to prompts given as token ids. Weights may be updated between calls."""

    def __init__(self, model: Any, draw: Draw, *, ends: Iterable[int], pad: int) -> None:
        self.model, self.draw, self.pad = model, draw, pad
        self.ends = torch.tensor(sorted(ends))
        config = model.config
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.act = nn.SiLU(inplace=True) if config.hidden_act == "silu" else model.model.layers[0].mlp.act_fn
        self.dtype = torch.promote_types(model.dtype, torch.float32)
        self.eps = torch.tensor((config.hidden_size * config.rms_norm_eps) ** 0.5, dtype=self.dtype)
        # Rows of the joined matrix: a query's and a key's components 0, head/2, 1, head/2 + 1, ..., then the values.
        rows = torch.arange((self.heads + 2 * self.key_heads) * self.head).view(-1, self.head)
        turned = rows[: -self.key_heads].unflatten(-1, (2, -1)).mT.flatten()
        self.order = torch.cat((turned, rows[-self.key_heads :].flatten()))
        self.scale = torch.ones(len(self.order), dtype=self.dtype)
        self.scale[: self.heads * self.head] = self.head**-0.5
        self._buffer = torch.empty(0, dtype=self.dtype)

    def answers(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """One answer per prompt, up to and including the end token."""
        return self.scored(prompts, max_new_tokens)[0]

    def scored(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[list[list[int]], Tensor, Tensor]:
        """The answers, and of each of their tokens log-probability and entropy (nats), (B, `max_new_tokens`).

        Both are at the temperature and before any filter. What follows the end of an answer has no meaning.
        """
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                tokens, logp, entropy = self._run(prompts, max_new_tokens)
        finally:
            self.model.train(training)
        ended = torch.isin(tokens, self.ends)
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, max_new_tokens).tolist()
        # Clones: tensors of inference mode may be neither changed in place nor kept for a gradient.
        return [row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)], logp.clone(), entropy.clone()

    def _run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T) tokens, log-probabilities and entropies; what follows an end token has no meaning."""
        inner, width, count = self.model.model, max(map(len, prompts)), len(prompts)
        layers = [Layer.of(layer, self.order, self.scale) for layer in inner.layers]
        embedding = inner.embed_tokens.weight.to(self.dtype)
        output = _join([self.model.lm_head], inner.norm.weight, self.dtype)
        cosine, sine = inner.rotary_emb(embedding, torch.arange(width + max_new_tokens)[None])
        turns = torch.complex(cosine[0, :, : self.head // 2], sine[0, :, : self.head // 2])[:, None]
        distinct = {ids: i for i, ids in enumerate(dict.fromkeys(map(tuple, prompts)))}
        which = torch.tensor([distinct[tuple(ids)] for ids in prompts])
        logits, texts = self._prefill(list(distinct), width)
        logits, position = logits[which], torch.tensor([len(ids) for ids in prompts])
        cache = self._cache(len(layers), int((1 + SPARE) * count), max_new_tokens)
        tokens = torch.zeros(max_new_tokens, count + 1, dtype=torch.long)
        logp, entropy = torch.zeros(2, *tokens.shape)
        row = torch.arange(count)  # the answer at each place in the batch; `count` where it only fills a block
        ended, is_end = torch.zeros(count, dtype=torch.bool), torch.isin(torch.arange(logits.shape[1]), self.ends)
        for n in range(max_new_tokens):
            token, new_logp, new_entropy = self.draw.scored(logits)
            for buffer, new in ((tokens, token), (logp, new_logp), (entropy, new_entropy)):
                buffer[n].index_copy_(0, row, new.to(buffer.dtype))
            ended |= is_end.index_select(0, token)
            if n + 1 == max_new_tokens or bool(ended.all()):
                break
            if n == 0 or (n % LOOK == 0 and int(ended.sum()) > WORTHWHILE * len(ended)):
                left = (~ended).nonzero()[:, 0]
                chosen, ended, blocks = blocks_of(which[row[left]].tolist())
                row, token, position = (x[left[chosen]] for x in (row, token, position))
                row[ended] = count
                for part in cache.flatten(0, 1):
                    part[: len(row), :n] = part[:, :n].index_select(0, left[chosen])
                cache, shared = cache[:, :, : len(row)], [[x[blocks] for x in text] for text in texts]
                norm, run_layer = self._functions(layers[0], len(row), len(blocks))
            x, turn = embedding.index_select(0, token), turns.index_select(0, position)
            filled = cache[:, 0, :, : n + 1].mT, cache[:, 1, :, : n + 1], cache[:, :, :, n]
            for layer, prompt, *answer in zip(layers, shared, *filled, strict=True):
                run_layer(x, layer, turn, *prompt, *answer)
            logits = torch.mm(norm(x), output)
            position += 1
        return tokens.T[:count], logp.T[:count], entropy.T[:count]

    def _functions(self, like: Layer, rows: int, blocks: int) -> tuple[Callable[[Tensor], Tensor], Callable[..., None]]:
        """Norm and layer for R = `rows` tokens, one per answer. They write to buffers allocated here once.

        The norm's result has a last column of ones, for the bias of the product that follows.
        """
        heads, key_heads, head, wide = self.heads, self.key_heads, self.head, self.key_heads * self.head
        normed = torch.ones(rows, len(like.gate_up), dtype=self.dtype)
        states, inner = (normed.new_empty(rows, x.shape[1]) for x in (like.query_key_value, like.gate_up))
        (queries, mixed), unit, (gate, up) = normed.new_zeros(2, rows, heads, wide), normed[:, :-1], inner.chunk(2, 1)
        turned = states[:, : heads * head + wide].view(rows, -1, head)
        pairs, query = torch.view_as_complex(turned.unflatten(-1, (-1, 2))), turned[:, :heads]
        key_value = states[:, heads * head :].view(rows, 2, wide).transpose(0, 1)
        # Of each query's columns those of its key head: (R, heads, head) as (R, key heads, queries of a key head, head)
        by_head = (x.view(rows, key_heads, -1, key_heads, head).diagonal(dim1=1, dim2=3) for x in (queries, mixed))
        own_queries, own_mixed = (x.permute(0, 3, 1, 2) for x in by_head)

        def norm(x: Tensor) -> Tensor:
            torch.div(x, torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.eps), out=unit)
            return normed

        def run_layer(
            x: Tensor, layer: Layer, turn: Tensor, prompt_keys: Tensor, prompt_values: Tensor, padding: Tensor,
            keys: Tensor, values: Tensor, slot: Tensor,
        ) -> None:  # fmt: skip
            """Add a layer's output to x (R, D). With W = key heads · head:

            prompt_keys (blocks, W, width), prompt_values (blocks, width, W), padding (blocks, 1, width), −∞ on padding;
            of the answers keys (R, W, slots), values (R, slots, W) and their last slot (2, R, W), which is filled here.
            """
            torch.mm(norm(x), layer.query_key_value, out=states)
            pairs.mul_(turn)
            own_queries.copy_(query.view(own_queries.shape))
            slot.copy_(key_value)
            to_prompt = torch.baddbmm(padding, queries.view(blocks, -1, wide), prompt_keys)
            width, to_answer = padding.shape[-1], torch.bmm(queries, keys)
            share = torch.cat((to_prompt.view(rows, heads, width), to_answer), -1).softmax(-1)
            torch.bmm(share[..., width:], values, out=mixed)
            mixed.view(blocks, -1, wide).baddbmm_(share.view(blocks, -1, share.shape[-1])[..., :width], prompt_values)
            _add_product(x, own_mixed.reshape(rows, -1), *layer.out)
            torch.mm(norm(x), layer.gate_up, out=inner)
            _add_product(x, self.act(gate).mul_(up), *layer.down)

        return norm, run_layer

    def _cache(self, layers: int, rows: int, slots: int) -> Tensor:
        """(layers, 2, R, slots, W) for keys and values of the answers, reused by later calls."""
        shape = layers, 2, rows, slots, self.key_heads * self.head
        size = torch.Size(shape).numel()
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=self.dtype)
        return self._buffer[:size].view(shape)

    def _prefill(self, prompts: list[tuple[int, ...]], width: int) -> tuple[Tensor, list[list[Tensor]]]:
        """The first logits (P, V) of distinct prompts, and what `_layer` reads of them, by the model itself."""
        ids = torch.tensor([[self.pad] * (width - len(t)) + list(t) for t in prompts])
        live = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in prompts])
        filled = DynamicCache(config=self.model.config)
        inputs = {"input_ids": ids, "attention_mask": live, "position_ids": (live.cumsum(1) - 1).clamp_min(0)}
        logits = self.model(**inputs, past_key_values=filled, use_cache=True, logits_to_keep=1).logits[:, -1]
        padding = torch.zeros(live.shape, dtype=self.dtype).masked_fill_(live == 0, -torch.inf)[:, None]
        texts = []
        for layer in filled.layers:
            keys, values = (x.to(self.dtype) for x in (layer.keys, layer.values))
            keys = keys.unflatten(-1, (2, -1)).mT.flatten(-2)  # the order of a head's components as in `Layer`
            texts.append([keys.mT.flatten(1, 2), values.transpose(1, 2).flatten(2), padding])
        return logits.to(self.dtype), texts
