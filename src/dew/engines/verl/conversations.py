"""Several rows of one conversation are one answer: they are laid end to end, and results are cut back into rows.

An agent loop may hand over an answer in several rows (a context that was condensed, a sub-agent). Each row carries
the outcome of the whole. Counted row by row, a long conversation would weigh more in its group's mean, and its tokens
would be compared with other conversations' beginnings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Conversations:
    """B rows of N answers. A row's stretch ends with its last live token."""

    answer: Tensor
    """(B,) which answer a row belongs to."""
    start: Tensor
    """(B,) where in the answer the row begins."""
    length: Tensor
    """(B,) the row's stretch."""
    last_row: Tensor
    """(N,) the row with which an answer ends: verl's rewards are read there."""

    @classmethod
    def of(cls, mask: Tensor, keys: Sequence[str] | None) -> "Conversations":
        """From "{uid}_{conversation}_{row}", in any order; without keys every row is an answer."""
        B, T = mask.shape
        length = torch.where(mask, torch.arange(1, T + 1, device=mask.device), 0).amax(-1) if T else mask.sum(-1)
        names = [key.rsplit("_", 2) for key in keys] if keys is not None else [[str(b), "", "0"] for b in range(B)]
        ids: dict[tuple[str, str], int] = {}
        answer = [ids.setdefault((uid, conversation), len(ids)) for uid, conversation, _ in names]
        lengths, start, end, last = length.tolist(), [0] * B, [0] * len(ids), [0] * len(ids)
        for b in sorted(range(B), key=lambda b: int(names[b][2])):
            i = answer[b]
            start[b], end[i], last[i] = end[i], end[i] + lengths[b], b
        return cls(*(torch.tensor(x, dtype=torch.long, device=mask.device) for x in (answer, start, lengths, last)))

    @property
    def single(self) -> bool:
        """Every row is an answer: nothing to join."""
        return len(self.last_row) == len(self.answer)

    def join(self, x: Tensor) -> Tensor:
        """(B, T) -> (N, T′)"""
        if self.single:
            return x
        here, column = self._places(x.shape[1])
        width = int((self.start + self.length).amax())
        out = x.new_zeros(len(self.last_row), width)
        out[self.answer[:, None].expand_as(here)[here], column[here]] = x[here]
        return out

    def cut(self, x: Tensor, width: int) -> Tensor:
        """(N, T′) -> (B, width), 0 beyond a row's stretch."""
        if self.single:
            return x
        here, column = self._places(width)
        out = x.new_zeros(here.shape)
        out[here] = x[self.answer[:, None].expand_as(here)[here], column[here]]
        return out

    def _places(self, width: int) -> tuple[Tensor, Tensor]:
        t = torch.arange(width, device=self.start.device)
        return t < self.length[:, None], self.start[:, None] + t
