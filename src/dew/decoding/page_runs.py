"""Allocate pages to answers: each has a run of neighbouring pages and moves to one twice as long when it is full.

Few answers reach a limit of 16k tokens, and with pages for the limit few rows would fit into memory. If no run is free,
the youngest answers wait: their keys and values are kept on the host until there is room.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dew.decoding.buffers import Buffers, pages_of

SHORTEST = 16
"""Maximum pages of an answer's first run. With a lower limit, the first run holds the whole answer."""


def run_sizes(limit: int) -> list[int]:
    """Sizes, in pages, of the runs of an answer of up to `limit` tokens, each twice the one before."""
    doublings = max(0, math.ceil(math.log2(pages_of(limit) / SHORTEST)))
    first = math.ceil(pages_of(limit) / 2**doublings)
    return [first * 2**i for i in range(doublings + 1)]


class Runs:
    """A buddy allocator of the pages from `first` on. Below, a size is an index into `run_sizes(limit)`."""

    def __init__(self, storage: Tensor, first: int, limit: int) -> None:
        self._storage, self._first, self._limit, self._sizes = storage, first, limit, run_sizes(limit)
        self._free: list[set[int]] = [set() for _ in self._sizes]
        at = first
        for free, size in zip(reversed(self._free), reversed(self._sizes), strict=True):
            while at + size <= storage.shape[2]:
                free.add(at)
                at += size
        self._clock, self._due = 0, math.inf
        """Steps so far, and the step at which the first run will be full."""
        self._born: dict[int, int] = {}
        """By row: the answer has clock − born tokens, including the one of the next step."""
        self._runs: dict[int, tuple[int, int]] = {}
        """By row: first page and size of its run."""
        self._fresh: list[int] = []
        """Rows that have no run yet."""
        self.waiting: dict[int, tuple[int, Tensor]] = {}
        """By waiting row: its number of tokens, and a copy of its pages on the host."""

    def begin(self, rows: Iterable[int]) -> None:
        self._fresh += rows
        self._born.update(dict.fromkeys(rows, self._clock - 1))

    def advance(self, steps: int, ended: Iterable[int]) -> None:
        """Count these steps, and free the runs of the answers that have ended."""
        self._clock += steps
        for row in ended:
            if self._born.pop(row, None) is not None:
                self._give(*self._runs.pop(row))

    def keep(self, rows: Sequence[int]) -> None:
        """Renumber: row `rows[i]` becomes row i, and other rows are dropped."""
        for name in ("_born", "_runs", "waiting"):
            old = getattr(self, name)
            setattr(self, name, {new: old[row] for new, row in enumerate(rows) if row in old})

    def grow(self, buffers: Buffers, steps: int) -> bool:
        """Make room for this many more steps, older answers first. Return whether any waiting answer continues."""
        rows, placed = self._fresh, dict[int, int]()
        if self._clock + steps > self._due:
            rows = [row for row in self._born if self._needed(row, steps) > self._size(row)]
        for row in sorted(rows, key=self._born.__getitem__):
            if row in self._born:
                self._move(row, self._needed(row, steps), buffers, placed)
        self._fresh, back = [], False
        for row in sorted(self.waiting, key=lambda row: -self.waiting[row][0]):
            written, saved = self.waiting[row]
            size = self._enough(written + steps - 1)
            if (start := self._take(size)) is None:
                break
            self._storage[:, :, start : start + saved.shape[2]] = saved.to(self._storage.device)
            buffers.token[row, 0] = buffers.made[0][row, written - 1]
            buffers.ended[row] = False
            self._runs[row], self._born[row], placed[row], back = (start, size), self._clock - written, start, True
            del self.waiting[row]
        if placed:
            which, first = torch.tensor(list(placed.items()), dtype=torch.int32, device=buffers.table.device).T
            buffers.table[which.long(), 2] = first
            page = self._storage.shape[4]
            full = (self._born[x] + 1 + page * self._sizes[i] for x, (_, i) in self._runs.items() if self._grows(i))
            self._due = min(full, default=math.inf)
        return back

    def _move(self, row: int, size: int, buffers: Buffers, placed: dict[int, int]) -> None:
        """Move a row to a run of this size. Until one is free, the youngest rows are put aside, in the end this one."""
        while (start := self._take(size)) is None:
            youngest = max(reversed(self._born), key=self._born.__getitem__)
            self._put_aside(youngest, buffers)
            if youngest == row:
                return
        if row in self._runs:
            old, number = self._runs[row]
            pages = self._used(row)
            self._storage[:, :, start : start + pages] = self._storage[:, :, old : old + pages]
            self._give(old, number)
        self._runs[row], placed[row] = (start, size), start

    def _put_aside(self, row: int, buffers: Buffers) -> None:
        start, size = self._runs.pop(row, (0, -1))
        saved = self._storage[:, :, start : start + self._used(row)].to("cpu", copy=True)
        self.waiting[row] = self._clock - self._born.pop(row), saved
        buffers.ended[row] = True
        if size >= 0:
            self._give(start, size)

    def _used(self, row: int) -> int:
        return pages_of(self._clock - self._born[row] - 1)

    def _needed(self, row: int, steps: int) -> int:
        """The size of run that the row needs for the next steps."""
        return self._enough(self._clock - self._born[row] + steps - 1)

    def _enough(self, tokens: int) -> int:
        return next(i for i, size in enumerate(self._sizes) if size >= pages_of(min(tokens, self._limit)))

    def _size(self, row: int) -> int:
        return self._runs[row][1] if row in self._runs else -1

    def _grows(self, size: int) -> bool:
        return size + 1 < len(self._sizes)

    def _take(self, size: int) -> int | None:
        if self._free[size]:
            return self._free[size].pop()
        if not self._grows(size) or (both := self._take(size + 1)) is None:
            return None
        self._free[size].add(both + self._sizes[size])
        return both

    def _give(self, start: int, size: int) -> None:
        pages = self._sizes[size]
        second = (start - self._first) // pages % 2
        other = start - pages if second else start + pages
        if self._grows(size) and other in self._free[size]:
            self._free[size].remove(other)
            self._give(min(start, other), size + 1)
        else:
            self._free[size].add(start)
