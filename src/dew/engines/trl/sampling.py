"""Dynamic sampling (DAPO): groups without signal make room for further prompts, until the batch is full.

Whether a group has signal is judged by raw correctness. A shaped or summed reward always varies, and a filter on it
keeps noise. Every process sees the same verdicts, so all take the same number of rounds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dew.engines.trl.scoring import gather_rows, own_rows

Columns = dict[str, Any]
"""One entry per completion: tensors with N rows, or lists of N values."""


class PromptStream:
    """The training prompts in one shuffled order after another. Its position is all that a checkpoint must keep."""

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self.position = 0
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._epoch, self._order = -1, list[int]()

    def take(self, count: int) -> list[int]:
        places = [divmod(i, self._size) for i in range(self.position, self.position + count)]
        self.position += count
        return [self._pass(epoch)[place] for epoch, place in places]

    def _pass(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            shuffled = torch.randperm(self._size, generator=generator).tolist()
            self._epoch, self._order = epoch, shuffled if self._shuffle else list(range(self._size))
        return self._order


@dataclass
class Sampled:
    """What one or more rounds of sampling gave."""

    local: Columns
    """This process's rows, as TRL returned them."""
    shared: Columns
    """The rows of all processes, with what credit needs to know about them."""
    answers: list[Columns] = field(default_factory=list)
    """Verdicts and lengths of every answer of every round, dropped or not."""
    groups: dict[str, int] = field(default_factory=dict)
    """How many groups were sampled, kept, dropped, refilled, and in how many rounds."""


@dataclass
class _Pool:
    """Groups with signal so far, and as many without as may be needed to fill up."""

    quota: int
    most: int
    """Prompts that a round may take."""
    kept: list[Columns] = field(default_factory=list)
    spare: list[Columns] = field(default_factory=list)
    sampled: int = 0
    mixed: int = 0

    @property
    def missing(self) -> int:
        return self.quota - len(self.kept)

    def next_round(self, step: int) -> int:
        """Prompts to sample next: first as many as may be, then the missing ones over the share kept so far."""
        wanted = self.most
        if self.mixed:
            wanted = min(self.most, math.ceil(self.missing * self.sampled / self.mixed))
        return math.ceil(wanted / step) * step

    def add(self, groups: list[Columns], signal: list[bool]) -> None:
        self.sampled += len(groups)
        self.mixed += sum(signal)
        for group, mixed in zip(groups, signal, strict=True):
            if mixed and self.missing:
                self.kept.append(group)
            elif len(self.spare) < self.quota:
                self.spare.append(group)


def fill_batch(
    sample: Callable[[list[int]], Sampled],
    judge: Callable[[Columns], Tensor],
    stream: PromptStream,
    accelerator: Any,
    *,
    quota: int,
    size: int,
    max_rounds: int,
    oversample: float = 1.0,
    fills: dict[str, float],
) -> Sampled:
    """Sample rounds of up to `oversample · quota` prompts until `quota` groups of `size` have signal or `max_rounds`
    are over.

    Groups still missing are filled with masked ones: they keep the shapes and train nothing.
    """
    pool = _Pool(quota, most=math.ceil(oversample * quota))
    answers: list[Columns] = []
    first_round, rounds, keys = 0, 0, list[str]()
    # A round's rows must divide evenly among the processes.
    step = accelerator.num_processes // math.gcd(accelerator.num_processes, size)
    while pool.missing and rounds < max_rounds:
        sampled = sample(stream.take(pool.next_round(step)))
        rounds += 1
        answers += sampled.answers
        keys = list(sampled.local)
        everything = {**gather_columns(accelerator, sampled.local, fills), **sampled.shared}
        signal = judge(sampled.shared)[::size].tolist()
        indices = [list(range(g * size, (g + 1) * size)) for g in range(len(signal))]
        pool.add([take(everything, index) for index in indices], signal)
        first_round = first_round or len(pool.kept)
    short = pool.missing
    batch = join(pool.kept + [_masked(group) for group in pool.spare[:short]], fills)
    batch["group"] = torch.arange(quota, device=batch["group"].device).repeat_interleave(size)
    kept = quota - short
    return Sampled(
        local={key: own_rows(accelerator, batch[key]) if _by_row(batch[key]) else batch[key] for key in keys},
        shared=batch,
        answers=answers,
        groups={
            "sampled": pool.sampled,
            "kept": kept,
            "dropped": pool.sampled - kept,
            "refilled": kept - min(first_round, kept) if rounds > 1 else 0,
            "rounds": rounds,
            "short": short,
            "mixed": pool.mixed,
        },
    )


def _masked(group: Columns) -> Columns:
    return {
        **group,
        "completion_mask": torch.zeros_like(group["completion_mask"]),
        "mask": torch.zeros_like(group["mask"]),
        "filler": torch.ones_like(group["filler"]),
    }


LEFT = ("prompt_ids", "prompt_mask")
"""Prompts are padded on the left, so that they end where completions begin."""


def _by_row(x: Any) -> bool:
    return not (isinstance(x, Tensor) and x.ndim == 0)


def gather_columns(accelerator: Any, columns: Columns, fills: dict[str, float]) -> Columns:
    """The rows of all processes."""
    return {
        key: gather_rows(accelerator, x, fills.get(key, 0), left=key in LEFT) if _by_row(x) else x
        for key, x in columns.items()
    }


def take(columns: Columns, index: list[int]) -> Columns:
    """Some of the rows."""
    return {
        key: x if not _by_row(x) else x[index] if isinstance(x, Tensor) else [x[i] for i in index]
        for key, x in columns.items()
    }


def join(parts: list[Columns], fills: dict[str, float]) -> Columns:
    """The rows of all parts, padded to the longest."""
    joined: Columns = {}
    for key, x in parts[0].items():
        values = [part[key] for part in parts]
        if not _by_row(x):
            joined[key] = x
        elif isinstance(x, Tensor):
            joined[key] = torch.cat(_same_width(values, fills.get(key, 0), left=key in LEFT))
        else:
            joined[key] = [value for part in values for value in part]
    return joined


def _same_width(values: list[Tensor], fill: float, left: bool) -> list[Tensor]:
    if values[0].ndim < 2:
        return values
    width = max(x.shape[1] for x in values)
    return [
        torch.nn.functional.pad(x, (width - x.shape[1], 0) if left else (0, width - x.shape[1]), value=fill)
        for x in values
    ]
