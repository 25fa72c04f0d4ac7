"""Prompts on their way into a batch: which come next, and their keys, values and first tokens."""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dew.decoding.buffers import Buffers

PREFILL = 65_536
"""Tokens of a pass over prompts."""


class Queue:
    """The prompts that no row answers yet. A row that ends continues with the next prompt of its owner."""

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


class Prefill:
    """Keys, values and last logits of prompts: each distinct prompt once, many in one pass, in the order of use."""

    def __init__(
        self, decoder: Any, prompts: Sequence[tuple[int, ...]], owners: Sequence[int], order: Sequence[int],
        uniforms: Tensor | None,
    ) -> None:  # fmt: skip
        size = max(1, PREFILL // max(map(len, prompts)))
        self._decoder, self._uniforms, self._prompts = decoder, uniforms, list(zip(owners, prompts, strict=True))
        texts = list(dict.fromkeys(self._prompts[i] for i in order))
        self.distinct = len(texts)
        self._texts = [sorted(texts[i : i + size], key=lambda x: x[0]) for i in range(0, len(texts), size)]
        """Of each pass, with their owners."""
        self._place = {ids: (number, i) for number, some in enumerate(self._texts) for i, ids in enumerate(some)}
        self._owners = torch.tensor(owners, device=decoder.device)
        self._passes = dict[int, tuple[Any, Tensor, Tensor]]()
        self.room, self._free, self._loaded, self._answered = 0, list[int](), dict[Any, int](), Counter[Any]()
        """How many prompts the buffers hold, their free numbers, the numbers of prompts, how many rows answer each."""

    def make_room(self, rows: int) -> int:
        """How many prompts so many rows answer at most at a time."""
        self.room = min(rows, self.distinct)
        self._free = list(range(self.room))
        return self.room

    def arrange(self, place: Sequence[int], rows: int) -> None:
        """Tell whose rows these are; rows that are not in use count as the last owner's."""
        if self._decoder.arrange:
            unused = self._owners[-1:].expand(rows - len(place))
            self._decoder.arrange(torch.cat([self._owners[list(place)], unused]), 1)

    def release(self, numbers: Sequence[int]) -> None:
        """Answers to these prompts have ended."""
        for text in (self._prompts[i] for i in numbers):
            self._answered[text] -= 1
            if not self._answered[text]:
                self._free.append(self._loaded.pop(text))

    def load(self, place: Sequence[int], rows: Sequence[int], buffers: Buffers) -> None:
        """Put the prompts that have a place in these rows there, and sample the first token of each answer."""
        decoder, numbers = self._decoder, [place[i] for i in rows]
        texts = [self._prompts[i] for i in numbers]
        new = [text for text in dict.fromkeys(texts) if text not in self._loaded]
        self._answered.update(texts)
        self._loaded |= {text: self._free.pop() for text in new}
        page = {text: buffers.prompt_page(self._loaded[text]) for text in dict.fromkeys(texts)}
        prompt, row = (torch.tensor(x, device=decoder.device) for x in (numbers, rows))
        buffers.load_uniforms(row, None if self._uniforms is None else self._uniforms[prompt])
        table = [(page[text], len(text[1])) for text in texts]
        buffers.table[row, :2] = torch.tensor(table, dtype=torch.int32, device=decoder.device)
        order, logits = list[int](), list[Tensor]()
        for number in sorted({self._place[text][0] for text in texts}):
            if number not in self._passes:
                self._passes = {n: x for n, x in self._passes.items() if n == number - 1} | {number: self._run(number)}
            cache, live, last = self._passes[number]
            if here := [(self._place[text][1], page[text]) for text in new if self._place[text][0] == number]:
                buffers.load_prompts(cache, live, *torch.tensor(here, device=decoder.device).T)
            answers = [i for i, text in enumerate(texts) if self._place[text][0] == number]
            order += answers
            logits.append(last[[self._place[texts[i]][1] for i in answers]])
        chosen = row[order]
        drawn = decoder.draw.scored(torch.cat(logits), buffers.uniforms[chosen, 0])
        buffers.load_tokens(chosen, drawn, decoder.is_end(drawn[0]))
        self.arrange(place, len(buffers))

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
