"""Sampling from a small Llama or Qwen2 on a CPU, with the interface of `Decoder`.

`generate` spends most of a small model's step in Python: masks, cache objects, checks of its arguments. Here a step
reads the weights directly and writes into buffers that are allocated once; answers that have ended are removed from
the batch. The prompts go through the model itself, each distinct prompt once.
"""

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
    def of(cls, layer: Any, head: int, dtype: torch.dtype) -> "Layer":
        attention, mlp = layer.self_attn, layer.mlp
        normed, normed_again = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        query, key = (_join([proj], normed, dtype) for proj in (attention.q_proj, attention.k_proj))
        query, key = ([None if x is None else _paired(x, head) for x in part] for part in (query, key))
        query = [None if x is None else x * head**-0.5 for x in query]
        joined = zip(query, key, _join([attention.v_proj], normed, dtype), strict=True)
        weight, bias = (None if parts[0] is None else torch.cat(parts) for parts in joined)
        return cls(
            (weight, bias),
            _join([attention.o_proj], None, dtype),
            _join([mlp.gate_proj, mlp.up_proj], normed_again, dtype),
            _join([mlp.down_proj], None, dtype),
        )


def _join(parts: list[nn.Linear], norm: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([p.weight for p in parts]).to(dtype)
    bias = None if parts[0].bias is None else torch.cat([p.bias for p in parts]).to(dtype)
    return (weight if norm is None else weight * norm.to(dtype)), bias


def _paired(x: Tensor, head: int) -> Tensor:
    """Rows of each head in the order 0, head/2, 1, head/2 + 1, ...: the pairs that are rotated."""
    return x.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)


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
        inner, width = self.model.model, max(map(len, prompts))
        layers = [Layer.of(layer, self.head, self.dtype) for layer in inner.layers]
        embedding, output = inner.embed_tokens.weight.to(self.dtype), self.model.lm_head.weight.to(self.dtype)
        output = output * inner.norm.weight.to(self.dtype)
        logits, cache, bias, position = self._prefill(prompts, width, width + max_new_tokens)
        cosine, sine = inner.rotary_emb(embedding, torch.arange(width + max_new_tokens)[None])
        turns = torch.complex(cosine[0, :, : self.head // 2], sine[0, :, : self.head // 2])[:, None]
        tokens = torch.zeros(max_new_tokens, len(prompts), dtype=torch.long)
        logp, entropy = torch.zeros(2, *tokens.shape)
        row = torch.arange(len(prompts))  # the prompt of each answer that is still in the batch
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        for n in range(max_new_tokens):
            token = self.draw(logits)
            new_logp, new_entropy = score(logits, token, self.draw.temperature)
            for buffer, new in ((tokens, token), (logp, new_logp), (entropy, new_entropy)):
                buffer[n].index_copy_(0, row, new)
            ended |= torch.isin(token, self.ends)
            if n + 1 == max_new_tokens or bool(ended.all()):
                break
            if n % LOOK == 0 and int(ended.sum()) > WORTHWHILE * len(ended):
                left = (~ended).nonzero()[:, 0]
                for part in cache.flatten(0, 1):
                    part[: len(left), :, : width + n] = part[:, :, : width + n].index_select(0, left)
                cache = cache[:, :, : len(left)]
                row, token, ended, bias, position = (x[left] for x in (row, token, ended, bias, position))
            x, turn, hidden = embedding[token], turns[position], bias.flatten(0, 1)[:, :, : width + n + 1]
            for layer, keys_values in zip(layers, cache, strict=True):
                x = self._layer(x, layer, keys_values, hidden, turn, width + n)
            logits = F.linear(F.rms_norm(x, x.shape[-1:], eps=self.eps), output)
            position = position + 1
        return tokens.T, logp.T, entropy.T

    def _layer(self, x: Tensor, layer: Layer, cache: Tensor, bias: Tensor, turn: Tensor, slot: int) -> Tensor:
        """One layer's output (B, D) for one token per row, whose keys and values go to `slot` of the cache."""
        rows = len(x)
        states = F.linear(F.rms_norm(x, x.shape[-1:], eps=self.eps), *layer.query_key_value).view(rows, -1, self.head)
        pairs = states[:, : -self.key_heads].unflatten(-1, (-1, 2))
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)
        cache[0, :, :, slot], cache[1, :, :, slot] = rotated[:, self.heads :], states[:, -self.key_heads :]
        # Query heads that share a key head are the rows of one matrix: (B · key heads, heads per key head, head).
        query = rotated[:, : self.heads].reshape(rows * self.key_heads, -1, self.head)
        keys, values = (c.flatten(0, 1)[:, : slot + 1] for c in cache)
        scores = torch.baddbmm(bias.expand(-1, query.shape[1], -1), query, keys.mT)
        x = x + F.linear(torch.bmm(scores.softmax(-1), values).view(rows, -1), *layer.out)
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], eps=self.eps), *layer.gate_up).chunk(2, -1)
        return x + F.linear(self.act(gate) * up, *layer.down)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], width: int, slots: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Every distinct prompt once, through the model itself.

        Returns the first logits (B, V), the cache (layers, 2, B, key heads, slots, head), a bias of −∞ for padding
        (B, key heads, 1, slots), and the position of the next token (B,).
        """
        distinct = {ids: i for i, ids in enumerate(dict.fromkeys(map(tuple, prompts)))}
        which = torch.tensor([distinct[tuple(ids)] for ids in prompts])
        ids = torch.tensor([[self.pad] * (width - len(t)) + list(t) for t in distinct])
        live = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in distinct])
        filled = DynamicCache(config=self.model.config)
        positions = (live.cumsum(1) - 1).clamp_min(0)
        inputs = {"input_ids": ids, "attention_mask": live, "position_ids": positions, "past_key_values": filled}
        logits = self.model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].to(self.dtype)
        shape = len(filled.layers), 2, len(prompts), self.key_heads, slots, self.head
        size = torch.Size(shape).numel()
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=self.dtype)
        cache = self._buffer[:size].view(shape)
        for ours, theirs in zip(cache, filled.layers, strict=True):
            ours[0, :, :, :width] = theirs.keys.unflatten(-1, (2, -1)).mT.flatten(-2)[which]
            ours[1, :, :, :width] = theirs.values[which]
        bias = torch.zeros(len(prompts), self.key_heads, 1, slots, dtype=self.dtype)
        bias[..., :width].masked_fill_(live[which][:, None, None] == 0, -torch.inf)
        return logits[which], cache, bias, live.sum(1)[which]


def score(logits: Tensor, token: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of the tokens (B,) and entropy of their distributions, in float32.

    H = − Σᵥ pᵥ · log pᵥ
    """
    logp = (logits.float() / temperature).log_softmax(-1)
    return logp.gather(-1, token[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
