"""The numbers of a step, by the names of docs/metrics.md."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dew.engines.metrics import Numbers, answer_metrics, credit_metrics, entropy_sums

__all__ = ["Clock", "Numbers", "StepStatistics", "answer_metrics", "credit_metrics", "entropy_sums"]


class Clock:
    """Seconds per phase since the last `read`. On a GPU a phase ends when its work has ended."""

    def __init__(self) -> None:
        self._seconds: Numbers = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = _now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + _now() - begun

    def read(self) -> Numbers:
        seconds, self._seconds = self._seconds, {}
        return seconds

    def __getitem__(self, name: str) -> float:
        return self._seconds.get(name, 0.0)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Take time that was counted in one phase to another."""
        self._seconds[source] = self[source] - seconds
        self._seconds[target] = self[target] + seconds


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class StepStatistics:
    """Means over the tokens of an optimizer step: sums per micro-batch, brought together once, when the step ends."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    def add(self, stats: dict[str, Tensor], tokens: Tensor) -> None:
        for name, value in stats.items():
            if name.endswith("/max"):
                seen = self._largest.get(name)
                self._largest[name] = value if seen is None else torch.maximum(seen, value)
            else:
                self.add_sum(name, value * tokens, tokens)

    def add_sum(self, name: str, total: Tensor, count: Tensor) -> None:
        pair = torch.stack((total.detach().float(), count.detach().float()))
        seen = self._sums.get(name)
        self._sums[name] = pair if seen is None else seen + pair

    def add_part(self, name: str, part: Tensor) -> None:
        """A share of a step's value: the shares sum to it, and processes average."""
        count = torch.zeros_like(part) if name in self._sums else torch.ones_like(part)
        self.add_sum(name, part, count)

    def read(self, accelerator: Any) -> Numbers:
        """The means over all processes. Every process asks at the same moment."""
        sums, largest, self._sums, self._largest = self._sums, self._largest, {}, {}
        numbers: Numbers = {}
        if sums:
            totals = accelerator.reduce(torch.stack(list(sums.values())), reduction="sum").tolist()
            numbers = {n: total / count for n, (total, count) in zip(sums, totals, strict=True) if count}
        if largest:
            gathered = accelerator.gather(torch.stack(list(largest.values())).float().unsqueeze(0)).amax(0).tolist()
            numbers.update(zip(largest, gathered, strict=True))
        return numbers
