"""Sampling from a small Llama or Qwen2 on a CPU, with the interface of `Decoder`.

`generate` spends most of a small model's step in Python: masks, cache objects, checks of its arguments. Here a step
reads the weights directly and writes into buffers that are allocated once; answers that have ended are removed from
the batch. The prompts go through the model itself, each distinct prompt once.

The queries of a row are one matrix (heads, key heads · head) with zeros outside of each head's own columns. One product
of this matrix with the keys of all heads, (slots, key heads · head), is faster than a small product per head, and rows
that answer the same prompt form a block, whose matrices are stacked for the product with the prompt's keys.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM, Qwen2ForCausalLM

from dew.decoding.decoder import Draw, refusal

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
    """The weights of one layer as (transposed weight, bias), with matrices that read the same input joined.

    Folded into them: the weights of the norms, the scale of the attention scores, and the order of a head's
    components, which lets a rotation be one product of complex numbers.
    """

    query_key_value: tuple[Tensor, Tensor | None]
    out: tuple[Tensor, Tensor | None]
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]

    @classmethod
    def of(cls, layer: Any, order: Tensor, scale: Tensor) -> "Layer":
        attention, mlp = layer.self_attn, layer.mlp
        first, second = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        weight, bias = _join([attention.q_proj, attention.k_proj, attention.v_proj], first, scale.dtype)
        return cls(
            (weight[:, order] * scale, None if bias is None else bias[order] * scale),
            _join([attention.o_proj], None, scale.dtype),
            _join([mlp.gate_proj, mlp.up_proj], second, scale.dtype),
            _join([mlp.down_proj], None, scale.dtype),
        )


def _join(parts: list[nn.Linear], norm: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([p.weight for p in parts]).to(dtype).T
    bias = None if parts[0].bias is None else torch.cat([p.bias for p in parts]).to(dtype)
    return (weight if norm is None else weight * norm[:, None].to(dtype)).contiguous(), bias


def _times(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _add_product(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + y · weight + bias"""
    return torch.addmm(x if bias is None else x + bias, y, weight)


class Places(NamedTuple):
    """Where the answers stand in a batch of R rows, of which every `R / blocks` answer the same prompt."""

    answer: Tensor
    """(R,) number of the answer at each place; a block that is not full repeats one."""
    place: Tensor
    """(answers,) the place of each answer"""
    prompt: Tensor
    """(blocks,) number of the prompt"""

    @classmethod
    def of(cls, prompts: list[int]) -> "Places":
        """Places for answers to these prompts, in the largest blocks that repeat at most `SPARE` of the answers."""
        counts, most = Counter(prompts), (1 + SPARE) * len(prompts)
        size = next(n for n in SIZES if n * sum(-(-count // n) for count in counts.values()) <= most)
        answers, blocks, first = list[int](), list[int](), dict[int, int]()
        left = sorted(range(len(prompts)), key=prompts.__getitem__)
        for prompt, count in sorted(counts.items()):
            own, left = left[:count], left[count:]
            answers += own + own[:1] * (-count % size)
            blocks += [prompt] * -(-count // size)
        for place, answer in enumerate(answers):
            first.setdefault(answer, place)
        return cls(*map(torch.tensor, (answers, [first[i] for i in range(len(prompts))], blocks)))


class CpuDecoder:
    """Samples answers to prompts given as token ids. Weights may be updated between calls."""

    def __init__(self, model: Any, draw: Draw, *, ends: Iterable[int], pad: int) -> None:
        self.model, self.draw, self.pad = model, draw, pad
        self.ends = torch.tensor(sorted(ends))
        config = model.config
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.act, self.eps = model.model.layers[0].mlp.act_fn, config.rms_norm_eps
        self.dtype = torch.promote_types(model.dtype, torch.float32)
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
        if not prompts:
            return [], *torch.zeros(2, 0, max_new_tokens)
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
        embedding, output = inner.embed_tokens.weight.to(self.dtype), self.model.lm_head.weight.to(self.dtype)
        output = (output * inner.norm.weight.to(self.dtype)).T.contiguous()
        cosine, sine = inner.rotary_emb(embedding, torch.arange(width + max_new_tokens)[None])
        turns = torch.complex(cosine[0, :, : self.head // 2], sine[0, :, : self.head // 2])[:, None]
        distinct = {ids: i for i, ids in enumerate(dict.fromkeys(map(tuple, prompts)))}
        which = torch.tensor([distinct[tuple(ids)] for ids in prompts])
        logits, texts = self._prefill(list(distinct), width)
        logits, position = logits[which], torch.tensor([len(ids) for ids in prompts])
        places = Places.of(which.tolist())
        shared = [[x[places.prompt] for x in text] for text in texts]
        cache = self._cache(len(layers), len(places.answer), max_new_tokens)
        self._queries = torch.zeros(len(places.answer), self.heads, cache.shape[-1], dtype=self.dtype)
        tokens = torch.zeros(max_new_tokens, count, dtype=torch.long)
        logp, entropy = torch.zeros(2, *tokens.shape)
        row = torch.arange(count)  # the prompt of each answer that is still in the batch
        ended = torch.zeros(count, dtype=torch.bool)
        for n in range(max_new_tokens):
            token, new_logp, new_entropy = self.draw.scored(logits)
            for buffer, new in ((tokens, token), (logp, new_logp), (entropy, new_entropy)):
                buffer[n].index_copy_(0, row, new.to(buffer.dtype))
            ended |= torch.isin(token, self.ends)
            if n + 1 == max_new_tokens or bool(ended.all()):
                break
            if n % LOOK == 0 and int(ended.sum()) > WORTHWHILE * len(ended):
                left = (~ended).nonzero()[:, 0]
                row, token, ended, position = (x[left] for x in (row, token, ended, position))
                before, places = places.place[left], Places.of(which[row].tolist())
                for part in cache.flatten(0, 1):
                    part[: len(places.answer), :n] = part[:, :n].index_select(0, before[places.answer])
                cache = cache[:, :, : len(places.answer)]
                shared = [[x[places.prompt] for x in text] for text in texts]
            x, turn = embedding[token[places.answer]], turns[position[places.answer]]
            for layer, prompt, answer in zip(layers, shared, cache, strict=True):
                x = self._layer(x, layer, prompt, answer, turn, n)
            x = F.rms_norm(x.index_select(0, places.place), x.shape[-1:], eps=self.eps)
            logits, position = torch.mm(x, output), position + 1
        return tokens.T, logp.T, entropy.T

    def _layer(self, x: Tensor, layer: Layer, prompt: list[Tensor], cache: Tensor, turn: Tensor, slot: int) -> Tensor:
        """One layer's output (R, D) for one token per row, whose keys and values go to `slot` of the cache.

        `prompt`: keys (blocks, W, width), values (blocks, width, W) with W = key heads · head, and a bias
        (blocks, 1, width), −∞ on padding.
        """
        rows, heads, key_heads, queries = len(x), self.heads, self.key_heads, self._queries[: len(x)]
        prompt_keys, prompt_values, padding = prompt
        blocks, width = len(padding), padding.shape[-1]
        states = _times(F.rms_norm(x, x.shape[-1:], eps=self.eps), *layer.query_key_value).view(rows, -1, self.head)
        pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)))
        _turn(pairs[:, :heads].unflatten(1, (key_heads, -1)), turn[:, None], self._own_columns(queries))
        _turn(pairs[:, heads : heads + key_heads], turn, cache[0, :, slot].view(rows, key_heads, -1))
        cache[1, :, slot] = states[:, heads + key_heads :].flatten(1)
        keys, values = cache[:, :, : slot + 1]
        to_prompt = torch.bmm(queries.view(blocks, -1, queries.shape[-1]), prompt_keys).add_(padding)
        share = torch.cat((to_prompt.view(rows, heads, width), torch.bmm(queries, keys.mT)), -1).softmax(-1)
        mixed = torch.bmm(share[..., width:], values)
        of_block = share.view(blocks, -1, share.shape[-1])[..., :width]
        mixed.view(blocks, -1, mixed.shape[-1]).baddbmm_(of_block, prompt_values)
        x = _add_product(x, self._own_columns(mixed).reshape(rows, -1), *layer.out)
        gate, up = _times(F.rms_norm(x, x.shape[-1:], eps=self.eps), *layer.gate_up).chunk(2, -1)
        return _add_product(x, self.act(gate).mul_(up), *layer.down)

    def _own_columns(self, x: Tensor) -> Tensor:
        """(R, heads, W) -> (R, key heads, queries of a key head, head): the columns of each query's key head."""
        by_head = x.view(len(x), self.key_heads, -1, self.key_heads, self.head)
        return by_head.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

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


def _turn(pairs: Tensor, turn: Tensor, out: Tensor) -> None:
    """Complex `pairs` times `turn`, written to the real `out`."""
    torch.mul(pairs, turn, out=torch.view_as_complex(out.unflatten(-1, (-1, 2))))
