"""Sampling from a small Llama or Qwen2 on a CPU, with the interface of `Decoder`.

`generate` spends most of a small model's step in Python: masks, cache objects, checks of its arguments. Here a step
reads the weights directly and writes into buffers that are allocated once; answers that have ended are removed from
the batch. The prompts go through the model itself, each distinct prompt once.
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
BLOCK = 16
"""Answers that read the keys and values of their common prompt in one product."""
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
    """The weights of one layer as `(weight, bias)`, with matrices that read the same input joined.

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
            (weight[order] * scale[:, None], None if bias is None else bias[order] * scale),
            _join([attention.o_proj], None, scale.dtype),
            _join([mlp.gate_proj, mlp.up_proj], second, scale.dtype),
            _join([mlp.down_proj], None, scale.dtype),
        )


def _join(parts: list[nn.Linear], norm: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([p.weight for p in parts]).to(dtype)
    bias = None if parts[0].bias is None else torch.cat([p.bias for p in parts]).to(dtype)
    return (weight if norm is None else weight * norm.to(dtype)), bias


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
        output = output * inner.norm.weight.to(self.dtype)
        cosine, sine = inner.rotary_emb(embedding, torch.arange(width + max_new_tokens)[None])
        turns = torch.complex(cosine[0, :, : self.head // 2], sine[0, :, : self.head // 2])[:, None]
        logits, shared, bias, place, position = self._prefill(prompts, width)
        cache = self._cache(len(layers), count, max_new_tokens)
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
                for part in cache.flatten(0, 1):
                    part[: len(left), :, :n] = part[:, :, :n].index_select(0, left)
                cache = cache[:, :, : len(left)]
                row, token, ended, bias, place, position = (x[left] for x in (row, token, ended, bias, place, position))
            x, turn = embedding[token], turns[position]
            for layer, prompt, answer in zip(layers, shared, cache, strict=True):
                x = self._layer(x, layer, prompt, place, bias, answer, turn, n)
            logits = F.linear(F.rms_norm(x, x.shape[-1:], eps=self.eps), output)
            position = position + 1
        return tokens.T, logp.T, entropy.T

    def _layer(
        self,
        x: Tensor,
        layer: Layer,
        prompt: "Prompts",
        place: Tensor,
        bias: Tensor,
        cache: Tensor,
        turn: Tensor,
        slot: int,
    ) -> Tensor:
        """One layer's output (B, D) for one token per row, whose keys and values go to `slot` of the cache."""
        rows, heads, key_heads = len(x), self.heads, self.key_heads
        states = F.linear(F.rms_norm(x, x.shape[-1:], eps=self.eps), *layer.query_key_value).view(rows, -1, self.head)
        pairs = torch.view_as_complex(states[:, : heads + key_heads].unflatten(-1, (-1, 2)))
        rotated = torch.view_as_real(pairs * turn).flatten(-2)
        cache[0, :, :, slot], cache[1, :, :, slot] = rotated[:, heads:], states[:, heads + key_heads :]
        keys, values = (c.flatten(0, 1)[:, : slot + 1] for c in cache)
        # Query heads that share a key head are rows of one matrix.
        query = rotated[:, :heads].reshape(rows * key_heads, heads // key_heads, self.head)
        to_answer = torch.bmm(query, keys.mT).view(rows, key_heads, -1, slot + 1)
        to_prompt = prompt.times(query.view(rows, key_heads, -1, self.head), prompt.keys.mT, place).add_(bias)
        share = torch.cat((to_prompt, to_answer), -1).softmax(-1)
        from_prompt, from_answer = share.split([to_prompt.shape[-1], slot + 1], -1)
        mixed = torch.bmm(from_answer.flatten(0, 1), values).view(rows, key_heads, -1, self.head)
        mixed += prompt.times(from_prompt, prompt.values, place)
        x = x + F.linear(mixed.view(rows, -1), *layer.out)
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], eps=self.eps), *layer.gate_up).chunk(2, -1)
        return x + F.linear(self.act(gate) * up, *layer.down)

    def _cache(self, layers: int, rows: int, slots: int) -> Tensor:
        """(layers, 2, B, key heads, slots, head) for keys and values of the answers, reused by later calls."""
        shape = layers, 2, rows, self.key_heads, slots, self.head
        size = torch.Size(shape).numel()
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=self.dtype)
        return self._buffer[:size].view(shape)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], width: int
    ) -> tuple[Tensor, list["Prompts"], Tensor, Tensor, Tensor]:
        """Every distinct prompt once, left-padded, through the model itself.

        Returns the first logits (B, V), each layer's `Prompts`, their bias (B, 1, 1, width) with −∞ on padding, and
        each answer's place in `Prompts` and position in the text (B,).
        """
        answered: Counter[tuple[int, ...]] = Counter()
        blocks: dict[tuple[tuple[int, ...], int], int] = {}
        place = []
        for ids in map(tuple, prompts):
            block = blocks.setdefault((ids, answered[ids] // BLOCK), len(blocks))
            place.append((block, answered[ids] % BLOCK))
            answered[ids] += 1
        size = min(BLOCK, max(answered.values()))
        texts = torch.tensor([[self.pad] * (width - len(t)) + list(t) for t in answered])
        live = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in answered])
        filled = DynamicCache(config=self.model.config)
        inputs = {"input_ids": texts, "attention_mask": live, "position_ids": (live.cumsum(1) - 1).clamp_min(0)}
        logits = self.model(**inputs, past_key_values=filled, use_cache=True, logits_to_keep=1).logits[:, -1]
        distinct = {ids: i for i, ids in enumerate(answered)}
        of_block = torch.tensor([distinct[ids] for ids, _ in blocks])
        shared = []
        for layer in filled.layers:
            keys, values = (x.to(self.dtype)[of_block].flatten(0, 1) for x in (layer.keys, layer.values))
            keys = keys.unflatten(-1, (2, -1)).mT.flatten(-2)
            shared.append(Prompts(keys, values, len(blocks), size))
        which = torch.tensor([distinct[tuple(ids)] for ids in prompts])
        bias = torch.zeros(live.shape, dtype=self.dtype).masked_fill_(live == 0, -torch.inf)[which][:, None, None]
        places = torch.tensor([block * size + nth for block, nth in place])
        return logits.to(self.dtype)[which], shared, bias, places, live.sum(1)[which]


class Prompts(NamedTuple):
    """One layer's keys and values of the prompts. Up to `size` answers to a prompt form a block and read them together.

    A place is `size · block + number in the block`.
    """

    keys: Tensor
    """(blocks · key heads, width, head)"""
    values: Tensor
    blocks: int
    size: int

    def times(self, x: Tensor, matrices: Tensor, place: Tensor) -> Tensor:
        """x (B, key heads, queries, n) times the matrix (n, m) of its prompt and key head."""
        _, key_heads, queries, n = x.shape
        placed = x.new_zeros(self.blocks * self.size, key_heads, queries, n).index_copy_(0, place, x)
        stacked = placed.unflatten(0, (-1, self.size)).transpose(1, 2).reshape(len(matrices), self.size * queries, n)
        product = torch.bmm(stacked, matrices).view(self.blocks, key_heads, self.size, queries, -1)
        return product.transpose(1, 2).flatten(0, 1).index_select(0, place)
