"""The metrics of a step, named as in docs/metrics.md."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dew.engines.metrics import Numbers, answer_metrics, credit_metrics, entropy_sums
from dew.engines.trl.batch import Batch, Columns, loss_mask
from dew.engines.trl.guide import OWN
from dew.engines.trl.nonfinite import nonfinite_tokens

NONFINITE = "nonfinite/"


class Clock:
    """Seconds per phase since the last `read`, nested phases excluded. On a GPU a phase ends when its work has."""

    def __init__(self) -> None:
        self._seconds: Numbers = {}
        self._nested = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, outer, self._nested = _now(), self._nested, 0.0
        try:
            yield
        finally:
            elapsed = _now() - start
            self._seconds[name] = self[name] + elapsed - self._nested
            self._nested = outer + elapsed

    def read(self) -> Numbers:
        seconds, self._seconds = self._seconds, {}
        return seconds

    def __getitem__(self, name: str) -> float:
        return self._seconds.get(name, 0.0)


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class StepStatistics:
    """Means over the tokens of an optimizer step: summed per micro-batch, reduced over processes once per step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    def add(self, stats: dict[str, Tensor], tokens: Tensor) -> None:
        for name, value in stats.items():
            if name.endswith("/max"):
                seen = self._largest.get(name)
                self._largest[name] = value if seen is None else torch.maximum(seen, value)
            else:
                self._add(name, value * tokens, tokens)

    def add_update(self, loss: Tensor, inputs: Columns, logp: Tensor, entropy: Tensor) -> None:
        """The loss, entropies and non-finite tokens of a micro-batch."""
        mask, author = loss_mask(inputs), inputs.get("author")
        own = torch.ones(len(mask), dtype=torch.bool, device=mask.device) if author is None else author == OWN
        for name, (total, count) in entropy_sums(entropy, mask, inputs["verdict"], own).items():
            self._add(name, total, count)
        for place, count in nonfinite_tokens(logp, entropy, mask).items():
            self._add(NONFINITE + place, count, torch.ones_like(count))
        # The losses of micro-batches sum to that of the step, and processes average: count it once.
        self._add("loss", loss, torch.zeros_like(loss) if "loss" in self._sums else torch.ones_like(loss))

    def _add(self, name: str, total: Tensor, count: Tensor) -> None:
        pair = torch.stack((total.detach().float(), count.detach().float()))
        seen = self._sums.get(name)
        self._sums[name] = pair if seen is None else seen + pair

    def read(self, accelerator: Any) -> tuple[Numbers, list[str]]:
        """The means over all processes, and where there were non-finite tokens. A collective call; resets."""
        sums, largest, self._sums, self._largest = self._sums, self._largest, {}, {}
        numbers: Numbers = {}
        if sums:
            totals = accelerator.reduce(torch.stack(list(sums.values())), reduction="sum").tolist()
            numbers = {n: total / count for n, (total, count) in zip(sums, totals, strict=True) if count}
        if largest:
            gathered = accelerator.gather(torch.stack(list(largest.values())).float().unsqueeze(0)).amax(0).tolist()
            numbers.update(zip(largest, gathered, strict=True))
        places = {name: numbers.pop(name) for name in list(numbers) if name.startswith(NONFINITE)}
        return numbers, [name.removeprefix(NONFINITE) for name, count in places.items() if count > 0]


def generation_metrics(batch: Batch, size: int, names: Sequence[str], threshold: float, seconds: float) -> Numbers:
    """Answers, credit and groups of a generation with groups of `size`, sampled in `seconds`."""
    credit, groups = batch.credit, batch.groups
    assert credit is not None
    numbers = answer_metrics(batch.answers, list(names), threshold)
    numbers.update(credit_metrics(batch, credit))
    numbers.update({f"groups/{name}": float(n) for name, n in groups.items() if name != "mixed"})
    mixed = groups.get("mixed", int(credit.signal.sum()) // size)
    numbers["groups/mixed_share"] = mixed / groups["sampled"]
    if seconds > 0:
        numbers["tokens_per_second"] = float(batch.answers["length"].sum()) / seconds
    if batch.guided.any():
        numbers["guide/accuracy"] = float(credit.correct[batch.guided].float().mean())
        numbers["guide/rescued_share"] = float(credit.failed.float().mean())
    return numbers
