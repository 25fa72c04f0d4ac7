"""What costs a run a step, or ends it: infinities and NaNs, a full disk.

An infinity or a NaN in rewards, logits, advantages, loss or gradient skips the step; three in a row stop the run. Every
process looks at the same gathered numbers, so all of them skip together. A skipped step leaves weights and optimizer
unchanged; the step number, the schedule and the prompts advance.
"""

import errno
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dew.errors import DewError, EngineError, Problem

PATIENCE = 3
"""Skipped steps in a row that stop the run. A generation counts once, however many steps are trained on it."""


def not_finite(parts: Tensor, finite: Tensor, advantages: Tensor, names: Sequence[str]) -> str | None:
    """What is not finite: (N, F) rewards, where NaN is none, logits of (N,) answers, (N, T) advantages."""
    for name, bad in zip(names, parts.isinf().sum(0).tolist(), strict=True):
        if bad:
            return f"reward {name!r} of {bad} answers"
    if not finite.all():
        return "logits"
    return None if advantages.isfinite().all() else "advantages"


def finite_only(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Without infinities and NaNs: one would spoil every mean that it enters."""
    return {name: x for name, x in numbers.items() if not isinstance(x, float) or math.isfinite(x)}


class NonFinite:
    """Decides which steps are skipped, and stops the run after three in a row."""

    def __init__(self) -> None:
        self._generation: str | None = None
        """What is not finite in the current generation."""
        self._counted = False
        self._row: list[str] = []

    def start(self, generation: str | None) -> None:
        self._generation, self._counted = generation, False

    def check(self, step: int, norm: float, *, loss: float = 0.0, scaled: bool) -> str | None:
        """Why the step must be skipped, or None. Raises when it is one too many.

        `scaled`: in fp16 a loss scaler overflows until it has found its scale. Such a step is skipped, but does not
        count towards stopping the run.
        """
        found = self._generation or (None if math.isfinite(loss) else "loss")
        overflow = found is None and scaled
        if found is None and not math.isfinite(norm):
            found = f"gradient: norm {norm}"
        if found is None:
            self._row = []
            return None
        if not overflow and not (self._generation and self._counted):
            self._row.append(f"step {step}, {found}")
            self._counted = True
        if len(self._row) >= PATIENCE:
            listed = "".join(f"\n- {line}" for line in self._row)
            what = f"{PATIENCE} steps in a row had an infinity or a NaN and were skipped; the weights are unchanged."
            remedy = (
                "Rewards: check the reward function. Advantages: look for a division by 0 in the rule. Others: "
                "resume from an earlier checkpoint, lower the learning rate, and train in bf16, not fp16."
            )
            raise EngineError(Problem(f"{what}{listed}\n", remedy=remedy))
        return found

    def state(self) -> dict[str, Any]:
        return {"generation": self._generation, "row": self._row, "counted": self._counted}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._generation, self._row, self._counted = state["generation"], list(state["row"]), bool(state["counted"])


FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""What the system, or a library that writes weights, reports."""
ALMOST_NOTHING = 1 << 20


def disk_full(error: BaseException, folder: Path | str) -> EngineError | None:
    """The error of a run whose disk is full; None if `error` has another cause.

    torch reports only that writing failed, so the free space on the disk counts too.
    """
    free = shutil.disk_usage(folder).free if Path(folder).is_dir() else ALMOST_NOTHING
    full = any(text in str(error) for text in FULL)
    failed = free < ALMOST_NOTHING and isinstance(error, OSError | RuntimeError)
    if isinstance(error, DewError) or not (full or failed):
        return None
    what, why = f"{folder}: the disk is full, and the run stopped.", "Earlier checkpoints are complete."
    remedy = f"Free some space, then run: dew resume {folder}. save_total_limit and records_every limit its size."
    return EngineError(Problem(what, why, remedy))
