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
"""Answers in a block: the first of these that fills up at most `SPARE` of the batch with copies."""
SPARE = 0.1
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


class Places(NamedTuple):
    """Where the L answers stand in a batch of R rows, in blocks of `size` answers to the same prompt."""

    answer: Tensor
    """(R,) number of the answer at each place; a block that is not full repeats its first one."""
    place: Tensor
    """(L,) the inverse"""
    prompt: Tensor
    """(R / size,) the prompt of each block"""
    size: int

    @classmethod
    def of(cls, prompts: list[int]) -> "Places":
        """Of the prompt of each answer."""
        counts = Counter(prompts)
        filled = {size: sum(-(-n // size) * size for n in counts.values()) for size in SIZES}
        size = next(size for size in SIZES if filled[size] <= (1 + SPARE) * len(prompts))
        members: dict[int, list[int]] = {prompt: [] for prompt in counts}
        for answer, prompt in enumerate(prompts):
            members[prompt].append(answer)
        answers, place, blocks = list[int](), [0] * len(prompts), list[int]()
        for prompt, own in members.items():
            for nth, answer in enumerate(own):
                place[answer] = len(answers) + nth
            answers += own + own[:1] * (-len(own) % size)
            blocks += [prompt] * -(-len(own) // size)
        return cls(torch.tensor(answers), torch.tensor(place), torch.tensor(blocks), size)


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

    def scored(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
        """The answers with each token's log-probability and entropy (nats), at the temperature, before any filter."""
        if not prompts:
            return [], [], []
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                found = self._run(prompts, max_new_tokens)
        finally:
            self.model.train(training)
        ended = torch.isin(found[0], self.ends)
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, max_new_tokens).tolist()
        tokens, logp, entropy = ([row[:n] for row, n in zip(x.tolist(), lengths, strict=True)] for x in found)
        return tokens, logp, entropy

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
        logits, texts, live = self._prefill(list(distinct), width)
        hidden = torch.zeros(live.shape, dtype=self.dtype).masked_fill_(live == 0, -torch.inf)
        logits, position = logits[which], live.sum(1)[which]

        places = Places.of(which.tolist())
        shared, bias = [self._shared(text, places) for text in texts], hidden[places.prompt][:, None]
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
                old, places = places.place[left], Places.of(which[row[left]].tolist())
                row, token, ended, position = (x[left] for x in (row, token, ended, position))
                for part in cache.flatten(0, 1):
                    part[: len(places.answer), :n] = part[:, :n].index_select(0, old[places.answer])
                cache = cache[:, :, : len(places.answer)]
                shared, bias = [self._shared(text, places) for text in texts], hidden[places.prompt][:, None]
            x, turn = embedding[token[places.answer]], turns[position[places.answer]]
            for layer, prompt, answer in zip(layers, shared, cache, strict=True):
                x = self._layer(x, layer, prompt, bias, answer, turn, n)
            x = F.rms_norm(x.index_select(0, places.place), x.shape[-1:], eps=self.eps)
            logits, position = torch.mm(x, output), position + 1
        return tokens.T, logp.T, entropy.T

    def _layer(
        self, x: Tensor, layer: Layer, prompt: tuple[Tensor, Tensor], bias: Tensor, cache: Tensor, turn: Tensor, n: int
    ) -> Tensor:
        """One layer's output (R, D) for one token per row, whose keys and values go to slot `n` of the cache.

        `prompt`: transposed keys (blocks, W, width) and values (blocks, width, W) with W = key heads · head; `bias`: −∞
        on their padding (blocks, 1, width).
        """
        rows, heads, key_heads = len(x), self.heads, self.key_heads
        states = _times(F.rms_norm(x, x.shape[-1:], eps=self.eps), *layer.query_key_value).view(rows, -1, self.head)
        pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)))
        own_columns = self._queries[:rows].view(rows, key_heads, -1, key_heads, self.head).diagonal(dim1=1, dim2=3)
        _turn(pairs[:, :heads].unflatten(1, (key_heads, -1)), turn[..., None, :], own_columns.permute(0, 3, 1, 2))
        _turn(pairs[:, heads : heads + key_heads], turn, cache[0, :, n].view(rows, key_heads, -1))
        cache[1, :, n] = states[:, heads + key_heads :].flatten(1)
        queries, (keys, values), (prompt_keys, prompt_values) = self._queries[:rows], cache[:, :, : n + 1], prompt
        to_prompt = torch.bmm(queries.view(len(bias), -1, queries.shape[-1]), prompt_keys).add_(bias)
        scores = (to_prompt.view(rows, heads, -1), torch.bmm(queries, keys.mT))
        share = torch.cat(scores, -1).softmax(-1)
        mixed = torch.bmm(share[..., bias.shape[-1] :], values)
        from_prompt = share.view(*to_prompt.shape[:2], -1)[..., : bias.shape[-1]]
        mixed.view(*to_prompt.shape[:2], -1).baddbmm_(from_prompt, prompt_values)
        own = mixed.view(rows, key_heads, -1, key_heads, self.head).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        x = torch.addmm(x, own.reshape(rows, -1), layer.out[0])
        gate, up = _times(F.rms_norm(x, x.shape[-1:], eps=self.eps), *layer.gate_up).chunk(2, -1)
        return x.addmm_(self.act(gate).mul_(up), layer.down[0])

    def _cache(self, layers: int, rows: int, slots: int) -> Tensor:
        """(layers, 2, R, slots, W) for keys and values of the answers, reused by later calls."""
        shape = layers, 2, rows, slots, self.key_heads * self.head
        size = torch.Size(shape).numel()
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=self.dtype)
        return self._buffer[:size].view(shape)

    def _shared(self, text: tuple[Tensor, Tensor], places: Places) -> tuple[Tensor, Tensor]:
        keys, values = (x[places.prompt] for x in text)
        return keys, values

    def _prefill(self, prompts: list[tuple[int, ...]], width: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
        """Distinct prompts, left-padded, through the model itself.

        Returns the first logits (P, V), each layer's keys and values (P, key heads, width, head), and the live
        positions (P, width).
        """
        ids = torch.tensor([[self.pad] * (width - len(t)) + list(t) for t in prompts])
        live = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in prompts])
        filled = DynamicCache(config=self.model.config)
        inputs = {"input_ids": ids, "attention_mask": live, "position_ids": (live.cumsum(1) - 1).clamp_min(0)}
        logits = self.model(**inputs, past_key_values=filled, use_cache=True, logits_to_keep=1).logits[:, -1]
        texts = []
        for layer in filled.layers:
            keys, values = (x.to(self.dtype) for x in (layer.keys, layer.values))
            keys = keys.unflatten(-1, (2, -1)).mT.flatten(-2)  # the order of a head's components as in `Layer`
            texts.append((keys.mT.flatten(1, 2), values.transpose(1, 2).flatten(2)))
        return logits.to(self.dtype), texts, live


def _turn(pairs: Tensor, turn: Tensor, out: Tensor) -> None:
    """Complex `pairs` times `turn`, written to the real `out`."""
    torch.mul(pairs, turn, out=torch.view_as_complex(out.unflatten(-1, (-1, 2))))
