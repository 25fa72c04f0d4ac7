"""Queue and prefill of prompts: which one is next, its keys and values, and the first token of each answer."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from dew.decoding.buffers import Buffers, replaced

PREFILL = 65_536
"""Maximum tokens of a prefill pass, with padding."""
Prompt = tuple[int, tuple[int, ...]]
"""Owner and token ids."""


class Queue:
    """Prompts that are still waiting. A row that has ended continues with the next prompt of its owner."""

    def __init__(self, owners: Sequence[int]) -> None:
        self._owners, by_owner = owners, dict[int, list[int]]()
        for i, owner in enumerate(owners):
            by_owner.setdefault(owner, []).append(i)
        self._left, self.waiting = {owner: deque(numbers) for owner, numbers in by_owner.items()}, len(owners)

    def first(self, rows: int) -> list[int]:
        """Take the first prompts, equally many of each owner."""
        each = max(1, rows // len(self._left))
        return [self._take(left) for left in self._left.values() for _ in range(min(each, len(left)))]

    def next(self, place: Sequence[int], rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Take the next prompts for these rows; return them and the rows that got one."""
        found = [(self._take(left), row) for row in rows if (left := self._left[self._owners[place[row]]])]
        return [number for number, _ in found], [row for _, row in found]

    def upcoming(self) -> Iterator[int]:
        """The waiting prompts in the order in which they will start if the rows of all owners end equally fast."""
        return (i for turn in zip_longest(*self._left.values()) for i in turn if i is not None)

    def _take(self, left: "deque[int]") -> int:
        self.waiting -= 1
        return left.popleft()


class Pass(NamedTuple):
    """The result of a prefill pass over B left-padded prompts."""

    cache: Any
    live: Tensor
    """(B, width): 1 on tokens, 0 on padding."""
    logits: Tensor
    """(B, V): logits of the token after each prompt."""


class Prefill:
    """Computes keys, values and last logits of prompts. Each distinct prompt is read once, in one pass with the prompts
    that come next, and its pass is kept until all its answers have been started."""

    def __init__(
        self, decoder: Any, prompts: Sequence[tuple[int, ...]], owners: Sequence[int], queue: Queue,
        uniforms: Tensor | None,
    ) -> None:  # fmt: skip
        self._decoder, self._uniforms, self._queue = decoder, uniforms, queue
        self._prompts: list[Prompt] = list(zip(owners, prompts, strict=True))
        self._size = max(1, PREFILL // max(map(len, prompts)))
        """Maximum prompts of a pass."""
        self._owners = torch.tensor(owners, device=decoder.device)
        self._left = Counter(self._prompts)
        """Number of answers to each prompt that have not been started."""
        self.distinct = len(self._left)
        self._read = dict[Prompt, tuple[Pass, int]]()
        """Pass of each prompt that has been read and has answers left to start, and the prompt's row in it."""
        self.room, self._free, self._loaded, self._answered = 0, list[int](), dict[Prompt, int](), Counter[Prompt]()
        """Number of prompt slots in the buffers, the free slots, the slot of each prompt, the rows answering each."""

    def make_room(self, rows: int) -> int:
        """Reserve slots for the prompts that `rows` rows can answer at a time; return their number."""
        self.room = min(rows, self.distinct)
        self._free = list(range(self.room))
        return self.room

    def arrange(self, place: Sequence[int], rows: int) -> None:
        """Pass the owners of the rows to `Decoder.arrange`; unused rows count as the last owner's."""
        if self._decoder.arrange:
            unused = self._owners[-1:].expand(rows - len(place))
            self._decoder.arrange(torch.cat([self._owners[list(place)], unused]), 1)

    def release(self, numbers: Sequence[int]) -> None:
        """Count one ended answer to each of these prompts; free the slot of a prompt that no row answers any more."""
        for text in (self._prompts[i] for i in numbers):
            self._answered[text] -= 1
            if not self._answered[text]:
                self._free.append(self._loaded.pop(text))

    def load(self, place: Sequence[int], rows: Sequence[int], buffers: Buffers) -> None:
        """Load the prompts that these rows are to answer (`place`), and sample the first token of each answer."""
        decoder, numbers = self._decoder, [place[i] for i in rows]
        texts = [self._prompts[i] for i in numbers]
        distinct = list(dict.fromkeys(texts))
        new = [text for text in distinct if text not in self._loaded]
        self._read_prompts([text for text in distinct if text not in self._read])
        self._answered.update(texts)
        self._loaded |= {text: self._free.pop() for text in new}
        page = {text: buffers.prompt_page(self._loaded[text]) for text in distinct}
        prompt, row = (torch.tensor(x, device=decoder.device) for x in (numbers, rows))
        buffers.load_uniforms(row, None if self._uniforms is None else self._uniforms[prompt])
        table = [(page[text], len(text[1])) for text in texts]
        buffers.table[row, :2] = torch.tensor(table, dtype=torch.int32, device=decoder.device)
        order, logits = list[int](), list[Tensor]()
        for some in {id(done): done for done, _ in map(self._read.__getitem__, distinct)}.values():
            at = {text: i for text in distinct for done, i in [self._read[text]] if done is some}
            if here := [(at[text], page[text]) for text in new if text in at]:
                buffers.load_prompts(some.cache, some.live, *torch.tensor(here, device=decoder.device).T)
            answers = [i for i, text in enumerate(texts) if text in at]
            order += answers
            logits.append(some.logits[[at[texts[i]] for i in answers]])
        chosen = row[order]
        drawn = decoder.draw.scored(torch.cat(logits), buffers.uniforms[chosen, 0])
        buffers.load_tokens(chosen, drawn, decoder.is_end(drawn[0]))
        self._left.subtract(texts)
        for text in distinct:
            if not self._left[text]:
                del self._read[text]
        self.arrange(place, len(buffers))

    def _read_prompts(self, needed: Sequence[Prompt]) -> None:
        """Read these prompts, and as many of the upcoming ones as fill the last pass."""
        chosen, total = dict.fromkeys(needed), -(-len(needed) // self._size) * self._size
        for number in self._queue.upcoming() if needed else ():
            if len(chosen) == total:
                break
            if (text := self._prompts[number]) not in self._read:
                chosen[text] = None
        texts = sorted(chosen, key=lambda x: len(x[1]))  # little padding
        for start in range(0, len(texts), self._size):
            some = sorted(texts[start : start + self._size], key=lambda x: x[0])
            done = self._pass(some)
            self._read |= {text: (done, i) for i, text in enumerate(some)}

    def _pass(self, chosen: Sequence[Prompt]) -> Pass:
        model, pad, device = self._decoder.model, self._decoder.pad, self._decoder.device
        texts = [text for _, text in chosen]
        width = max(map(len, texts))
        if self._decoder.arrange:
            self._decoder.arrange(torch.tensor([owner for owner, _ in chosen], device=device), width)
        ids = torch.tensor([[pad] * (width - len(t)) + list(t) for t in texts], device=device)
        live = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts], device=device)
        cache, positions = DynamicCache(config=model.config), (live.cumsum(1) - 1).clamp_min(0)
        inputs = {"input_ids": ids, "attention_mask": live, "position_ids": positions, "past_key_values": cache}
        with replaced(self._decoder.prefill_parts):
            return Pass(cache, live, self._decoder.logits(**inputs))
